"""Configuration of training, and its learning-rate schedules: pure functions of the number of a step, counted from 0.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import require, within
from ..ops.table_rules import RuleName
from ..tasks import BaselineName


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    """Passes over the training rows."""
    batch_size: int = 256
    """Samples in a step."""
    learning_rate: float = 5e-3
    """Peak of the one-cycle schedule."""
    rise: float = 0.3
    """Share of the steps in which the learning rate rises; after that it falls."""
    weight_decay: float = 0.01
    """AdamW weight decay of the MLPs."""
    table_weight_decay: float = 0.5
    """AdamW weight decay of the tables."""
    max_steps: int = 0
    """Stop after this many steps, with the same learning-rate schedule; 0 means all epochs."""
    checkpoint_steps: int = 0
    """Save a checkpoint every this many steps; 0 disables it."""
    checkpoint_minutes: float = 10.0
    """Save a checkpoint every this many minutes, or less often so that saves take at most 5 % of the time; 0 disables
    it."""
    checkpoint_end: bool = True
    """Save a checkpoint at the end of the training."""
    keep_last: int = 1
    """How many of the newest checkpoints to keep, in addition to the best one."""
    checkpoint_background: Literal["auto", "on", "off"] = "auto"
    """Write checkpoints in the background from a copy in memory; auto: if enough memory is free
    and no table lies in files."""
    evaluate_steps: int = 0
    """Evaluate every this many steps; 0 means only at the end of each epoch."""
    stop_at_target: bool = False
    """Stop as soon as an evaluation meets the target."""
    patience: int = 0
    """Stop after this many evaluations without a lower log loss of the validation rows; 0: never. Only where rows
    inside the training time choose the epoch."""
    checkpoint_epochs: bool = True
    """Save a checkpoint after every evaluation. A signal that asks to stop always saves one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: a GPU if there is one."""
    threads: int = 0
    """Threads inside an operator on a CPU; 0 means torch's default, or 1 for a model with small operators."""
    onednn: Literal["auto", "on", "off"] = "auto"
    """Whether torch may use oneDNN for matrix products; auto: not on ARM where they are small, or large and
    multi-threaded. dlrm in bfloat16: where the CPU has instructions for it."""

    def __post_init__(self) -> None:
        within(1, self.epochs, 1_000_000, "train.epochs")
        within(1, self.batch_size, 1 << 24, "train.batch_size")
        require(0 < self.learning_rate <= 1e6, "train.learning_rate", self.learning_rate, "above 0, at most 1e6")
        require(0 < self.rise < 1, "train.rise", self.rise, "above 0 and below 1")
        within(0, self.weight_decay, 1e6, "train.weight_decay")
        within(0, self.table_weight_decay, 1e6, "train.table_weight_decay")
        within(0, self.max_steps, 1 << 40, "train.max_steps")
        within(0, self.checkpoint_steps, 1 << 40, "train.checkpoint_steps")
        within(0.0, self.checkpoint_minutes, 1e6, "train.checkpoint_minutes")
        within(1, self.keep_last, 1_000_000, "train.keep_last")
        within(0, self.evaluate_steps, 1 << 40, "train.evaluate_steps")
        within(0, self.patience, 1 << 40, "train.patience")
        within(0, self.threads, 256, "train.threads")


@dataclass(frozen=True, kw_only=True)
class GraphTrainConfig(TrainConfig):
    """Training whose step can be captured as a CUDA graph."""

    graph: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step as one CUDA graph; auto: on one GPU, with padded batches of sequences; in
    dlrm-v4 only if its kernels are so small that they take about as long as their launch."""


AnyTableOptimizer = Literal[RuleName, "adamw"]


@dataclass(frozen=True, kw_only=True)
class TableTrainConfig(GraphTrainConfig):
    """Training with AdamW for everything, or with an optimizer of the table rows that a step used and AdamW for the
    rest."""

    table_optimizer: AnyTableOptimizer = "adamw"
    """adamw changes every row of the tables in every step, the others those that the step used."""
    table_learning_rate: float = 0.0
    """Learning rate of the table rows, which follows the schedule of the other; 0: train.learning_rate. adamw has the
    same for all parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.table_learning_rate
        require(0 <= rate <= 1e6, "train.table_learning_rate", rate, "0, for train.learning_rate, to 1e6")
        fits = not rate or self.table_optimizer != "adamw"
        require(fits, "train.table_learning_rate", rate, "0 with train.table_optimizer adamw")

    @property
    def table_ratio(self) -> float:
        """The learning rate of the table rows over that of the other parameters."""
        return (self.table_learning_rate or self.learning_rate) / self.learning_rate


