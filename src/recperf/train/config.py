"""What a user may choose about training. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..config import require, within


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 10
    """Passes over the training rows."""
    batch_size: int = 256
    """Samples a step."""
    learning_rate: float = 5e-3
    """Peak of the one-cycle schedule."""
    rise: float = 0.3
    """Share of the steps in which the learning rate rises; it falls in the rest."""
    weight_decay: float = 0.01
    """AdamW's decay of the MLPs."""
    table_weight_decay: float = 0.5
    """AdamW's decay of the tables."""
    max_steps: int = 0
    """Stop after this many steps, the schedule unchanged; 0 means all epochs."""
    checkpoint_steps: int = 0
    """Save every so many steps too; 0 means not."""
    checkpoint_minutes: float = 0.0
    """Save whenever so many minutes went by; 0 means not."""
    keep_last: int = 1
    """Checkpoints to keep, the newest; the best one is kept too."""
    checkpoint_background: Literal["auto", "on", "off"] = "auto"
    """Whether a checkpoint is written while training goes on, from a copy in memory; auto says yes where one fits."""
    evaluate_steps: int = 0
    """Score the validation rows every so many steps too; 0 means at the end of each epoch only."""
    stop_at_target: bool = False
    """Stop as soon as an evaluation meets the target."""
    checkpoint_epochs: bool = True
    """Save the last and the best state whenever the validation rows are scored. A signal saves in any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU where torch sees one."""
    threads: int = 0
    """Threads inside an operator on a CPU; 0 means 1 for a model whose operators are too small to share."""
    onednn: Literal["auto", "on", "off"] = "auto"
    """Whether torch may hand matrix products to oneDNN; auto says no on ARM where they are too small,
    or large and shared by threads, to gain."""

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
        within(0, self.threads, 256, "train.threads")


@dataclass(frozen=True, kw_only=True)
class SparseTrainConfig(TrainConfig):
    """Training with a table whose gradient stays sparse: an optimizer of its own for it, AdamW for the rest."""

    table_optimizer: Literal["adagrad", "sgd"] = "adagrad"
    """For the rows a step used: row-wise Adagrad (one float of state a row), or SGD."""
    table_learning_rate: float = 0.05
    """Peak of the table's one-cycle schedule."""
    clip: float = 0.0
    """Largest norm of the whole gradient, dense and sparse together; 0 means no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = self.table_learning_rate
        require(0 < rate <= 1e6, "train.table_learning_rate", rate, "above 0, at most 1e6")
        within(0, self.clip, 1e12, "train.clip")


@dataclass(frozen=True, kw_only=True)
class DLRMTrainConfig(TrainConfig):
    """Training as the public DLRM offers it: its losses, optimizers and schedule, and batches taken in slices."""

    learning_rate: float = 0.01
    """Peak of the schedule."""
    weight_decay: float = 0.0
    """With adamw: decay of the MLPs."""
    table_weight_decay: float = 0.0
    """With adamw: decay of the tables."""
    optimizer: Literal["sgd", "adagrad", "rowwise-adagrad", "adamw"] = "sgd"
    """For all parameters; rowwise-adagrad keeps one number a table row, and is adagrad for the rest."""
    eps: float = 1e-8
    """Keeps adagrad's and adamw's divisor from zero."""
    loss: Literal["bce", "wbce", "mse"] = "bce"
    """Binary cross entropy, the same weighted by label, or the squared error of the probability."""
    loss_weights: tuple[float, float] = (1.0, 1.0)
    """With wbce: weight of a negative and of a positive sample."""
    schedule: Literal["constant", "warmup-decay", "one-cycle"] = "constant"
    """The learning rate over the steps: as it is, a linear rise and a late quadratic fall, or one cosine cycle."""
    warmup_steps: int = 0
    """With warmup-decay: steps until the peak."""
    decay_start: int = 0
    """With warmup-decay: the step at which the fall begins."""
    decay_steps: int = 0
    """With warmup-decay: how many steps it lasts; 0 means the rate never falls."""
    micro_batches: int = 1
    """Slices a batch is taken in, their gradients added: less memory, the same step."""

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
        at_most = f"at most train.batch_size ({self.batch_size}): a slice needs a sample"
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
            f"at least train.warmup_steps ({self.warmup_steps}): the rate cannot rise and fall at once",
        )
        fits = self.decay_start == 0 or self.decay_steps > 0
        require(fits, "train.decay_steps", self.decay_steps, "at least 1 with a train.decay_start")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    beat: Literal["bias", "none"] = "bias"
    """A baseline the AUC must exceed: the user + item bias model, or none."""
    accuracy: float | None = None
    """Validation accuracy to reach; none means 0.71 on the real MovieLens-100K with the random split, else no bound."""
    auc: float | None = None
    """Validation AUC to reach; none means 0.78 on the real MovieLens-100K with the random split, else no bound."""

    def __post_init__(self) -> None:
        for name, value in (("accuracy", self.accuracy), ("auc", self.auc)):
            require(value is None or 0 <= value <= 1, f"target.{name}", value, "between 0 and 1")

    def bounds(self, baseline: str) -> dict[str, Any]:
        """The bounds a result is judged by; `baseline` is the name of the workload's baseline to beat."""
        return {"beat": baseline if self.beat == "bias" else None, "accuracy": self.accuracy, "auc": self.auc}
