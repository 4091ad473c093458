"""A trial of dlrm-v4: the model, its optimizer, its batches window after window, and its evaluations.

Shapes: B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...data.batch import HistoryBatch
from ...data.streaming.loader import StreamOrder
from ...distributed.ranks import current
from ...distributed.shares import SharedScores
from ...execution.submission import Submission, micro_batch
from ...execution.tables import placed_tables, table_share
from ...execution.workload import TRAINED, Predictions, Prepared, Trial
from ...measure.cost import FLOAT, Cost
from ...models.dlrm_v4.cost import load_of, step
from ...models.dlrm_v4.exchanged import exchanged, inputs_of
from ...models.dlrm_v4.inputs import prepare
from ...models.dlrm_v4.model import DLRMv4
from ...models.dlrm_v4.padding import Padding
from ...models.dlrm_v4.tables import DLRMv4Tables, TieredDLRMv4Tables
from ...models.tiers.cache import TieredRows
from ...models.tiers.config import Tiers
from ...models.tiers.opening import open_tiers
from ...ops.arrange import native
from ...runs.mlperf.log import Facts, MLPerfLog, Precision
from ...stop import poll, reached
from ...train.baselines import blend
from ...train.device import (
    BETWEEN_RANKS,
    SLOTS_ON_HOST,
    SWITCH,
    Settings,
    choose,
    choose_graph,
    repeatable,
    resident_threads,
)
from ...train.graph import GraphStep
from ...train.loop import Position, Recipe, WholeStep
from ...train.metrics import Tally, binary_metrics, normalized_entropy
from ...train.watch import Due
from .. import division
from .config import (
    DLRM_V4,
    SMALL,
    DLRMv4WorkloadConfig,
    estimate,
    lacking_for_graph,
    layer_numbers,
    require_room,
    table_state,
)
from .data import EventWindows, Part, Positions
from .ranking import candidate_logits
from .steps import AdamAndRows, InputOrder, Numbered, PackedBatch, PackedFeed, PackedOrder, SteppedModel, learning_rate

SENT: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "bf16": "bfloat16"}
"""Names of precisions in an MLPerf log; gradients of dense parameters are sent in fp32."""
MOST_PROBED = 10_000
"""Anchors that inputs are exchanged between, at most."""


def settings_of(config: DLRMv4WorkloadConfig) -> Settings:
    model = config.model
    product = 2 * config.train.batch_size * model.hstu.max_length * model.dim * model.hstu.uvqk_width
    settings = choose(config.train, largest_product_flops=product)
    # The precision of the transducer; the rest of the model is float32.
    settings = replace(settings, precision=model.precision, others_exact=True)
    return repeatable(settings) if config.train.deterministic else settings


def make_model(
    config: DLRMv4WorkloadConfig, tiers: Tiers, device: torch.device, *, seed: int, tables: Any = None
) -> DLRMv4:
    """A model with these tables, or with all of them where it was decided."""
    model, rule = config.model, config.train.table_optimizer
    if tables is None and tiers.placement == "device":
        tables = DLRMv4Tables(model, rule, seed=seed, device=device)
    elif tables is None:
        rows = open_tiers(model.table_rows, tiers, dim=model.table_dim, state=table_state(config), device=device)
        tables = TieredDLRMv4Tables(model, rows, rule, seed=seed)
    return DLRMv4(model, seed=seed, device=device, tables=tables)


class PreparedHistories(EventWindows, Prepared):
    """Events divided into windows, and the device and settings that train on them."""

    def __init__(self, config: DLRMv4WorkloadConfig) -> None:
        require_room(config)
        super().__init__(config)
        self.settings = settings_of(config)
        self.histories = self.gatherer(pin=self.settings.device.type == "cuda")
        share = table_share(DLRM_V4.planned(config), config.distributed, on_host=False)
        self.tiers = placed_tables(config.tables, estimate(config), self.settings.device, share=share)
        self.settings.reasons["tables"] = self.tiers.why
        self.graph, self.settings.reasons["graph"] = self._graph()

    def _graph(self) -> tuple[bool, str]:
        """Whether a step runs as a CUDA graph, and why: batches are padded to one shape for it."""
        config, device = self.config, self.settings.device
        lack = current().choose("", several=BETWEEN_RANKS)
        if not lack and self.tiers.placement != "device":
            lack = SLOTS_ON_HOST
        if not lack and isinstance(without := native.library(), str):
            lack = f"batches are padded in C, but {without}"
        samples, threads = config.train.batch_size, resident_threads(device) if device.type == "cuda" else None
        lack = lack or lacking_for_graph(config, samples, threads)
        numbers = layer_numbers(config, samples)
        why = f"a layer computes {numbers:,} numbers, at most {SMALL} for each thread of this GPU; batches are padded"
        return choose_graph(config.train.graph, device, lack, why=why, switch=SWITCH)

    def trial(self, seed: int) -> HistoryTrial:
        return HistoryTrial(self, seed)

    def step_cost(self, batch: Numbered | PackedBatch, ids: int, unique: int) -> dict[str, Cost]:
        model = self.config.model
        if isinstance(batch, PackedBatch):
            lengths = batch.history.history_offsets_B1.diff() + model.context_tokens + 1
        else:
            lengths = batch.inputs.offsets_B1.diff()
        return step(model, [load_of(model, lengths.tolist())], rows=unique, state=table_state(self.config))

    def table_bytes(self) -> tuple[int, int]:
        row = FLOAT * self.config.model.table_dim
        return row, row * sum(self.config.model.table_rows.values())


class HistoryTrial(Trial):
    """One model, its optimizer and the order of its batches."""

    def __init__(self, prepared: PreparedHistories, seed: int) -> None:
        config, device = prepared.config, prepared.settings.device
        self.prepared, self.ranks = prepared, division(prepared, DLRM_V4.planned)
        self.model = make_model(config, prepared.tiers, device, seed=seed, tables=self.ranks.tables(seed))
        self.optimizer = AdamAndRows(self.model, config.train)
        self.stepped = SteppedModel(self.model, seed, device)
        self.order = prepared.train_order()
        self.scored = Tally()
        """Counts of the predictions of all evaluations so far."""
        inputs, train = self._training_inputs(), config.train
        self.rise = rise = train.warmup_steps or max(1, round(train.rise * train.epochs * len(inputs)))
        recipe = Recipe(
            model=self.stepped,
            optimizer=self.optimizer,
            order=inputs,
            learning_rate=lambda step: learning_rate(train, step, rise, train.epochs * len(inputs)),
            epochs=train.epochs,
            max_steps=train.max_steps,
            evaluate_after=self._evaluations(),
            save_after=self._after_windows(train.checkpoint_windows),
            events_after=self._windows_left,
            evaluation_facts=self._evaluation_facts,
            training_metrics=self.stepped.seen,
            validation_loss=self._validation_loss if prepared.validation else None,
            patience=train.patience,
            whole_step=self._whole_step(inputs),
        )
        self.recipe = self.ranks.histories(recipe, self.model)

    def _training_inputs(self) -> InputOrder:
        inputs = self.inputs(self.order)
        if not self.prepared.graph:
            return inputs
        config = self.prepared.config
        # Only what is packed needs pinned memory.
        parts = (inputs.order, self.prepared.gatherer(), inputs.model, inputs.device, inputs.workers)
        return PackedOrder(*parts, Padding(config.model, config.train.batch_size))

    def _whole_step(self, inputs: InputOrder) -> WholeStep | None:
        """The step as a graph. Even at learning rate 0 it changes the rows' optimizer states and counts predictions."""
        if not isinstance(inputs, PackedOrder):
            return None
        settings, tables, recent = self.prepared.settings, self.model.tables, self.stepped.recent
        states = [state for name in tables.names if (state := tables.state(name)) is not None]
        return GraphStep(
            self.stepped,
            self.optimizer,
            PackedFeed(inputs.padding, settings.device),
            device=settings.device,
            reasons=settings.reasons,
            requested_by=SWITCH if self.prepared.config.train.graph == "on" else None,
            state=lambda: [*states, recent.counts_2K, recent.sums_2],
        )

    def inputs(self, order: StreamOrder) -> InputOrder:
        prepared = self.prepared
        device, workers = prepared.settings.device, prepared.config.data.workers
        inputs = InputOrder(order, prepared.histories, prepared.config.model, device, workers, tiers=self.tiers())
        return self.ranks.dealt(inputs)

    def tiers(self) -> TieredRows | None:
        return getattr(self.model.tables, "tiers", None)

    def _after_windows(self, windows: int) -> Due:
        """Due at the end of every `windows` windows, 0: never; an empty window ends with the one before."""
        seams = set(self.order.seams_S[windows - 1 :: windows].tolist()) - {0} if windows else set()
        return lambda at: at.batch in seams

    def _evaluations(self) -> Due:
        """At the ends of windows, or whenever a share of all samples was trained on. The end of the training is
        evaluated in any case."""
        options, batch_size = self.prepared.config.evaluate, self.prepared.config.train.batch_size
        samples = int(self.order.counts_S.sum())
        first, by_window = options.first_step(samples, batch_size), self._after_windows(options.every_windows)
        steps = max(1, math.ceil(options.every_share * samples / batch_size)) if options.every_share else 0
        return lambda at: at.step >= first and (by_window(at) or (steps > 0 and at.step % steps == 0))

    def _windows_left(self, at: Position) -> list[dict[str, Any]]:
        """Events for the log, one for each window that ends at this position."""
        order = self.order
        return [
            {
                "kind": "window", "window": order.windows[place], "anchors": int(order.counts_S[place]),
                "in_no_full_batch": int(order.leftovers_S[place]), "leftover": order.leftover,
            }
            for place in np.flatnonzero(order.seams_S == at.batch).tolist()
        ]  # fmt: skip

    def _evaluation_facts(self, at: Position) -> dict[str, Any]:
        part = self.prepared.part_at(at)
        rows = self.prepared.valid_order(part).samples
        return {"first_window": part.windows.start, "windows": len(part.windows), "rows": rows}

    def samples(self, step: int) -> int:
        """Number of samples that were trained on after this many steps."""
        epoch, batch = divmod(step, len(self.order))
        return epoch * self.order.samples + self.order.samples_until(batch)

    @torch.no_grad()
    def predictions(self, at: Position | None = None) -> Predictions:
        """Predictions for every anchor of the windows that are due; a rank scores its part of each batch."""
        part = self.prepared.part_at(at)
        logits_N, labels_N = self._scored(part)
        rows = self.prepared.rows_of(part)
        return Predictions(logits_N, labels_N, rows.users_N, rows.items_N)

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """The log loss of the rows that choose the epoch. A model that reads running rates gets their regression added,
        as far as it predicts these rows: training alone would have to find it again."""
        prepared, rates = self.prepared, self.model.rates
        assert prepared.validation is not None
        if rates is None:
            return binary_metrics(*self._scored(prepared.validation))["log_loss"]
        rates.reset_added()
        logits_N, labels_N = self._scored(prepared.validation)
        weights_F, intercept, beside_N = prepared.rates_regression
        scale, share, constant = blend(logits_N.double().numpy(), beside_N, labels_N.numpy())
        rates.add(scale, torch.from_numpy(share * weights_F).float(), constant + share * intercept)
        blended_N = scale * logits_N.double() + share * torch.from_numpy(beside_N) + constant
        return binary_metrics(blended_N, labels_N)["log_loss"]

    def _scored(self, part: Part) -> tuple[Tensor, Tensor]:
        """Logits and labels of all anchors of a part."""
        self.model.eval()
        inputs, scores = self.inputs(self.prepared.valid_order(part)), SharedScores(current())
        for number, batch in enumerate(inputs.loader()):
            poll()
            own = inputs.inputs(batch)
            scores.add(self.model(own), own.labels_B, inputs.parts(batch))
            if number == 0:
                reached("evaluation: first batch scored")
        return scores.gather(inputs.order.samples)

    @torch.no_grad()
    def probes(self) -> Iterator[tuple[str, Tensor]]:
        prepared = self.prepared
        if prepared.validation is None:
            return
        chosen_N = _some(prepared.positions(prepared.validation))
        yield "", self._losses(chosen_N)
        if prepared.last_trained is not None:
            yield TRAINED, self._losses(_some(prepared.positions(prepared.last_trained)))
        for name in inputs_of(prepared.config.model):
            yield name, self._losses(chosen_N, lambda batch, name=name: exchanged(batch, name))  # type: ignore[misc]

    def _losses(
        self, positions_N: Positions, change: Callable[[HistoryBatch], HistoryBatch] = lambda batch: batch
    ) -> Tensor:
        """The log loss of each of these anchors, of batches that are changed before they are scored."""
        self.model.eval()
        prepared, inputs, losses = self.prepared, self.inputs(self.order), [torch.zeros(0, dtype=torch.float64)]
        size = prepared.config.evaluate.batch_size or prepared.config.train.batch_size
        for first in range(0, len(positions_N), size):
            poll()
            own = inputs.inputs(change(prepared.histories.batch(positions_N[first : first + size])))
            logits_B, labels_B = self.model(own).double(), own.labels_B.double()
            losses.append(F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none").cpu())
        return torch.cat(losses)

    def metrics(self, predictions: Predictions) -> dict[str, float]:
        """Counts the predictions towards the lifetime AUC."""
        logits_N, labels_N = predictions.logits_N, predictions.labels_N
        self.scored.add(logits_N, labels_N)
        metrics = binary_metrics(logits_N, labels_N)
        entropy = normalized_entropy(metrics["log_loss"], float(labels_N.double().mean()))
        return {**metrics, "normalized_entropy": entropy, "lifetime_auc": self.scored.auc()}

    def candidate_logits(self, rows_P: Tensor, items_P: Tensor) -> Tensor:
        self.model.eval()
        prepared, inputs = self.prepared, self.inputs(self.order).inputs
        positions_P = prepared.events.positions_N[rows_P.numpy()]
        batch_size = prepared.config.evaluate.batch_size or prepared.config.train.batch_size
        events = prepared.histories.events(positions_P, prepared.store.kinds(positions_P))
        queries = replace(events, items_B=items_P.numpy())
        return candidate_logits(self.model, inputs, prepared.histories, queries, batch_size)

    def rows_of(self, batch: Numbered | PackedBatch) -> Tensor:
        """Rows of all tables that a batch looks up, without repeats; the tables are numbered through."""
        model = self.prepared.config.model
        used = (prepare(batch.history, model) if isinstance(batch, PackedBatch) else batch.inputs).rows
        rows_by_table, start = [], 0
        for name, rows in self.tables():
            if name in used:
                rows_by_table.append(used[name].long() + start)
            start += rows
        return torch.cat(rows_by_table)

    def tables(self) -> list[tuple[str, int]]:
        return list(self.prepared.config.model.table_rows.items())

    def state(self) -> dict[str, Any]:
        world, recent = current(), self.stepped.recent
        counted = {**self._tallies(), "recent": world.merge_tally(recent)}
        tallies = {name: tally.state() for name, tally in counted.items()}
        # In which order numbers are added up shows in their last bit, so ranks keep what each of them has.
        sums_R2 = torch.zeros(world.size, 2, dtype=torch.float64)
        sums_R2[world.rank] = recent.sums_2
        tallies["recent"]["sums of ranks"] = world.sum_(sums_R2)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "tallies": tallies}
        return self.ranks.saved(state)

    def restore(self, state: dict[str, Any]) -> None:
        world, state = current(), self.ranks.restored(state)
        self.model.tables.forget()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, tally in self._tallies().items():
            tally.load(state["tallies"][name])
        if not world.is_leader:
            # Rank 0 has what all counted.
            self.stepped.recent.clear()
        sums_R2 = state["tallies"]["recent"].get("sums of ranks")
        if sums_R2 is not None and len(sums_R2) == world.size:
            self.stepped.recent.sums_2.copy_(sums_R2[world.rank])

    def _tallies(self) -> dict[str, Tally]:
        return {"train": self.stepped.lifetime, "recent": self.stepped.recent, "valid": self.scored}


