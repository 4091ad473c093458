"""Sends the curves of a run to the tools that people watch: TensorBoard, Weights & Biases, MLflow.

Everything comes from the events of the run, so what a tool lacks is sent again from events.jsonl. A resumed training
repeats the steps after its checkpoint bit for bit: a tool never has a step twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..config import ConfigValues, flatten
from ..errors import MachineError
from ..files import make_folder
from ..measure.profile_records import Profile
from .events import Event, Scores, Step, Timing, event_of
from .record import Run
from .report.step_sections import headline
from .result import Result


class Logger(Protocol):
    """One tool. It shows each training of a run, one per seed, as a curve of its own."""

    def begin(self, seed: int, done: int) -> int:
        """A training begins, or resumes after `done` steps; returns the last of these that the tool has."""
        ...

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def finish(self, step: int, text: str, config: ConfigValues, metrics: dict[str, float]) -> None:
        """The end of the run: the verdict in one line, the hyper-parameters, and the metrics they led to."""
        ...

    def close(self) -> None: ...


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

    def __init__(
        self, loggers: dict[str, Logger] | None = None, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        self.loggers, self.notice = dict(loggers or {}), notice
        self.names = tuple(self.loggers)
        self._seed: int | None = None

    def begin(self, run: Run, seed: int, done: int) -> None:
        """A training begins or resumes after `done` steps; a logger without the steps before gets them from the log."""
        self._seed = seed
        for name in list(self.loggers):
            known = self._call(name, lambda logger: logger.begin(seed, done))
            if known is not None and known < done:
                for event in run.events():
                    if event.seed == seed and known < event.step <= done:
                        self._send(event, (name,))

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        event = event_of({"kind": kind, **fields}) if self.loggers else None
        if isinstance(event, Event):
            self._send(event, tuple(self.loggers))

    def _send(self, event: Event, names: Iterable[str]) -> None:
        if values := scalars_of(event):
            for name in names:
                self._call(name, lambda logger: logger.scalars(event.step, values))

    def finish(
        self, run: Run, result: Result, profile: Profile | None, config: ConfigValues, *, replay: bool = False
    ) -> None:
        """Send what was measured after training, with `replay` also the trainings, and close."""
        steps = {event.seed: event.step for event in run.events() if isinstance(event, Step)}
        seeds = [trial.seed for trial in result.quality.seeds]
        for seed in seeds if replay else seeds[-1:]:
            if self._seed != seed:
                self.begin(run, seed, steps.get(seed, 0))
        step = steps.get(seeds[-1], 0)
        budget = {f"budget/{name}": share for name, share in (result.performance.budget or {}).items()}
        budget |= {f"limit/{name}": share for name, share in (profile.shares if profile else {}).items()}
        text = headline(profile.verdict) if profile else "not measured"
        shown = {name: value for name, value in flatten(config).items() if value is not None}
        for name in list(self.loggers):
            self._call(name, lambda logger: logger.scalars(step, {k: v for k, v in budget.items() if _is_number(v)}))
            self._call(name, lambda logger: logger.finish(step, text, shown, result.quality.metrics))
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
    """Writes event files into a folder per seed, at once: tensorboard's own writer does so in a thread, which prints a
    traceback where the disk is full."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"
        self._protos = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._record = require("tensorboard.summary.writer.record_writer", "tensorboard").RecordWriter
        self._writer: Any = None

    def begin(self, seed: int, done: int) -> int:
        self.close()
        folder = self.folder / f"seed-{seed}"
        make_folder(folder)
        before = len(list(folder.iterdir()))
        # Files are read in the order of their names.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{before}"
        self._writer = self._record((folder / name).open("xb"))
        self._write(file_version="brain.Event:2")
        if before:
            # Tells tensorboard to drop this step and later ones, which an interrupted process wrote.
            start = self._protos.SessionLog(status=self._protos.SessionLog.START)
            self._write(step=done, session_log=start)
        return done - 1 if before else 0

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._protos.Event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        points = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=points))

    def finish(self, step: int, text: str, config: ConfigValues, metrics: dict[str, float]) -> None:
        summary = require("torch.utils.tensorboard.summary", "tensorboard")

        shown = {
            name: value if isinstance(value, str | int | float) else json.dumps(value) for name, value in config.items()
        }
        results = {f"result/{name}": value for name, value in metrics.items()}
        for part in (summary.text("verdict", text), *summary.hparams(shown, results)):
            self._write(step=step, summary=part)
        self.scalars(step, results)

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
        name = name_of(self.folder)
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

    def finish(self, step: int, text: str, config: ConfigValues, metrics: dict[str, float]) -> None:
        self._run.config.update(config, allow_val_change=True)
        self._run.summary.update({"verdict": text, **{f"result/{name}": value for name, value in metrics.items()}})

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()


