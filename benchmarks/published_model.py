"""The published DLRMv4 with all of its tables on one device, as a user runs it.

Runs `recperf run dlrm-v4 --preset mlperf --train.deterministic` on synthetic events with the published statistics,
which are made first. The run saves once, is killed (SIGKILL) later, and resumed; losses that both processes logged must
be equal to the bit. Then rows are scored and items recommended from its checkpoint. `ready` is the time from the start
of the command until steps run at their usual rate, kernels compiled: 20 steps have ended, less 20 times the median one.
What the time limit leaves out has no row.

Run as `python benchmarks/published_model.py --steps 200`; arguments after `--` go to `recperf run`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from _rows import record, row, show
from recperf.data.events.store import EventStore
from recperf.data.known import event_files as catalogue
from recperf.data.known.yambda.yambda_like import of_size

NAME, VARIANT = "published_model", "mlperf, one device"
GROUP = 50
"""Steps whose losses a run logs together."""
WARM_UP = 20
POLL_S = 0.02
LAST_LINES = 12


class OutOfTime(Exception):
    """The time limit is reached."""


class Training:
    """A training process, its log and what it prints, with the seconds since its start."""

    def __init__(self, arguments: list[str], run: Path, deadline: float) -> None:
        self.log, self.deadline, self.began = run / "events.jsonl", deadline, perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recperf", "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.said: list[tuple[float, str]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((round(perf_counter() - self.began, 2), line.strip()))

    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_bytes().split(b"\n")[:-1] if self.log.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[float, dict[str, Any]]:
        """Wait until the log has such an event; returns the seconds since the start of the process, and the event."""
        while True:
            for event in reversed(self.events()):
                if wanted(event):
                    return perf_counter() - self.began, event
            if self.process.poll() is not None:
                sleep(0.2)
                last = "\n".join(line for _, line in self.said[-LAST_LINES:])
                raise RuntimeError(f"the run ended with {self.process.returncode}:\n{last}")
            if perf_counter() > self.deadline:
                raise OutOfTime
            sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL, as after a failure of the machine."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def losses(self) -> dict[int, str]:
        return {one["step"]: float(one["loss"]).hex() for one in self.events() if one["kind"] == "step"}


def is_timing(event: dict[str, Any], part: str, step: int) -> bool:
    return (event["kind"], event.get("part"), event.get("step")) == ("timing", part, step)


def answered(arguments: list[str], deadline: float) -> tuple[float, dict[str, Any]]:
    """Wall seconds and the JSON answer of a command."""
    began, left = perf_counter(), max(1.0, deadline - perf_counter())
    command = [sys.executable, "-m", "recperf", *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        raise OutOfTime from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return perf_counter() - began, json.loads(done.stdout)


class Measured:
    """The rows of this benchmark."""

    def __init__(self, conditions: dict[str, Any]) -> None:
        self.conditions, self.rows = conditions, list[dict[str, Any]]()

    def add(self, metric: str, unit: str, values: list[float], **facts: Any) -> None:
        self.rows.append(row(NAME, VARIANT, metric, unit, values, {**self.conditions, **facts}))
        print(show(self.rows[-1]), facts, flush=True)


def trained(options: argparse.Namespace, run: Path, deadline: float, out: Measured) -> bool:
    """Train, save, kill, resume and compare; whether all losses are equal."""
    saved, steps = options.save_at, options.steps
    arguments = [
        "dlrm-v4", "--preset", "mlperf", "--train.deterministic", "--data.events", str(options.events),
        "--train.checkpoint-steps", str(saved), "--run-dir", str(run), "--no-report", *options.more,
    ]  # fmt: skip
    first = Training(arguments, run, deadline)
    try:
        warm, _ = first.wait_for(lambda event: is_timing(event, "warmup", WARM_UP))
        _, steady = first.wait_for(lambda event: is_timing(event, "steady", saved))
        usual = statistics.median(steady["step_ms"])
        out.add("ready", "s", [warm - WARM_UP * usual * 1e-3], said=first.said[:LAST_LINES])
        out.add(
            "step", "ms", steady["step_ms"], batch=steady["batch"], wall_ms=1e3 * steady["seconds"] / steady["steps"]
        )
        _, save = first.wait_for(lambda event: is_timing(event, "save", saved))
        folder = next(one for one in (run / "checkpoints").rglob("step-*") if one.is_dir())
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        out.add("save", "s", [save["seconds"]], checkpoint_bytes=size)
        first.wait_for(lambda event: event["kind"] == "step" and event["step"] >= steps)
    finally:
        first.kill()
    losses = first.losses()
    second = Training(["--resume", str(run), "--no-report"], run, deadline)
    try:
        warm, _ = second.wait_for(lambda event: is_timing(event, "warmup", saved + WARM_UP))
        out.add("ready to resume", "s", [warm - WARM_UP * usual * 1e-3], said=second.said[:LAST_LINES])
        second.wait_for(lambda event: event["kind"] == "step" and event["step"] >= steps)
    finally:
        second.kill()
    again = second.losses()
    both = [step for step in again if step > saved and step in losses]
    different = [step for step in both if again[step] != losses[step]]
    out.add("equal losses after resume", "steps", [len(both) - len(different)], compared=len(both))
    return not different and bool(both)


def used(options: argparse.Namespace, store: EventStore, run: Path, deadline: float, out: Measured) -> None:
    """Score the held-out rows and recommend items."""
    device, scores = ["--device", options.device], str(run.parent / "scores.parquet")
    wall, answer = answered(["score", str(run), "--held-out", "--output", scores, *device], deadline)
    out.add("score", "s", [answer["seconds"]], rows=answer["rows"], command_s=wall)
    users = [str(user) for user in store.user_ids_U[: options.users].tolist()]
    wall, answer = answered(["recommend", str(run), "--users", *users, "--k", "10", *device], deadline)
    out.add("recommend", "s", [answer["seconds"]], users=answer["users"], items=store.items, command_s=wall)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=60_000_000)
    parser.add_argument("--steps", type=int, default=200, help=f"killed there; a multiple of {GROUP}")
    parser.add_argument("--save-at", type=int, default=0, help="by default the half of the steps")
    parser.add_argument("--users", type=int, default=3, help="to recommend for")
    parser.add_argument("--seconds", type=float, default=400.0, help="time limit, the events not counted")
    parser.add_argument("--folder", type=Path, help="parent of the run's folder")
    parser.add_argument("--device", default="auto", help="of score and recommend")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("more", nargs="*", help="after --: further arguments of recperf run")
    options = parser.parse_args(arguments)
    options.steps = max(2 * GROUP, options.steps // GROUP * GROUP)
    options.save_at = options.save_at or options.steps // 2 // GROUP * GROUP
    return options


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    began = perf_counter()
    store = catalogue.embedded(say=print, config=of_size(options.events))
    conditions = {
        "events": store.events, "users_of_the_data": store.users, "items": store.items, "more": options.more,
        "making_events_s": round(perf_counter() - began, 1),
    }  # fmt: skip
    out, deadline, equal = Measured(conditions), perf_counter() + options.seconds, True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = Path(folder) / "run"
        try:
            equal = trained(options, run, deadline, out)
            used(options, store, run, deadline, out)
        except OutOfTime:
            print(f"the time limit of {options.seconds:g} s is reached")
        except RuntimeError as error:
            # What was measured before is recorded.
            print(error)
            equal = False
    if out.rows and not options.no_record:
        print(f"rows appended to {record(out.rows).name}")
    return 0 if equal else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
