"""The training step of micro-dlrm: one call of C where that is faster, otherwise operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import MachineError
from ...measure.spans import StepClock, clocked, report, span
from ...models.config import DLRMConfig
from ...models.dlrm import DLRM
from ...models.embeddings import StackedTables
from ...models.interaction import Concat, Dot
from ...ops import dlrm_step
from ...ops.choice import began_with, note_used
from ...ops.dlrm_step import Network, TrainingRows
from ...train.device import Settings
from ...train.feeds import IndexedBatch, IndexedOrder
from ...train.graph import Requested
from ...train.loop import RecordNorm
from ...train.optim import AdamW
from .config import beyond_cache

SWITCH = "--train.native"
ONE_THREAD = "1: the step in C uses one thread"


@dataclass(frozen=True)
class StepChoice:
    """What takes the steps of a new run, and the reason."""

    native: bool
    why: str
    possible: bool = True
    """Whether C can take them at all: a resumed run that began with C keeps it."""
    requested: bool = False
    """Whether the user asked for C: that it cannot take a step is an error then."""

    @property
    def text(self) -> str:
        return f"{'native' if self.native else 'operators'}: {self.why}"


def choose_step(requested: Requested, settings: Settings, model: DLRMConfig, *, lack: str) -> StepChoice:
    """Choose between C and operators. `lack`: what forbids C anyhow."""
    if requested == "off":
        return StepChoice(False, "requested", possible=False)
    lack = lack or _lack_of(settings, model)
    if not lack:
        body, why = dlrm_step.choose("native" if requested == "on" else "auto", settings.device)
        lack = why.partition(": ")[2] if body.__name__.endswith("reference") else ""
    if lack:
        if requested == "on":
            raise MachineError(f"a step cannot be one call of C: {lack}", fix=f"{SWITCH} off")
        return StepChoice(False, lack, possible=False)
    if requested == "on":
        return StepChoice(True, "requested", requested=True)
    if settings.threads > 1:
        return StepChoice(False, f"{settings.threads} threads; C uses one")
    if larger := beyond_cache(model):
        return StepChoice(False, larger)
    return StepChoice(True, "one call of C takes a whole step")


def _lack_of(settings: Settings, model: DLRMConfig) -> str:
    if settings.device.type != "cpu":
        return f"the tensors are on {settings.device.type}"
    if model.interaction == "dcn":
        return "C has no cross layers"
    if max(len(model.bottom), len(model.top_widths)) - 1 > dlrm_step.MOST_LAYERS:
        return f"an MLP has more than {dlrm_step.MOST_LAYERS} layers"
    return ""


class NativeStep:
    """Takes steps in C, on the model's and the optimizer's own tensors, or by operators: as the run began, else as
    chosen. `reasons` are the settings of the run: they say what takes the steps."""

    def __init__(
        self, model: DLRM, optimizer: AdamW, order: IndexedOrder, *, choice: StepChoice, reasons: dict[str, str]
    ) -> None:
        self.model, self.optimizer, self.samples = model, optimizer, order.order.samples
        self.choice, self.reasons = choice, reasons
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
        choice, lack = self._choice(), self._lack()
        if choice.native and lack:
            if choice.requested:
                raise MachineError(f"a step cannot be one call of C: {lack}", fix=f"{SWITCH} off")
            choice = StepChoice(False, lack)
        self._permutation_N, self._step, self.reasons["step"] = permutation_N, None, choice.text
        note_step(choice)
        if choice.native and not self.choice.native and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            self.reasons["threads"] = ONE_THREAD
        if choice.native:
            body, _ = dlrm_step.choose("native", self.samples.labels_N.device)
            samples = self.samples
            rows = TrainingRows(dense_ND=samples.dense_ND, ids_FN=samples.ids_FN, labels_N=samples.labels_N)
            self._step = body.Step(network_of(self.model, self.optimizer), rows, permutation_N)

    def _choice(self) -> StepChoice:
        """Both have their own rounding: a resumed run keeps what it began with."""
        began = began_with(dlrm_step.DLRM_STEP)
        if self.choice.requested or began is None or (began == "native") == self.choice.native:
            return self.choice
        return StepChoice(began == "native", "the run began so")

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
        with span("data"):
            samples = batch.gathered()
        loss = self.model.loss(samples)
        with span("backward"):
            loss.backward()
        with span("update"):
            if record_norm:
                record_norm(self.optimizer.gradient_norm())
            self.optimizer.step(rate)
        return loss.detach(), len(batch)


def note_step(choice: StepChoice) -> None:
    """Let the run record what takes its steps."""
    note_used(dlrm_step.DLRM_STEP, "native" if choice.native else "operators")


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
