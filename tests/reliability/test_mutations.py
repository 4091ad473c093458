"""Random damage to checkpoints, logs and data of an interrupted run: it resumes correctly or reports the damage."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mutations import mutate
from tiny_v4 import COMPARED, INTERRUPTED, QUIETLY, finish, flat, interrupted, outcome, store, straight

from recperf.cli import main
from recperf.errors import RecperfError
from recperf.execution import training
from recperf.execution.training import SeedTraining
from recperf.runs.resume import fixed_fields
from recperf.train.loop import Position

TESTS, EACH = 20, 25
SECONDS = 30
"""Time after which a start counts as hanging."""


class Reached(RecperfError):
    """Raised where the training would continue."""

    exit_code = 99


@dataclass
class Start:
    """How a resumed run starts, or why it does not."""

    code: int
    output: str
    step: int = -1
    facts: Any = None
    """Everything that determines how it continues."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SeedTraining, Position]]:
    """Stops every training before its first step, and records it."""
    starts: list[Any] = []

    def train(recipe: Any, start: Position, watch: SeedTraining) -> None:
        starts.append((watch, start))
        raise Reached("continuing")

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(SeedTraining, "_watchers", lambda self, timer: self)
    return starts


@contextlib.contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError("the start hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def resumed(folder: Path, started: list[Any]) -> Start:
    """`recperf run --resume` up to its first step."""
    output = io.StringIO()
    started.clear()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), no_longer_than(SECONDS):
        code = main(["run", "--resume", str(folder), *QUIETLY])
    if not started:
        return Start(code, output.getvalue())
    one, position = started[0]
    try:
        batches = _digest(one.job.prepared)
    except RecperfError as error:
        # The loader would raise this at that batch.
        return Start(error.exit_code, output.getvalue())
    facts = {
        "state": flat(one.trial.state()),
        "position": position,
        "history": one.evaluator.history,
        "contract": fixed_fields(one.job.config),
        "data": batches,
        "baselines": json.loads((folder / "baselines.json").read_bytes()),
        "events": _events((folder / "events.jsonl").read_text()),
        "mlperf": (folder / "mlperf.log").read_bytes(),
    }
    return Start(code, output.getvalue(), position.step, facts)


def _digest(prepared: Any) -> str:
    """Digest of every batch that training and evaluation would read."""
    digest = hashlib.sha256()
    for order in (prepared.train_order(), prepared.valid_order(prepared.holdout)):
        for number in range(len(order)):
            batch = prepared.histories.batch(order.batch(number))
            for tensor in (batch.features.values_V, batch.features.offsets_FB1, batch.actions_T, batch.times_T):
                digest.update(tensor.numpy().tobytes())
            digest.update(batch.labels_B.numpy().tobytes() + batch.query_times_B.numpy().tobytes())
    return digest.hexdigest()


def _events(text: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in event.items() if k != "t"} for event in events if event["kind"] in COMPARED]


@dataclass
class Bench:
    """A folder in which an interrupted run and its data are damaged and restored."""

    place: Path
    pristine: Path

    @property
    def run(self) -> Path:
        return self.place / "run"

    def renew(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.pristine, self.place)

    def groups(self) -> list[list[Path]]:
        """Groups of files that are damaged equally often: checkpoints, the run's other files, the data."""
        checkpoints = sorted(path for path in (self.run / "checkpoints").rglob("*") if path.is_file())
        own = ["config.json", "events.jsonl", "mlperf.log", "baselines.json", "progress.json", "data.json"]
        data = sorted(p for p in (self.place / "events").rglob("*") if p.is_file() and p.suffix != ".lock")
        return [checkpoints, [self.run / name for name in [*own, "machine.json"]], data]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    pristine = tmp_path / "pristine"
    interrupted(pristine / "run")
    shutil.copytree(store(), pristine / "events")
    made = Bench(tmp_path / "bench", pristine)
    config = pristine / "run" / "config.json"
    config.write_text(config.read_text().replace(json.dumps(str(store())), json.dumps(str(made.place / "events"))))
    return made


def wrong(start: Start, known: dict[int, Any]) -> str | None:
    """What a resumed run did wrong, if anything."""
    if "Traceback" in start.output or start.code not in (3, 4, Reached.exit_code):
        return f"exit {start.code}: {start.output}"
    errors = [line for line in start.output.splitlines() if line.startswith("error:")]
    if len(errors) != 1:
        return f"not one error line: {start.output}"
    if start.code != Reached.exit_code:
        return None
    if start.step not in known:
        return f"continues at step {start.step}"
    differing = [name for name, value in start.facts.items() if value != known[start.step][name]]
    if differing:
        return f"continues at step {start.step} with other {', '.join(differing)}: {start.output}"
    if start.step < INTERRUPTED and "the newest intact one" not in start.output:
        return f"continues at step {start.step} without a notice: {start.output}"
    return None


def intact(bench: Bench, started: list[Any]) -> dict[int, Any]:
    """How the run continues from each of its checkpoints."""
    known: dict[int, Any] = {}
    bench.renew()
    for _ in list((bench.run / "checkpoints" / "seed-42").glob("step-*")):
        start = resumed(bench.run, started)
        assert start.code == Reached.exit_code, start.output
        known[start.step] = start.facts
        bench.renew()
        for step in known:
            shutil.rmtree(bench.run / "checkpoints" / "seed-42" / f"step-{step:08d}")
    assert max(known) == INTERRUPTED
    return known


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, TESTS))])
def test_damage_is_survived_or_reported(seed: int, bench: Bench, started: list[Any]) -> None:
    known = intact(bench, started)
    faults, continuing = [], []
    for number in range(EACH):
        bench.renew()
        done = mutate(bench.groups(), random.Random(f"{seed} {number}"))
        start = resumed(bench.run, started)
        if (what := wrong(start, known)) is not None:
            faults.append(f"{number}: {done}: {what}")
        elif start.code == Reached.exit_code:
            continuing.append(number)
    assert not faults, "\n".join(faults)
    bench.renew()
    mutate(bench.groups(), random.Random(f"{seed} {continuing[0]}"))
    finish(bench.run)
    assert outcome(bench.run) == straight().outcome