def _some(positions_N: Positions) -> Positions:
    return positions_N[:: max(1, -(-len(positions_N) // MOST_PROBED))]


def submission(trial: HistoryTrial, seed: int, log: MLPerfLog) -> Submission:
    config = trial.prepared.config
    train, model, evaluate = config.train, config.model, config.evaluate
    samples = int(trial.order.counts_S.sum())
    precision: Precision = "bfloat16" if model.precision == "bfloat16" else "fp32"
    facts = Facts(
        seed=seed,
        train_samples=samples,
        eval_samples=trial.prepared.valid_samples,
        global_batch_size=train.batch_size,
        learning_rate=train.learning_rate,
        table_learning_rate=train.table_learning_rate,
        warmup_steps=trial.rise,
        max_sequence_length=model.hstu.max_length,
        eval_every_data_pct=evaluate.every_share,
        skip_eval_epoch_pct=evaluate.first_step(samples, train.batch_size) * train.batch_size / samples,
        clip=train.clip,
        linear_precision=precision,
        attention_precision=precision,
        communication_precision=current().choose("fp32", several=SENT[config.distributed.all_to_all]),
        micro_batch_size=micro_batch(train.batch_size),
    )
    return Submission(log=log, facts=facts, recipe=trial.recipe, samples=trial.samples, target=config.target.auc)
