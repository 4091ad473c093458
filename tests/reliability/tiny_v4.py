"""A dlrm-v4 run of 20 steps, and the parts of its outcome that interruptions must not change."""

from __future__ import annotations

import functools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from killable import KILLED, Killable, Trouble, claims, home

from recperf.cli import main
from recperf.data.known.yambda import synthesize
from recperf.data.known.yambda.yambda_like import YambdaLike
from recperf.folders import alone
from recperf.runs.mlperf.check import scan
from recperf.train.checkpoint import CheckpointStore

DAY = 86_400
EVENTS = YambdaLike(users=24, events_per_user=40, items=60, genres=4, seed=3)
QUIETLY = ["--no-peaks", "--no-report"]
STREAM = [
    "--data.history.length", "6", "--data.history.scan", "20", "--data.windows.min-history", "2",
    "--data.windows.seconds", str(50 * DAY), "--train.batch-size", "32", "--train.device", "cpu",
    "--target.beat", "none", "--evaluate.batch-size", "110",
]  # fmt: skip
MODEL = [
    "--model.row-scale", "0.02", "--model.hstu.dropout", "0.1", "--model.input-dropout", "0.2",
    "--model.table-dim", "8", "--model.encoder-hidden", "8", "--model.item-hidden", "8",
    "--model.head-hidden", "8", "--model.positions", "32", "--model.time-buckets", "16", "--model.hstu.dim", "8",
    "--model.hstu.layers", "1", "--model.hstu.heads", "1", "--model.hstu.qk-dim", "8", "--model.hstu.v-dim", "8",
    "--model.hstu.max-length", "16",
]  # fmt: skip
SAVING = [
    "--evaluate.every-windows", "1", "--train.checkpoint-windows", "1", "--train.checkpoint-steps", "3",
    "--train.keep-last", "2", "--train.checkpoint-background", "on", "--mlperf.log",
]  # fmt: skip
COMPARED = ("step", "metric", "window", "training", "evaluation")
"""Events of the training, not of the process."""


def run_straight(place: Path) -> None:
    """Train without an interruption, in the fork server: torch's lazy initialization happens before any fork."""
    synthesize.write_store(EVENTS, place / "events")
    assert main([*command_line(place / "straight", place / "events"), "--quiet"]) == 0


def command_line(folder: Path, events: Path) -> list[str]:
    """The command line that starts a run in a folder."""
    where = ["--data.path", str(events), "--run-dir", str(folder), "--data.holdout-windows", "1"]
    return ["run", "dlrm-v4", *where, *STREAM, *MODEL, *SAVING, *QUIETLY]


def begin(folder: Path, *troubles: Trouble) -> Killable:
    """Start a run. The profile of another one saves the seconds in which it would measure steps at the end."""
    own(folder)
    shutil.copyfile(straight_run() / "profile.json", folder / "profile.json")
    return Killable(command_line(folder, home() / "events"), folder.with_suffix(".log"), *troubles)


def own(folder: Path) -> None:
    """Mark a new folder as recperf does: a run is not started in a folder with files of others."""
    with alone(folder, what="starting a run", ours=".*"):
        pass


def resume(folder: Path, *troubles: Trouble, log: Path | None = None) -> Killable:
    return Killable(["run", "--resume", str(folder), *QUIETLY], log or folder.with_suffix(".log"), *troubles)


def continued(folder: Path, *troubles: Trouble) -> Killable:
    """Resume a run, or start it where it has no config yet, as a user would."""
    return resume(folder, *troubles) if (folder / "config.json").exists() else begin(folder, *troubles)


def finish(folder: Path) -> Killable:
    process = continued(folder)
    assert process.wait() == 0, process.output
    return process


def straight_run() -> Path:
    """The folder of the run without an interruption, once it is complete."""
    folder, end = home() / "straight", time.monotonic() + 600
    while not (folder / "seal.json").exists():
        assert time.monotonic() < end, "the fork server cannot train"
        time.sleep(0.02)
    return folder


@functools.cache
def straight() -> dict[str, Any]:
    """The outcome of the run without an interruption."""
    return outcome(straight_run())


@functools.cache
def _interrupted() -> Path:
    folder = home() / "interrupted"
    mark = {"point": "prune: done", "nth": 7, "mark": str(home() / "mark")}
    process = begin(folder, ("kill_at", mark))
    assert process.wait() == KILLED, process.output
    return folder


def interrupted(folder: Path) -> Path:
    """A copy of a run that was killed after its middle."""
    shutil.copytree(_interrupted(), folder)
    return folder


def outcome(folder: Path) -> dict[str, Any]:
    """What interruptions must not change: every bit of the last state, the logs and the result, except times."""
    checkpoints = CheckpointStore(folder=folder / "checkpoints" / "seed-42", notice=lambda text: None)
    names, best = [path.name for path in checkpoints.saved()], checkpoints.best()
    state = checkpoints.load()
    assert state is not None
    assert best is not None
    result = json.loads((folder / "result.json").read_text())
    return {
        "state": state_of(state),
        "kept": names,
        "best": best.name,
        "events": logged(folder),
        "mlperf": mlperf(folder),
        "quality": result["quality"],
        "data": result["data"],
        "claims": claims(folder),
    }


def state_of(saved: dict[str, Any]) -> Any:
    """A saved state without the lengths of the logs: times in them have more or fewer digits."""
    return flat({key: saved[key] for key in ("trial", "position", "history", "rng", "contract")})


def flat(value: Any) -> Any:
    """Tensors as their bytes, so that equality means every bit."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {key: flat(inner) for key, inner in value.items()}
    return [flat(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def logged(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in event.items() if k != "t"} for event in events if event["kind"] in COMPARED]


def mlperf(folder: Path) -> list[tuple[str, Any, dict[str, Any]]]:
    """Keys, values and metadata of the MLPerf log in order; its times must not decrease."""
    lines = scan((folder / "mlperf.log").read_bytes())
    assert not lines.faults
    times = [line.time_ms for line in lines.good]
    assert times == sorted(times)
    return [(line.key, line.value, line.metadata) for line in lines.good]
