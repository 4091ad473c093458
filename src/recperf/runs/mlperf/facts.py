"""What the log discloses about a submission and its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import require, within
from .lines import BENCHMARK

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


def this_platform() -> str:
    """A name for this machine: its accelerators, or its CPU if it has none."""
    from collections import Counter

    from ...machine import cpu_model, gpus

    counts = Counter(gpu["name"] for gpu in gpus())
    return " + ".join(f"{count}x {name}" for name, count in counts.items()) or cpu_model()
