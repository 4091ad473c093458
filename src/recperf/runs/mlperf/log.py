"""Writes the MLPerf log of a run: one file, however often the run is interrupted and resumed.

log = MLPerfLog(folder / "mlperf.log", SubmissionConfig(log=True))
log.begin()
log.start(facts)
log.rewind(state)                       # the state in a checkpoint, or None
log.train_loss(8192, 0.138, 4e-11)
log.evaluation_begins(8192)
log.evaluation_ends(8192, 0.76, goes_on=False)
log.stop(8192, reached=True)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...config import require, within
from ...errors import DataError
from ...files import append, open_regular, reading, writing
from ...machine import cpu_model, gpus
from .check import BENCHMARK, TOKEN, scan

WRITER = {"file": "recperf/runs/mlperf/log.py", "lineno": 1}
"""Metadata that every event needs: what wrote it, without where recperf is installed."""
Kind = Literal["POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"]
Precision = Literal["fp64", "fp32", "tf32", "fp16", "bfloat16", "fp8", "int8"]
Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class SubmissionConfig:
    """The fields of a submission that no run can find out by itself."""

    log: bool = False
    """Write mlperf.log, by the rules of MLPerf Training 6.1."""
    org: str = "recperf"
    """Name of the organisation that submits."""
    division: Literal["closed", "open"] = "closed"
    """Closed: the benchmark's own model and learning rates. Open: your own."""
    status: Literal["onprem", "cloud", "preview", "research"] = "research"
    """Availability category of the system (MLPerf rules): on-premise, cloud, preview or research."""
    platform: str = "auto"
    """Name of the system; auto uses the number and name of the accelerators, or the name of the CPU."""
    cache_clear: bool = False
    """Set this if you cleared the system's caches before the run, as the rules require; recperf cannot do it."""
    config_filename: str = "config.json"
    """Name of the file next to the log that discloses the config of the run."""

    def __post_init__(self) -> None:
        for name in ("org", "platform", "config_filename"):
            value = getattr(self, name)
            fits = bool(value.strip()) and value.isprintable() and len(value) <= 200
            require(fits, f"mlperf.{name}", value, "1 to 200 printable characters")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run as it is; whether it follows the rules is for the checker to decide."""

    seed: int
    """Seed of the run; no two runs of a submission may share it."""
    train_samples: int
    """Samples of one pass over all training windows."""
    eval_samples: int
    """Samples in an evaluation."""
    global_batch_size: int
    """Samples per step, over all devices."""
    learning_rate: float
    """Learning rate of Adam after warm-up."""
    table_learning_rate: float
    """Learning rate of row-wise Adagrad after warm-up."""
    warmup_steps: int
    """Steps of learning rate warm-up."""
    max_sequence_length: int
    """Tokens of the longest sequence: context, history and candidate."""
    eval_every_data_pct: float
    """Fraction of the training samples between two evaluations."""
    skip_eval_epoch_pct: float = 0.0
    """Fraction of the training samples before the first evaluation."""
    clip: float = 1.0
    """Norm to which dense gradients are clipped."""
    linear_precision: Precision = "fp32"
    """Lowest precision in linear layers."""
    attention_precision: Precision = "fp32"
    """Lowest precision in attention."""
    communication_precision: Precision = "fp32"
    """Lowest precision of what ranks send each other."""
    micro_batch_size: int = 0
    """Samples per step of one device; 0: all of them."""

    def __post_init__(self) -> None:
        for name in ("train_samples", "eval_samples", "global_batch_size", "max_sequence_length"):
            within(1, getattr(self, name), 1 << 60, name)

    def prologue(self, submission: SubmissionConfig, platform: str) -> list[tuple[str, Value]]:
        """Keys and values before init_stop. The batch size comes before the learning rates: the checker derives their
        bounds from it as it reads."""
        return [
            ("submission_benchmark", BENCHMARK),
            ("submission_org", submission.org),
            ("submission_division", submission.division),
            ("submission_status", submission.status),
            ("submission_platform", platform),
            ("global_batch_size", self.global_batch_size),
            ("gradient_accumulation_steps", 1),
            ("seed", self.seed),
            ("opt_name", "Adam"),
            ("opt_base_learning_rate", self.learning_rate),
            ("opt_adam_beta_1", 0.95),
            ("opt_adam_beta_2", 0.999),
            ("opt_adam_epsilon", 1e-8),
            ("opt_weight_decay", 0.0),
            ("opt_gradient_clip_norm", self.clip),
            ("opt_learning_rate_warmup_steps", self.warmup_steps),
            ("opt_learning_rate_warmup_start_lr", 0.0),
            ("opt_sparse_name", "RowWiseAdagrad"),
            ("opt_sparse_base_learning_rate", self.table_learning_rate),
            ("max_sequence_length", self.max_sequence_length),
            ("eval_every_data_pct", self.eval_every_data_pct),
            ("skip_eval_epoch_pct", self.skip_eval_epoch_pct),
            ("lowest_numerical_precision_in_linear", self.linear_precision),
            ("lowest_numerical_precision_in_attn", self.attention_precision),
            ("lowest_numerical_precision_in_comm", self.communication_precision),
            ("tensor_parallelism", 1),
            ("pipeline_parallelism", 1),
            ("context_parallelism", 1),
            ("expert_parallelism", 1),
            ("micro_batch_size", self.micro_batch_size or self.global_batch_size),
            ("config_filename", submission.config_filename),
        ]


class MLPerfLog:
    """Writes the events that MLPerf Training 6.1 requires; an event that the log already has is not written again."""

    def __init__(self, path: Path, submission: SubmissionConfig) -> None:
        self.path = path
        self.submission = submission
        with writing(path):
            self._handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        content = self._content()
        whole = content.rfind(b"\n") + 1
        lines = scan(content[:whole])
        if not lines.faults and not any(line.key == "run_start" for line in lines.good):
            # Nothing before run_start counts: the process that starts the run logs its own initialisation.
            whole = 0
        if whole != len(content):
            self._cut(whole)
        self._load()

    def logged(self, key: str) -> Value:
        """The first value of a key; None where the log has none yet."""
        return self._values.get(key)

    def begin(self) -> None:
        """Log the start of initialisation; call it as early as possible."""
        self._once("POINT_IN_TIME", "cache_clear", self.submission.cache_clear)
        self._once("INTERVAL_START", "init_start")

    def start(self, facts: Facts) -> None:
        """Log the start of the run; in a log that has started, check that the facts are the same."""
        self.begin()
        platform = self.submission.platform
        if platform == "auto":
            # A name for this machine: its accelerators, or its CPU if it has none.
            counts = Counter(gpu["name"] for gpu in gpus())
            own = " + ".join(f"{count}x {name}" for name, count in counts.items()) or cpu_model()
            platform = str(self._values.get("submission_platform") or own)
        for key, value in facts.prologue(self.submission, platform):
            self._once("POINT_IN_TIME", key, value)
        self._once("INTERVAL_END", "init_stop")
        self._once("INTERVAL_START", "run_start")
        self._once("POINT_IN_TIME", "train_samples", facts.train_samples)
        self._once("POINT_IN_TIME", "eval_samples", facts.eval_samples)
        if "block_start" not in self._values:
            self._mark("INTERVAL_START", "block_start", 0)

    def train_loss(self, samples: int, loss: float, learning_rate: float) -> None:
        metadata = {"samples_count": int(samples), "lr": float(learning_rate)}
        self._write("POINT_IN_TIME", "train_loss", self._finite("loss", loss, samples), metadata)

    def evaluation_begins(self, samples: int) -> None:
        self._end_block(samples)
        self._mark("INTERVAL_START", "eval_start", samples)

    def evaluation_ends(self, samples: int, auc: float, goes_on: bool) -> None:
        self._mark("POINT_IN_TIME", "eval_accuracy", samples, self._finite("AUC", auc, samples))
        self._mark("INTERVAL_END", "eval_stop", samples)
        if goes_on:
            self._mark("INTERVAL_START", "block_start", samples)

    def stop(self, samples: int, reached: bool) -> None:
        """Log the end of the run."""
        if "run_stop" in self._values:
            return
        self._end_block(samples)
        self._mark("INTERVAL_END", "run_stop", samples, status="success" if reached else "aborted")

    def state(self) -> dict[str, int | str]:
        """Length and digest of the log, for a checkpoint. The log is synced first: after a power cut, it must not be
        shorter than a checkpoint says."""
        with writing(self.path):
            os.fsync(self._handle)
        return {"bytes": self._size, "digest": self._digest.hexdigest()}

    def rewind(self, state: dict[str, int | str] | None) -> None:
        """Cut the log back to the state of a checkpoint; None: there is none, so back to the start of training."""
        content = self._content()
        size = len(content) if state is None else self._matching_size(content, state)
        lines = scan(content[:size])
        first = next((line.end for line in lines.good if line.key == "block_start"), None)
        if state is None and first is not None:
            size = first
            lines = scan(content[:size])
        self._refuse(lines.faults)
        if size != len(content):
            self._cut(size)
        self._load()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _matching_size(self, content: bytes, state: dict[str, int | str]) -> int:
        """The length of the log in a checkpoint's state, if the log up to there has the same digest."""
        size, digest = state.get("bytes"), state.get("digest")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(digest, str):
            raise self._damaged("the checkpoint does not say how long the MLPerf log was")
        if size > len(content):
            raise self._damaged(f"{self.path.name} is shorter than its checkpoint says")
        if hashlib.sha256(content[:size]).hexdigest() != digest:
            raise self._damaged(f"{self.path.name} was changed since its checkpoint")
        return size

    def _content(self) -> bytes:
        with reading(self.path):
            os.lseek(self._handle, 0, os.SEEK_SET)
            with open(self._handle, "rb", closefd=False) as file:
                return file.read()

    def _cut(self, size: int) -> None:
        with writing(self.path):
            os.ftruncate(self._handle, size)

    def _load(self) -> None:
        """Read the state of the log from its file."""
        content = self._content()
        self._size, self._digest = len(content), hashlib.sha256(content)
        lines = scan(content)
        self._faults = lines.faults
        self._values: dict[str, Value] = {line.key: line.value for line in reversed(lines.good)}
        self._latest = int(max((line.time_ms for line in lines.good), default=0))
        blocks = [line.key for line in lines.good if line.key in ("block_start", "block_stop")]
        self._in_block = blocks[-1:] == ["block_start"]

    def _refuse(self, faults: list[tuple[int, str]]) -> None:
        for number, what in faults:
            raise self._damaged(f"line {number} of {self.path.name} {what}")

    def _damaged(self, what: str) -> DataError:
        return DataError(what, where={"file": self.path}, fix="start a new run")

    def _finite(self, what: str, value: float, samples: int) -> float:
        if not math.isfinite(value):
            raise DataError(f"the {what} after {samples:,} samples is {value}", where={"file": self.path})
        return float(value)

    def _once(self, kind: Kind, key: str, value: Value = None) -> None:
        if key not in self._values:
            self._write(kind, key, value)
        elif self._values[key] != value:
            raise DataError(
                f"{self.path.name} was started with {key} {self._values[key]!r}, this run has {value!r}",
                where={"file": self.path},
                fix="resume with the original settings, or start a new run",
            )

    def _end_block(self, samples: int) -> None:
        if self._in_block:
            self._mark("INTERVAL_END", "block_stop", samples)

    def _mark(self, kind: Kind, key: str, samples: int, value: Value = None, **more: Value) -> None:
        """Log an event at a number of samples."""
        total = self._values.get("train_samples")
        if not isinstance(total, (int, float)):
            raise DataError(f"{self.path.name} has no train_samples before {key}", where={"file": self.path})
        place = {"samples_count": int(samples), "epoch_num": int(samples) / total}
        self._write(kind, key, value, {**place, **more})

    def _write(self, kind: Kind, key: str, value: Value, metadata: Mapping[str, object] | None = None) -> None:
        self._refuse(self._faults)
        # Times must not decrease, even if the system clock was set back.
        now = max(int(time.time() * 1000), self._latest)
        event = {"namespace": "", "time_ms": now, "event_type": kind, "key": key, "value": value}
        line = TOKEN + json.dumps({**event, "metadata": {**WRITER, **(metadata or {})}}).encode() + b"\n"
        with writing(self.path):
            # With a single write where the system completes it, so that a kill leaves whole lines.
            append(self._handle, line)
        self._latest = now
        self._size += len(line)
        self._digest.update(line)
        self._values.setdefault(key, value)
        if key in ("block_start", "block_stop"):
            self._in_block = key == "block_start"