class MLflow:
    """A run for each seed, in the experiment `recperf`: at MLFLOW_TRACKING_URI, or in the folder mlruns beside the
    run's."""

    POINTS = 100
    """Points that are sent together; a tracking server takes up to 1,000 values at once."""

    def __init__(self, folder: Path) -> None:
        self._mlflow = require("mlflow", "mlflow")
        self._entities = require("mlflow.entities", "mlflow")
        self.name = name_of(folder)
        self.place = os.environ.get("MLFLOW_TRACKING_URI") or (folder.resolve().parent / "mlruns").as_uri()
        self._client: Any = None
        self._run = ""
        self._last: dict[str, int] = {}
        """The last step of each curve."""
        self._points: list[Any] = []

    def begin(self, seed: int, done: int) -> int:
        self.close()
        self._client = self._mlflow.MlflowClient(tracking_uri=self.place)
        experiment = self._client.get_experiment_by_name("recperf")
        place = experiment.experiment_id if experiment else self._client.create_experiment("recperf")
        name = f"{self.name} seed {seed}"
        runs = self._client.search_runs([place], filter_string=f"tags.`recperf.training` = '{name}'", max_results=1)
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(place, tags={"recperf.training": name}, run_name=name).info.run_id
        self._last = {}
        return 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in values.items():
            if name not in self._last:
                history = self._client.get_metric_history(self._run, name)
                self._last[name] = max((point.step for point in history), default=-1)
            if step > self._last[name]:
                self._last[name] = step
                self._points.append(self._entities.Metric(name, value, now, step))
        if len(self._points) >= self.POINTS:
            self._send()

    def _send(self) -> None:
        points, self._points = self._points, []
        for start in range(0, len(points), 1000):
            self._client.log_batch(self._run, metrics=points[start : start + 1000])

    def finish(self, step: int, text: str, config: ConfigValues, metrics: dict[str, float]) -> None:
        parameters = [self._entities.Param(name, str(value)[:500]) for name, value in config.items()]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(self._run, params=parameters[start : start + 100])
        self.scalars(step, {f"result/{name}": value for name, value in metrics.items()})
        self._client.set_tag(self._run, "verdict", text)

    def close(self) -> None:
        if self._run:
            self._send()
            self._client.set_terminated(self._run)
            self._run = ""


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def name_of(folder: Path) -> str:
    """The name of a run in a tool, without characters that have a meaning there."""
    return re.sub(r"[/\\#?%:'\"`]", "-", folder.resolve().name)


def require(module: str, package: str) -> Any:
    """Import a module of a logger's package, which is not installed with recperf."""
    try:
        return import_module(module)
    except ImportError:
        extra = "'recperf[tensorboard]'" if package == "tensorboard" else package
        raise MachineError(f"--log {package} needs {package}", fix=f"pip install {extra}") from None


def open_curves(names: Sequence[str], folder: Path, notice: Callable[[str], None]) -> Curves:
    """The loggers with these names, once each."""
    return Curves({name: LOGGERS[name](folder) for name in names}, notice)