@dataclass(frozen=True, kw_only=True)
class SparseTrainConfig(TrainConfig):
    """Training with a table whose gradient is sparse: a separate optimizer for the table, AdamW for the rest."""

    table_optimizer: RuleName = "rowwise-adagrad"
    """Optimizer of the rows a step used; a rowwise one has one number of state for a row where its namesake has one for
    each weight, in adam the second of two."""
    table_learning_rate: float = 0.05
    """Peak of the table's one-cycle schedule."""
    clip: float = 0.0
    """Maximum norm of the whole gradient, dense and sparse together; 0 disables clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.table_learning_rate
        require(0 < rate <= 1e6, "train.table_learning_rate", rate, "above 0, at most 1e6")
        within(0, self.clip, 1e12, "train.clip")


@dataclass(frozen=True, kw_only=True)
class DLRMTrainConfig(TrainConfig):
    """Training with the losses, optimizers and schedule of the public DLRM, and micro-batches."""

    learning_rate: float = 0.01
    """Peak of the schedule."""
    weight_decay: float = 0.0
    """With adamw: weight decay of the MLPs."""
    table_weight_decay: float = 0.0
    """With adamw: weight decay of the tables."""
    optimizer: AnyTableOptimizer = "sgd"
    """Optimizer of all parameters; a rowwise one has one number for a table row where its namesake has one for each
    weight, and is that for the rest. adamw changes every row, the others those that a step used."""
    eps: float = 1e-8
    """Added to the divisor of all but sgd."""
    loss: Literal["bce", "wbce", "mse"] = "bce"
    """Binary cross entropy, the same weighted by label, or the squared error of the probability."""
    loss_weights: tuple[float, float] = (1.0, 1.0)
    """With wbce: weight of a negative and of a positive sample."""
    schedule: Literal["constant", "warmup-decay", "one-cycle"] = "constant"
    """Learning-rate schedule: constant, a linear warm-up with a late quadratic decay, or one cosine cycle."""
    warmup_steps: int = 0
    """With warmup-decay: steps until the peak."""
    decay_start: int = 0
    """With warmup-decay: the step at which the decay begins."""
    decay_steps: int = 0
    """With warmup-decay: steps of the decay; 0 means no decay."""
    micro_batches: int = 1
    """Parts that a batch is split into, with their gradients added: less memory, the same step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        within(1e-30, self.eps, 1.0, "train.eps")
        adamw = self.optimizer == "adamw"
        for name in ("weight_decay", "table_weight_decay"):
            value = getattr(self, name)
            require(adamw or value == 0, f"train.{name}", value, "0, or another value with train.optimizer adamw")
        self._check_loss()
        self._check_schedule()
        within(1, self.micro_batches, 1 << 24, "train.micro_batches")
        at_most = f"at most train.batch_size ({self.batch_size}): a micro-batch needs a sample"
        require(self.micro_batches <= self.batch_size, "train.micro_batches", self.micro_batches, at_most)

    def _check_loss(self) -> None:
        weights = self.loss_weights
        require(len(weights) == 2, "train.loss_weights", weights, "two numbers, for negatives and for positives")
        for weight in weights:
            require(0 <= weight <= 1e6, "train.loss_weights", weights, "numbers 0 to 1e6")
        require(max(weights) > 0, "train.loss_weights", weights, "at least one above 0")
        even = weights == (1.0, 1.0)
        require(even or self.loss == "wbce", "train.loss_weights", weights, "1 1, or others with train.loss wbce")

    def _check_schedule(self) -> None:
        for name in ("warmup_steps", "decay_start", "decay_steps"):
            value = getattr(self, name)
            within(0, value, 1 << 40, f"train.{name}")
            fits = value == 0 or self.schedule == "warmup-decay"
            require(fits, f"train.{name}", value, "0, or another value with train.schedule warmup-decay")
        require(
            self.decay_steps == 0 or self.decay_start >= self.warmup_steps,
            "train.decay_start",
            self.decay_start,
            f"at least train.warmup_steps ({self.warmup_steps}): warm-up and decay cannot overlap",
        )
        fits = self.decay_start == 0 or self.decay_steps > 0
        require(fits, "train.decay_steps", self.decay_steps, "at least 1 with a train.decay_start")


FLOOR = 1e-7
"""The quadratic decay stops here, as in the public DLRM."""


def one_cycle(step: int, total: int, *, peak: float, rise: float) -> float:
    """A cosine from peak / 25 up to the peak, then one down to peak / 250,000."""
    start, end = peak / 25, peak / 250_000
    top = max(1.0, rise * total - 1)
    if step <= top:
        return _cosine(start, peak, step / top)
    return _cosine(peak, end, min(1.0, (step - top) / max(1.0, total - 1 - top)))


def _cosine(begin: float, end: float, share: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * share)) / 2


def warmup_decay(step: int, *, peak: float, warmup: int, decay_start: int, decay_steps: int) -> float:
    """A linear warm-up over `warmup` steps, the peak, then a quadratic decay over `decay_steps` to a constant.

    Like the public DLRM this counts steps from 1, so that the first step has a rate above 0.
    """
    count = step + 1
    if count < warmup:
        return peak * count / warmup
    if not decay_steps or count < decay_start:
        return peak
    left = max(1, decay_start + decay_steps - count)
    return max(min(FLOOR, peak), peak * (left / decay_steps) ** 2)


