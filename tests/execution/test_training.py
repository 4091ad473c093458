"""What a checkpoint holds beside the weights, and when it is written."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import example_runs as examples
import pytest
import torch
from msgspec import convert
from msgspec.structs import replace as replace_fields

from recperf.errors import ConfigError, DataError, MachineError
from recperf.execution import training
from recperf.execution.run import note_start
from recperf.execution.training import SeedTraining, checkpoint_folder, in_background
from recperf.measure.peaks.records import PeakFigure, Peaks, Rates
from recperf.measure.profile_records import WorkloadFigures
from recperf.ops import choice, mlp
from recperf.ops.mlp import native as mlp_native
from recperf.runs.derive import mfu
from recperf.runs.record import Run
from recperf.runs.result import Throughput
from recperf.runs.schemas import ChangeEvent, parse_events
from recperf.stop import StopFlag
from recperf.tasks import CLICK_LABELS
from recperf.train.checkpoint import CheckpointStore
from recperf.train.config import TrainConfig
from recperf.train.loop import Position

RECIPE = SimpleNamespace(steps=9, order=range(3))


@dataclass
class Weights:
    """As much of a trial as its training uses."""

    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(3))
    seen: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    recipe: Any = field(default_factory=lambda: RECIPE)

    def state(self) -> dict[str, Any]:
        return {"model": {"weights": self.weights}, "seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.weights.copy_(state["model"]["weights"])
        self.seen = state["seen"]


def test_paths_that_checkpoints_would_make_too_long_are_refused_before_training() -> None:
    run = Path("/".join(["y" * 199] * 20))
    checkpoint_folder(run, 42, steps=30)
    with pytest.raises(MachineError, match="the path is too long") as refused:
        checkpoint_folder(run / ("z" * 60), 42, steps=30)
    assert all(len(line) < 400 for line in refused.value.lines())


def test_a_linked_folder_of_checkpoints_is_an_error_that_one_rank_prints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(DataError, match="checkpoints is a link, which is not followed") as refused:
        checkpoint_folder(tmp_path, 42, steps=30)
    assert training.current().shared_error is refused.value
    training.current().shared_error = None


@dataclass
class Log:
    """A log that remembers to which states it was rewound."""

    rewound: list[Any] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {"bytes": 7}

    def rewind(self, state: dict[str, Any] | None) -> None:
        self.rewound.append(state)


def seed_training(
    run: Run, trial: Weights, *, contract: Any = None, allow: tuple[str, ...] = (), log: Any = None
) -> SeedTraining:
    whole = SimpleNamespace(
        record=run, report=SimpleNamespace(live=False), stop=StopFlag(), allow=allow, log=log, config=TrainConfig(),
        workload=SimpleNamespace(submission=None, task=CLICK_LABELS), reached=lambda metrics: False,
        changed=(), start=None,
        prepared=SimpleNamespace(settings=SimpleNamespace(sync=None)),
    )  # fmt: skip
    store = CheckpointStore(folder=run.folder / "checkpoints" / "seed-42", notice=pytest.fail)
    made = SeedTraining(cast(Any, whole), 42, cast(Any, trial), store)
    made.contract = contract or {}
    return made


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run.create("micro-dlrm", {}, folder=tmp_path / "run")
    yield made
    made.close()


def test_everything_comes_back(run: Run) -> None:
    log = Log()
    first = seed_training(run, Weights(torch.arange(3.0), torch.ones(5)), contract={"a": 1, "b": [1.5]}, log=log)
    first.evaluator.history.append({"step": 2, "epoch": 0, "metrics": {"auc": 0.1 + 0.2}})
    run.event("step", seed=42, step=2)
    torch.manual_seed(5)
    first.save(Position(1, 2, 5), best=True)
    drawn = torch.rand(4)
    run.event("step", seed=42, step=3)
    again = seed_training(run, Weights(), contract={"a": 1, "b": [1.5], "new": 0}, log=log)
    assert again.restore() == Position(1, 2, 5)
    assert torch.equal(torch.rand(4), drawn)
    assert again.trial.state()["model"]["weights"].tolist() == [0, 1, 2]
    assert again.trial.state()["seen"].tolist() == [1] * 5
    assert again.evaluator.history == first.evaluator.history
    assert log.rewound == [{"bytes": 7}]
    assert b'"step": 3' not in (run.folder / "events.jsonl").read_bytes()


def test_other_operators_than_the_run_was_trained_with_are_refused_or_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_used", {})
    mlp.choose("auto", torch.device("cpu"))
    seed_training(run, Weights()).save(Position(1, 1, 4), best=False)
    assert seed_training(run, Weights()).restore().step == 4
    monkeypatch.setattr(mlp_native, "library", lambda: "no C compiler on this machine")
    with pytest.raises(ConfigError, match="operators is 'reference: mlp'; this run has 'native: mlp'") as refused:
        seed_training(run, Weights()).restore()
    assert refused.value.where["reason"] == "no C compiler on this machine"
    assert refused.value.fix == "--allow-change operators, or a new run"
    resumed, notices = seed_training(run, Weights(), allow=("operators",)), []
    resumed.report = cast(Any, SimpleNamespace(notice=notices.append))
    assert resumed.restore().step == 4
    assert notices == ["operators change from native: mlp to reference: mlp"]
    (change,) = parse_events((run.folder / "events.jsonl").read_bytes().splitlines())
    assert isinstance(change, ChangeEvent)
    assert (change.field, change.step) == ("operators", 4)


def test_what_only_other_ranks_lack_is_no_misfit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_training(run, Weights()).save(Position(0, 1, 1), best=False)

    def refuse(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Weights, "restore", refuse)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        seed_training(run, Weights()).restore()


def test_a_state_of_another_shape_is_not_stretched(run: Run) -> None:
    seed_training(run, Weights(torch.zeros(1)), contract={"dim": 1}).save(Position(0, 1, 1), best=False)
    with pytest.raises(ConfigError, match="does not fit this config: dim is 3; this run has 1") as refused:
        seed_training(run, Weights(), contract={"dim": 3}, allow=("dim",)).restore()
    assert refused.value.where["state"].startswith("model/weights is (3,)")


def forged(**changes: Any) -> Any:
    def apply(saved: dict[str, Any]) -> dict[str, Any]:
        for path, value in changes.items():
            *inside, name = path.split("__")
            place = saved
            for key in inside:
                place = place[key]
            place[name] = value
        return saved

    return apply


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (forged(position={"epoch": 0, "batch": 2, "step": -2}), "position.step should be an integer at least 0"),
        (forged(position={"epoch": 1, "batch": 2, "step": 5}), "does not match step 2"),
        (forged(position={"epoch": 7, "batch": 4, "step": 2}), "is outside the training: 9 steps"),
        (forged(seed=43), "it belongs to seed 43"),
        (forged(history=[{"step": 7, "epoch": 0, "metrics": {"auc": 0.5}}]), "its evaluations do not belong to"),
        (forged(rng__cpu=torch.zeros(3)), "its random state is invalid"),
        (forged(trial={"model": {"weights": torch.zeros(1 << 10)}}), "its state does not fit: model/weights is (3,)"),
        (forged(trial=[1]), "trial should be an object"),
    ],
)
def test_forged_states_are_named_and_older_checkpoints_used(run: Run, forge: Any, reason: str) -> None:
    made = seed_training(run, Weights(torch.ones(3)))
    made.store.keep_last = 2
    run.event("step", seed=42, step=1)
    made.save(Position(0, 1, 1), best=False)
    write = made.store.save
    made.store.save = lambda step, state, best: write(step, forge(state), best=best)  # type: ignore[method-assign]
    made.save(Position(0, 2, 2), best=False)
    notices: list[str] = []
    again = seed_training(run, Weights())
    again.store.notice = notices.append
    assert again.restore() == Position(0, 1, 1)
    assert again.trial.state()["model"]["weights"].tolist() == [1, 1, 1]
    assert reason in notices[0]
    assert notices[1] == "continuing from checkpoint step-00000001, the newest intact one"


def test_a_run_that_was_allowed_to_change_is_not_counted_from_its_first_step(run: Run) -> None:
    """Its first epoch may have had other batches."""
    seed_training(run, Weights()).save(Position(1, 2, 7), best=False)
    with pytest.raises(DataError, match="is outside the training"):
        refused = seed_training(run, Weights())
        refused.store.notice = lambda text: None
        refused.restore()
    assert seed_training(run, Weights(), allow=("train.batch_size",)).restore() == Position(1, 2, 7)


@pytest.mark.parametrize("lost", ["checkpoints", "progress.json too"])
def test_a_run_that_lost_its_checkpoints_is_not_started_over(run: Run, lost: str) -> None:
    run.event("step", seed=42, step=1, loss=0.5)
    seed_training(run, Weights()).save(Position(0, 1, 1), best=False)
    logged = run.event_bytes
    shutil.rmtree(run.folder / "checkpoints")
    if lost != "checkpoints":
        run.remove("progress.json")
    note_start(run)
    with pytest.raises(DataError, match="all checkpoints of this training are missing") as refused:
        seed_training(run, Weights()).restore()
    assert refused.value.fix == "restore the folder from a backup, or start a new run"
    assert run.event_bytes == logged


def test_a_run_killed_before_its_first_save_starts_over(run: Run) -> None:
    note_start(run)
    run.event("step", seed=42, step=1, loss=0.5)
    note_start(run)
    assert seed_training(run, Weights()).restore() == Position()


def test_a_damaged_log_is_no_damaged_checkpoint(run: Run) -> None:
    made = seed_training(run, Weights())
    made.store.keep_last = 2
    for step in (1, 2):
        run.event("step", seed=42, step=step, loss=0.5)
        made.save(Position(0, step, step), best=False)
    (run.folder / "events.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"events\.jsonl is shorter than the checkpoint says") as refused:
        seed_training(run, Weights()).restore()
    assert refused.value.where["checkpoint"] == "step-00000002"
    assert "remove this checkpoint to continue from an older one" in (refused.value.fix or "")


def test_a_damaged_best_checkpoint_is_mentioned(run: Run) -> None:
    made = seed_training(run, Weights())
    made.save(Position(0, 1, 1), best=True)
    made.save(Position(0, 2, 2), best=False)
    best = run.folder / "checkpoints" / "seed-42" / "step-00000001"
    notices: list[str] = []
    for damage in (lambda: (best / "rank0-00000.safetensors").write_bytes(b"?"), lambda: shutil.rmtree(best)):
        damage()
        again = seed_training(run, Weights())
        again.store.notice = notices.append
        assert again.restore().step == 2
    assert notices[0].startswith("the best checkpoint step-00000001 is damaged (rank0-00000.safetensors has 1 bytes")
    assert notices[1:] == ["the best checkpoint step-00000001 is missing; step-00000002 is intact"]


def test_a_stop_waits_for_its_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = seed_training(run, Weights())
    made.store.background = True
    made.whole.stop.received = 15
    made.save(Position(0, 1, 1), best=False)
    assert "the state is saved" in made.stopped(Position(0, 1, 1)).what
    assert [path.name for path in made.store.saved()] == ["step-00000001"]

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("recperf.train.checkpoint_folder.os.write", full)
        made.save(Position(0, 2, 2), best=False)
        with pytest.raises(MachineError, match="the disk is full"):
            made.stopped(Position(0, 2, 2))


def test_writing_in_the_background_wants_room_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "available_bytes", lambda: 4 << 30)
    whole, more = (torch.empty(size, dtype=torch.uint8, device="meta") for size in (1 << 30, (1 << 30) + 1))
    assert in_background(TrainConfig(), whole)
    assert not in_background(TrainConfig(checkpoint_background="off"), whole)
    assert in_background(TrainConfig(checkpoint_background="on"), more)
    assert not in_background(TrainConfig(), more)


def test_baselines_that_were_changed_are_refused_unless_the_data_was(run: Run) -> None:
    run.write("baselines.json", {"majority": {"auc": 0.5}})
    seed_training(run, Weights(), contract={"data.events": 1}).save(Position(0, 1, 1), best=False)
    run.write("baselines.json", {"majority": {"auc": 0.1}})
    with pytest.raises(DataError, match=r"baselines\.json has changed since the checkpoint was saved"):
        seed_training(run, Weights(), contract={"data.events": 1}).restore()
    assert seed_training(run, Weights(), contract={"data.events": 2}, allow=("data.events",)).restore().step == 1
    (run.folder / "baselines.json").unlink()
    assert seed_training(run, Weights(), contract={"data.events": 1}).restore().step == 1


def test_baselines_that_are_younger_than_the_checkpoint_are_computed_again(run: Run) -> None:
    seed_training(run, Weights()).save(Position(0, 1, 1), best=False)
    run.write("baselines.json", {"majority": {"auc": 0.1}})
    assert seed_training(run, Weights()).restore().step == 1
    assert run.digest("baselines.json") is None


STREAMS = ("copy", "read", "cached", "gather", "update")


def test_mfu_is_of_the_measured_batch_and_of_ceilings_of_its_threads_and_precision() -> None:
    """2,000 FLOPs a sample at 500 samples/s are a thousandth of 1 GFLOP/s, in float32 with one thread alone."""
    peaks = convert(examples.peaks(), Peaks)
    gemm = {"float32": PeakFigure(1e9, 1e9, 1e9, n=3)}
    peaks.other_threads["1"] = Rates(gemm=gemm, **{name: getattr(peaks, name) for name in STREAMS})
    profile = convert(examples.budget({"top": 1.0, "other": 1.0}, {"top": 5e5}), WorkloadFigures)
    profile.batch_size, profile.threads = 250, 1
    steady = Throughput(samples_per_s=500.0, samples=1, steps=1, seconds=1.0)
    assert mfu(profile, peaks, steady) == pytest.approx(0.001)
    assert mfu(replace_fields(profile, threads=2), peaks, steady) == pytest.approx(0.001 / 70)
    assert mfu(replace_fields(profile, threads=3), peaks, steady) is None
    assert mfu(replace_fields(profile, precision="bfloat16"), peaks, steady) is None
    assert mfu(profile, peaks, None) is None
