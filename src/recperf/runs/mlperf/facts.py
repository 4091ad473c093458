"""What the log discloses about a run: every value its keys need, in the order the log has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...config import require, within
from .config import SubmissionConfig
from .library import BENCHMARK

Precision = Literal["fp64", "fp32", "tf32", "fp16", "bfloat16", "fp8", "int8"]
Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run as it is, not as the rules would have it: what they want is the checker's business."""

    seed: int
    """Of the run; no two runs of a submission may share it."""
    train_samples: int
    """Samples of one pass over all training windows."""
    eval_samples: int
    """Samples of an evaluation."""
    global_batch_size: int
    """Samples a step, of all devices together."""
    learning_rate: float
    """Of Adam, after the rise."""
    table_learning_rate: float
    """Of row-wise Adagrad, after the rise."""
    warmup_steps: int
    """Steps in which both rates rise."""
    max_sequence_length: int
    """Tokens of the longest row: context, history and candidate."""
    eval_every_data_pct: float
    """Part of the training samples between two evaluations, as a fraction."""
    skip_eval_epoch_pct: float = 0.0
    """Part of the training samples before the first evaluation, as a fraction."""
    warmup_start_rate: float = 0.0
    """Rate at which the rise begins."""
    beta1: float = 0.95
    """Of Adam."""
    beta2: float = 0.999
    """Of Adam."""
    epsilon: float = 1e-8
    """Of Adam."""
    weight_decay: float = 0.0
    """Of Adam."""
    clip: float = 1.0
    """Largest norm of the dense gradient."""
    gradient_accumulation_steps: int = 1
    """Batches whose gradients make one step."""
    micro_batch_size: int | None = None
    """Samples a device takes at once; none means the whole batch."""
    linear_precision: Precision = "fp32"
    """Lowest precision in linear layers."""
    attention_precision: Precision = "fp32"
    """Lowest precision in attention."""
    communication_precision: Precision = "fp32"
    """Lowest precision between devices; that of the values themselves where there is one device."""
    tensor_parallelism: int = 1
    """Devices a layer is cut over."""
    pipeline_parallelism: int = 1
    """Stages of a pipeline."""
    context_parallelism: int = 1
    """Devices a sequence is cut over."""
    expert_parallelism: int = 1
    """Devices experts are spread over."""

    def __post_init__(self) -> None:
        for name in ("train_samples", "eval_samples", "global_batch_size", "max_sequence_length"):
            within(1, getattr(self, name), 1 << 60, name)
        require(self.micro_batch_size is None or self.micro_batch_size >= 1, "micro_batch_size", 0, "at least 1")

    def prologue(self, submission: SubmissionConfig, platform: str) -> list[tuple[str, Value]]:
        """Keys and values before init_stop. The batch size stands before the rates: the rules derive their bounds from
        it as they read."""
        return [
            ("submission_benchmark", BENCHMARK),
            ("submission_org", submission.org),
            ("submission_division", submission.division),
            ("submission_status", submission.status),
            ("submission_platform", platform),
            ("global_batch_size", self.global_batch_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
            ("seed", self.seed),
            ("opt_name", "Adam"),
            ("opt_base_learning_rate", self.learning_rate),
            ("opt_adam_beta_1", self.beta1),
            ("opt_adam_beta_2", self.beta2),
            ("opt_adam_epsilon", self.epsilon),
            ("opt_weight_decay", self.weight_decay),
            ("opt_gradient_clip_norm", self.clip),
            ("opt_learning_rate_warmup_steps", self.warmup_steps),
            ("opt_learning_rate_warmup_start_lr", self.warmup_start_rate),
            ("opt_sparse_name", "RowWiseAdagrad"),
            ("opt_sparse_base_learning_rate", self.table_learning_rate),
            ("max_sequence_length", self.max_sequence_length),
            ("eval_every_data_pct", self.eval_every_data_pct),
            ("skip_eval_epoch_pct", self.skip_eval_epoch_pct),
            ("lowest_numerical_precision_in_linear", self.linear_precision),
            ("lowest_numerical_precision_in_attn", self.attention_precision),
            ("lowest_numerical_precision_in_comm", self.communication_precision),
            ("tensor_parallelism", self.tensor_parallelism),
            ("pipeline_parallelism", self.pipeline_parallelism),
            ("context_parallelism", self.context_parallelism),
            ("expert_parallelism", self.expert_parallelism),
            ("micro_batch_size", self.micro_batch_size or self.global_batch_size),
            ("config_filename", submission.config_filename),
        ]


def this_platform() -> str:
    """A name for this machine: its accelerators, or its processor where it has none."""
    from collections import Counter

    from ...machine import cpu_model, gpus

    named = Counter(gpu["name"] for gpu in gpus())
    return " + ".join(f"{count}x {name}" for name, count in named.items()) or cpu_model()
