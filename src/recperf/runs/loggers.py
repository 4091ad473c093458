"""Sends the curves and the config of a run to the tools that people watch: TensorBoard, Weights & Biases, MLflow.

Everything comes from the events of the run, so what a tool lacks is sent again from events.jsonl. A resumed training
repeats the steps after its checkpoint bit for bit: a tool never has a step twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ..config import ConfigValues, flatten
from ..errors import MachineError
from ..measure.profile import StepProfile
from .record import Run
from .result import Result
from .schemas import Event, Scores, Step, Timing, event_of

MOST_PARAMETERS = 100
"""Parameters that MLflow takes at a time."""


def scalars_of(event: Event) -> dict[str, float]:
    """The points that an event adds to the curves."""
    values: dict[str, Any] = {}
    # The learning rate is logged with the gradient's norm, in some steps only.
    if isinstance(event, Step) and event.learning_rate is not None:
        values = {f"train/{name}": getattr(event, name) for name in ("loss", "gradient_norm", "learning_rate")}
    elif isinstance(event, Timing) and event.samples and event.seconds > 0:
        values = {"throughput/samples_per_s": event.samples / event.seconds}
    elif isinstance(event, Scores):
        where = "valid" if event.kind == "metric" else "train"
        values = {f"{where}/{name}": value for name, value in event.metrics.items()}
    return {name: float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Curves:
    """Feeds every logger with the events of a run. One that fails is dropped with a notice: training goes on."""

    def __init__(self, names: Sequence[str], folder: Path, notice: Callable[[str], None]) -> None:
        self.loggers, self.names, self.notice = {name: LOGGERS[name](folder) for name in names}, tuple(names), notice
        self._seed: int | None = None

    def begin(self, run: Run, seed: int, done: int) -> None:
        """A training begins or resumes after `done` steps; a logger without the steps before gets them from the log."""
        self._seed = seed
        for name in list(self.loggers):
            known = self._call(name, lambda logger: logger.begin(seed, done))
            if known is not None and known < done:
                for event in run.events():
                    if event.seed == seed and known < event.step <= done:
                        self._send(event, name)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        event = event_of({"kind": kind, **fields}) if self.loggers else None
        if isinstance(event, Event):
            for name in list(self.loggers):
                self._send(event, name)

    def _send(self, event: Event, name: str) -> None:
        if values := scalars_of(event):
            self._call(name, lambda logger: logger.scalars(event.step, values))

    def finish(
        self, run: Run, result: Result, profile: StepProfile | None, config: ConfigValues, *, replay: bool = False
    ) -> None:
        """Send what was measured after training, with `replay` also the trainings, and close."""
        steps = {event.seed: event.step for event in run.events() if isinstance(event, Step)}
        seeds = [trial.seed for trial in result.quality.seeds]
        for seed in seeds if replay else seeds[-1:]:
            if self._seed != seed:
                self.begin(run, seed, steps.get(seed, 0))
        measured = {
            "budget": result.performance.budget or {},
            "limit": profile.shares if profile else {},
            "result": result.quality.metrics,
        }
        values = {f"{group}/{name}": value for group, part in measured.items() for name, value in part.items()}
        fields = {name: value for name, value in flatten(config).items() if value is not None}
        for name in list(self.loggers):
            self._call(name, lambda logger: logger.scalars(steps.get(seeds[-1], 0), values))
            self._call(name, lambda logger: logger.config(fields))
        self.close()

    def close(self) -> None:
        for name in list(self.loggers):
            self._call(name, lambda logger: logger.close())

    def _call(self, name: str, call: Callable[[Logger], Any]) -> Any:
        logger = self.loggers.get(name)
        if logger is None:
            return None
        try:
            return call(logger)
        except Exception as error:
            del self.loggers[name]
            with suppress(Exception):
                logger.close()
            cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self.notice(f"nothing more is logged to {name}: {' '.join(str(cause).split())}; training goes on")
            return None


class TensorBoard:
    """Writes event files into a folder per seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self._open = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, seed: int, done: int) -> int:
        """A training begins, or resumes after `done` steps; returns the last of these that the tool has."""
        self.close()
        folder = self.folder / f"seed-{seed}"
        resumed = folder.exists()
        # Tensorboard drops the steps from `purge_step` on, which an interrupted process wrote.
        self._writer = self._open(str(folder), purge_step=done if resumed else None)
        return done - 1 if resumed else 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def config(self, fields: ConfigValues) -> None:
        self._writer.add_text("config", "".join(f"    {name}: {json.dumps(value)}\n" for name, value in fields.items()))

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


class WeightsAndBiases:
    """A run for each seed, in one group. Without WANDB_MODE it stays offline, in the run's folder: `wandb sync` uploads
    it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wandb = require("wandb", "wandb")
        self._run: Any = None

    def begin(self, seed: int, done: int) -> int:
        self.close()
        # Without characters that have a meaning there.
        name = re.sub(r"[/\\#?%:'\"`]", "-", self.folder.resolve().name)
        self._run = self._wandb.init(
            project="recperf",
            dir=str(self.folder),
            id=f"{name}-seed-{seed}",
            name=f"{name} seed {seed}",
            group=name,
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
        )
        # It ignores steps that it has.
        return int(self._run.step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def config(self, fields: ConfigValues) -> None:
        self._run.config.update(fields, allow_val_change=True)

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


class MLflow:
    """A run for each seed, in the experiment `recperf`. Without MLFLOW_TRACKING_URI it is in a database in the run's
    folder: `mlflow ui --backend-store-uri sqlite:///mlflow.db` shows it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._entities = require("mlflow.entities", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder / 'mlflow.db'}"
        self._client = require("mlflow.tracking", "mlflow").MlflowClient(tracking_uri=uri)
        self._run = ""
        self._steps: dict[str, int] = {}
        """The last step that the tool has, by metric: it does not leave out repeated ones itself."""

    def begin(self, seed: int, done: int) -> int:
        self.close()
        experiment = self._client.get_experiment_by_name("recperf")
        where = experiment.experiment_id if experiment else self._client.create_experiment("recperf")
        name = f"{self.folder.name} seed {seed}"
        tag = hashlib.sha256(f"{self.folder} {seed}".encode()).hexdigest()
        earlier = self._client.search_runs([where], f"tags.`recperf.run` = '{tag}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(where, run_name=name, tags={"recperf.run": tag})
        self._run = run.info.run_id
        histories = {key: self._client.get_metric_history(self._run, key) for key in run.data.metrics}
        self._steps = {key: max(metric.step for metric in history) for key, history in histories.items()}
        return max(self._steps.values(), default=0)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        new = {name: value for name, value in values.items() if step > self._steps.get(name, -1)}
        self._client.log_batch(self._run, [metric(name, value, now, step) for name, value in new.items()])
        self._steps |= dict.fromkeys(new, step)

    def config(self, fields: ConfigValues) -> None:
        fields_of = [self._entities.Param(name, json.dumps(value)) for name, value in fields.items()]
        for first in range(0, len(fields_of), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=fields_of[first : first + MOST_PARAMETERS])

    def close(self) -> None:
        if self._run:
            run, self._run = self._run, ""
            self._client.set_terminated(run)


Logger = TensorBoard | WeightsAndBiases | MLflow
LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def require(module: str, package: str) -> Any:
    """Import a module of a logger's package, which is not installed with recperf."""
    try:
        return import_module(module)
    except ImportError:
        raise MachineError(f"--log {package} needs {package}", fix=f"pip install 'recperf[{package}]'") from None