def make_schedule(config: DLRMTrainConfig, planned: int) -> Callable[[int], float]:
    """The schedule of a config, for a training of `planned` steps."""
    peak = config.learning_rate
    if config.schedule == "constant":
        return lambda step: peak
    if config.schedule == "one-cycle":
        return lambda step: one_cycle(step, planned, peak=peak, rise=config.rise)
    return lambda step: warmup_decay(
        step, peak=peak, warmup=config.warmup_steps, decay_start=config.decay_start, decay_steps=config.decay_steps
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    beat: Literal["auto", BaselineName, "best", "none"] = "none"
    """Baseline whose AUC, or for next items NDCG@10, the model must exceed, or else the run ends with exit code 5.
    best: whichever of the run's baselines has the highest value, except the true model of synthetic data. auto: what
    the workload claims of itself, which `recperf check` tests of every run."""
    accuracy: float | None = None
    """Validation accuracy that the model must reach, or else the run ends with exit code 5."""
    auc: float | None = None
    """Validation AUC that the model must reach, or else the run ends with exit code 5."""

    def __post_init__(self) -> None:
        for name, value in (("accuracy", self.accuracy), ("auc", self.auc)):
            require(value is None or 0 <= value <= 1, f"target.{name}", value, "between 0 and 1")

    def bounds(self, *baselines: str) -> dict[str, Any]:
        """The bounds that a user set. `baselines` are those of the workload, first the one that auto means."""
        beat = {"auto": baselines[0], "none": None}.get(self.beat, self.beat)
        named = ", ".join(name for name in baselines if name != "best")
        allowed = f"auto (here {baselines[0]}), {named}, best or none"
        require(beat in (None, "best", *baselines), "target.beat", self.beat, allowed)
        return {"beat": beat, "accuracy": self.accuracy, "auc": self.auc}

    @property
    def claimed(self) -> TargetConfig:
        """The target that a workload claims to reach: the user's, else its own."""
        return self if self != TargetConfig() else TargetConfig(beat="auto")


STEPS_AN_EPOCH, FORGETTING = 100, 5.0


def settings_for_rows(rows: int) -> dict[str, Any]:
    """Settings of AdamW with the one-cycle schedule for `rows` rows of own data. Few rows make small batches, or there
    would be too few steps. In an epoch at the peak of the schedule a table row decays to exp(-FORGETTING) of its size,
    in a step at most to a half: without that, categories that few rows have are memorised."""
    batch_size = min(1024, max(32, 1 << max(0, round(math.log2(max(1, rows) / STEPS_AN_EPOCH)))))
    rate = 0.01
    decay = min(float(f"{FORGETTING * batch_size / (rate * max(batch_size, rows)):.3g}"), 0.5 / rate)
    return {
        "epochs": 8, "batch_size": batch_size, "learning_rate": rate, "weight_decay": 0.3, "table_weight_decay": decay
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """The run whose weights training starts with: rows are matched by own ids. Rows of new ids and the optimizer of the
    dense part start anew."""

    run: Path | None = None
    """Folder of the run; None: initial weights."""
    checkpoint: str = "last"
    """Its checkpoint: last, best, or a name that `recperf check` lists."""
    forget_days: int = 0
    """Forget ids whose last event or click in both datasets is older than this many days before the newest; 0: none."""

    def __post_init__(self) -> None:
        within(0, self.forget_days, 1 << 20, "start.forget_days")


Way = Literal["auto", "fused", "plain"]


@dataclass(frozen=True, kw_only=True)
class FastConfig:
    """Which implementations to use, each switched independently."""

    input: Literal["auto", "device", "pinned", "pageable"] = "auto"
    """Where batches come from: drawn on the training device, or made on the host and copied to it from pinned or
    pageable memory. Auto: synthetic batches are drawn on the device; rows of a file go through pinned memory."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step as one CUDA graph; auto: on a GPU, unless a batch is split into micro-batches."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Precision of the MLPs' matrix products; weights and, on a GPU, their gradients stay float32. Auto: bfloat16 on a
    GPU that supports it, else float32. On a CPU bfloat16 is faster with AMX, AVX-512 or ARM instructions for it only;
    weight gradients by these are rounded to it once."""
    embedding: Way = "auto"
    """Lookups and sparse updates of all tables: fused is one kernel (Triton on a GPU, C on a CPU), plain is torch."""
    interaction: Way = "auto"
    """The dot interaction: fused is one kernel for each pass (Triton on a GPU, C on a CPU), plain is torch."""
    mlp: Way = "auto"
    """The MLPs: fused puts bias and ReLU into the products and computes weight gradients on a side stream; plain is
    one operator after the other."""
    optimizer: Way = "auto"
    """The dense optimizer: fused is one kernel for all parameters, plain a few operators for each."""


PLAIN = FastConfig(
    input="pageable",
    graph="off",
    precision="float32",
    embedding="plain",
    interaction="plain",
    mlp="plain",
    optimizer="plain",
)
"""No optimization: batches from the host, plain operators, float32."""
