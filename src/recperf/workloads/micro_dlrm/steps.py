"""The whole training step of micro-dlrm in one call of C."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...errors import MachineError
from ...measure.spans import StepClock, clocked, report, span
from ...models.config import DLRMConfig
from ...models.dlrm import DLRM
from ...models.embeddings import StackedTables
from ...models.interaction import Concat, Dot
from ...ops import dlrm_step
from ...ops.dlrm_step import Network, TrainingRows
from ...train.device import SMALL_PRODUCT_FLOPS, Settings
from ...train.graph import IndexedBatch, IndexedOrder, Requested
from ...train.loop import RecordNorm
from ...train.optim import AdamW

SWITCH = "--train.native"


def choose_native(
    requested: Requested, settings: Settings, model: DLRMConfig, *, product_flops: int, lack: str
) -> tuple[bool, str]:
    """Whether C takes the steps, and the reason as the settings of a run state it. `lack`: what forbids it anyhow."""
    if requested == "off":
        return False, "operators: requested"
    if not lack and model.interaction == "dcn":
        lack = "C has no cross layers"
    if not lack and max(len(model.bottom), len(model.top_widths)) - 1 > dlrm_step.MOST_LAYERS:
        lack = f"an MLP has more than {dlrm_step.MOST_LAYERS} layers"
    if not lack and settings.device.type != "cpu":
        lack = f"the tensors are on {settings.device.type}"
    if not lack and requested == "auto" and settings.threads > 1 and product_flops >= SMALL_PRODUCT_FLOPS:
        lack = f"matrix products that {settings.threads} threads share; C uses one"
    if not lack:
        body, why = dlrm_step.choose("native" if requested == "on" else "auto", settings.device)
        lack = why.partition(": ")[2] if body.__name__.endswith("reference") else ""
    if lack and requested == "on":
        raise MachineError(f"a step cannot be one call of C: {lack}", fix=f"{SWITCH} off")
    return not lack, f"operators: {lack}" if lack else "native: one call of C takes a whole step"


class NativeStep:
    """Takes steps in C, on the model's and the optimizer's own tensors. `reasons` are the settings of the run: they say
    so where operators take the steps of an epoch because C cannot."""

    def __init__(self, model: DLRM, optimizer: AdamW, order: IndexedOrder, *, reasons: dict[str, str]) -> None:
        self.model, self.optimizer, self.samples, self.reasons = model, optimizer, order.order.samples, reasons
        self._permutation_N: Tensor | None = None
        self._step: Any = None

    def __call__(
        self, batches: Iterator[IndexedBatch], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]:
        with span("data"):
            batch = next(batches)
        if batch.permutation_N is not self._permutation_N:
            self._begin_epoch(batch.permutation_N)
        if self._step is None:
            return self._by_operators(batch, rate, record_norm)
        times: dict[str, int] | None = {} if clocked() else None
        loss, norm = self._step(batch.start, batch.stop, rate=rate, norm=record_norm is not None, times=times)
        if times is not None:
            report(times)
        if record_norm:
            record_norm(norm)
        return loss, len(batch)

    def clocked(self, batches: Iterator[IndexedBatch], rate: float) -> tuple[int, dict[str, int]]:
        clock = StepClock()
        clock.begin()
        self(batches, rate)
        return clock.end()

    def _begin_epoch(self, permutation_N: Tensor) -> None:
        """Read the addresses anew: since the last epoch parameters may have been replaced, frozen or given hooks."""
        self._permutation_N, self._step, lack = permutation_N, None, self._lack()
        if not lack:
            body, _ = dlrm_step.choose("native", self.samples.labels_N.device)
            samples = self.samples
            rows = TrainingRows(dense_ND=samples.dense_ND, ids_FN=samples.ids_FN, labels_N=samples.labels_N)
            self._step = body.Step(network_of(self.model, self.optimizer), rows, permutation_N)
        elif not self.reasons["step"].endswith(lack):
            self.reasons["step"] = f"operators: {lack}"

    def _lack(self) -> str:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                return "a parameter is frozen"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return "a parameter has hooks on its gradient"
        if {*map(id, self.model.parameters())} != {*map(id, self.optimizer.parameters)}:
            return "the optimizer has other parameters than the model"
        return ""

    def _by_operators(self, batch: IndexedBatch, rate: float, record_norm: RecordNorm | None) -> tuple[Tensor, int]:
        loss = self.model.loss(batch.gathered())
        with span("backward"):
            loss.backward()
        with span("update"):
            if record_norm:
                record_norm(self.optimizer.gradient_norm())
            self.optimizer.step(rate)
        return loss.detach(), len(batch)


def network_of(model: DLRM, optimizer: AdamW) -> Network:
    """The tensors of a model and of its optimizer."""
    interaction, tables = model.interaction, model.embeddings
    assert isinstance(tables, StackedTables)
    assert isinstance(interaction, (Concat, Dot))
    dense, sparse = optimizer.groups
    return Network(
        rows=tables.rows,
        bottom=[*model.bottom.flat],
        top=[*model.top.flat],
        table_RD=tables.weight_RD,
        means=[*dense.means, *sparse.means],
        squares=[*dense.squares, *sparse.squares],
        steps=optimizer.steps,
        dot=isinstance(interaction, Dot),
        diagonal=isinstance(interaction, Dot) and interaction.diagonal,
        decays=(dense.decay, sparse.decay),
        betas=optimizer.betas,
        eps=optimizer.eps,
    )
