"""Curves that leave a run. A logger that fails ends no training; wandb is a fake with its signatures."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import example_runs as examples
import pytest
from msgspec import convert

from recperf.errors import MachineError
from recperf.measure.profile import StepProfile
from recperf.runs.loggers import LOGGERS, Curves, scalars_of
from recperf.runs.record import Run
from recperf.runs.schemas import Event, event_of

STEPS = [
    {"kind": "step", "seed": 3, "step": step, "loss": 1 / step, "gradient_norm": 2.0, "learning_rate": 0.1}
    for step in (1, 10, 20, 30)
]
METRIC = {"kind": "metric", "seed": 3, "step": 20, "epoch": 1, "split": "valid", "auc": 0.75}
RESULT: Any = SimpleNamespace(
    quality=SimpleNamespace(seeds=[SimpleNamespace(seed=3)], metrics={"auc": 0.75}),
    performance=SimpleNamespace(budget={"top": 1.0}),
)
PROFILE = convert(examples.profile(), StepProfile)
PROFILE.shares = {"python": 0.9}


class Log:
    """The log of a run; `events` is what it holds."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.kept = [*events]

    def events(self) -> list[Any]:
        return [event_of(dict(event)) for event in self.kept]


def trained(name: str, folder: Path, steps: list[dict[str, Any]], *, done: int = 0, end: bool = True) -> None:
    """A training that resumes after `done` steps."""
    notices: list[str] = []
    curves = Curves([name], folder, notices.append)
    run = cast(Run, Log(*(event for event in [*STEPS, METRIC] if event["step"] <= max(done, steps[-1]["step"]))))
    curves.begin(run, 3, done)
    for event in steps:
        curves.event(event["kind"], {key: value for key, value in event.items() if key != "kind"})
    if end:
        curves.finish(run, RESULT, PROFILE, {"train": {"batch_size": 8, "layers": [4, 1], "none": None}})
    curves.close()
    assert not notices


def points(event: dict[str, Any]) -> dict[str, float]:
    parsed = event_of(dict(event))
    assert isinstance(parsed, Event)
    return scalars_of(parsed)


def test_points_of_events() -> None:
    assert points(STEPS[0]) == {"train/loss": 1.0, "train/gradient_norm": 2.0, "train/learning_rate": 0.1}
    assert points(METRIC) == {"valid/auc": 0.75}
    assert points({"kind": "step", "seed": 3, "step": 2, "loss": 1.0}) == {}
    assert points({**STEPS[0], "gradient_norm": None}).keys() == {"train/loss", "train/learning_rate"}
    timing = {"kind": "timing", "seed": 3, "step": 9, "part": "steady", "seconds": 2.0, "samples": 100}
    assert points(timing) == {"throughput/samples_per_s": 50.0}


def test_a_logger_that_fails_is_dropped_with_one_notice(tmp_path: Path) -> None:
    notices: list[str] = []
    curves = Curves(["tensorboard"], tmp_path, notices.append)
    curves.begin(cast(Run, Log()), 3, 0)
    curves.loggers["tensorboard"].close()
    for _ in range(3):
        curves.event("step", STEPS[0] | {"kind": "step"})
    curves.finish(cast(Run, Log()), RESULT, PROFILE, {})
    (notice,) = notices
    assert notice.startswith("nothing more is logged to tensorboard: AttributeError")


@pytest.mark.parametrize("name", LOGGERS)
def test_a_package_that_is_missing_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if name in module.split(".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MachineError, match=f"--log {name} needs {name}") as caught:
        Curves([name], tmp_path, print)
    assert caught.value.fix == f"pip install 'recperf[{name}]'"
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert name in extras


class WandbRun:
    """The part of wandb's Run that is used; like it, it ignores steps that it has."""

    runs: ClassVar[dict[str, WandbRun]] = {}

    def __init__(self, id: str) -> None:
        self.id, self.step, self.finished = id, 0, False
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.config = SimpleNamespace(update=self._config)
        self.values: dict[str, Any] = {}

    def _config(self, d: dict[str, Any], allow_val_change: bool | None = None) -> None:
        self.values = d

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        if step >= self.step:
            self.history.append((step, data))
            self.step = step

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        self.finished = True


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained("tensorboard", tmp_path, STEPS[:3], end=False)
    trained("tensorboard", tmp_path, STEPS[1:], done=1)
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "seed-3")).Reload()
    assert [point.step for point in shown.Scalars("train/loss")] == [1, 10, 20, 30]
    assert shown.Scalars("result/auc")[0].value == 0.75
    assert "config/text_summary" in shown.Tags()["tensors"]


def init(
    entity: str | None = None, project: str | None = None, dir: Any = None, id: str | None = None,
    name: str | None = None, notes: str | None = None, tags: Any = None, config: Any = None, group: str | None = None,
    job_type: str | None = None, mode: str | None = None, reinit: Any = None, resume: Any = None,
) -> WandbRun:  # fmt: skip
    assert id is not None
    assert not set(id) & set("/\\#?%:")
    assert (project, mode, resume) == ("recperf", "offline", "allow")
    return WandbRun.runs.setdefault(id, WandbRun(id))


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", cast(ModuleType, SimpleNamespace(init=init)))
    monkeypatch.setattr(WandbRun, "runs", {})
    folder = tmp_path / "50%: a#'1'"
    trained("wandb", folder, STEPS[:3], end=False)
    trained("wandb", folder, STEPS[1:], done=1)
    (run,) = WandbRun.runs.values()
    assert run.finished
    assert [step for step, data in run.history if "train/loss" in data and step != 20] == [1, 10, 30]
    assert run.history[-1] == (30, {"budget/top": 1.0, "limit/python": 0.9, "result/auc": 0.75})
    assert run.values == {"train.batch_size": 8, "train.layers": [4, 1]}


def test_the_real_wandb_takes_a_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no wandb here: pip install 'recperf[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trained("wandb", tmp_path, STEPS[:3])
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert log.stat().st_size


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_mlflow_has_no_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking", reason="no mlflow here: pip install 'recperf[mlflow]'")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trained("mlflow", tmp_path, STEPS[:3], end=False)
    trained("mlflow", tmp_path, STEPS[1:], done=1)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("recperf").experiment_id])
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(loss.step, loss.value) for loss in losses] == [(1, 1.0), (10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert run.data.metrics["result/auc"] == 0.75
    assert run.data.params == {"train.batch_size": "8", "train.layers": "[4, 1]"}
    assert run.info.status == "FINISHED"
