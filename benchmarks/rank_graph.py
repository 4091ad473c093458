"""What ranks of dlrm lose because their steps are no CUDA graph.

TorchRec reads on the host how many ids come from each rank, so a rank's step cannot be captured as a whole. Only the
part between the lookup and the sparse update could be: both MLPs, the interaction, their backward passes and the dense
update. That part is taken here by itself, with rows that are simply there, kernel by kernel and as a graph; the
difference is what a graph would save a rank at most. Beside it stands the whole step of a single process, eager and as
a graph.

The batch is a rank's share. Rounds of all variants alternate. Run as `python benchmarks/rank_graph.py` on a GPU;
`--tiny` tries the script on a CPU, without graphs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from _rows import record, row, show
from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.embeddings import Embeddings
from recperf.models.streams import SideStreams
from recperf.train.device import applied
from recperf.train.graph import GraphStep
from recperf.train.loop import take_step
from recperf.train.optim import DenseOptimizer, make_dense
from recperf.workloads.dlrm.build import ConfiguredDLRM, DLRMBuilder, PreparedDLRM
from recperf.workloads.dlrm.config import DLRMWorkloadConfig, dcnv2, intended

NAME = "rank_graph"
Steps = Callable[[int], None]


class FixedRows(Embeddings):
    """Stands for a lookup whose rows have come: returns the same ones in every step."""

    def __init__(self, features: int, samples: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("pooled_FBD", torch.randn(features, samples, dim))
        self.pooled_FBD: Tensor

    def reset(self, std: float, seed: int) -> None:
        """There is nothing to draw."""

    def check(self, features: JaggedFeatures) -> None:
        """Ids are not read."""

    def record(self, features: JaggedFeatures) -> tuple[Tensor, None]:
        return self.pooled_FBD, None

    def backward(self, saved: None, features: JaggedFeatures, gradient_FBD: Tensor) -> None:
        """The sparse update is TorchRec's."""


class FixedFeed:
    """The same batch in every step."""

    counters: tuple[Tensor, ...] = ()

    def __init__(self, batch: ClickBatch) -> None:
        self.batch = batch

    def load(self, batches: Iterator[Any]) -> None:
        pass

    def draw(self) -> None:
        pass


class Joined:
    """The dense optimizer, after the streams on which weight gradients may still be computed."""

    def __init__(self, dense: DenseOptimizer, streams: SideStreams) -> None:
        self.dense, self.streams = dense, streams
        self.gradient_norm, self.state_dict = dense.gradient_norm, dense.state_dict
        self.load_state_dict = dense.load_state_dict

    def step(self, learning_rate: float | Tensor) -> None:
        self.streams.join_all()
        self.dense.step(learning_rate)


class DensePart(DLRMBuilder):
    """The dense part of a step, taken kernel by kernel or as a graph."""

    def __init__(self, config: DLRMWorkloadConfig, *, graph: bool) -> None:
        self.prepared = ConfiguredDLRM(config)
        model, train, settings = config.dlrm, config.train, self.prepared.settings
        device, samples = settings.device, train.batch_size
        # A graph may compute weight gradients on another stream.
        streams = SideStreams(enabled=graph)
        self.model = self._model(0, streams)
        dense = make_dense(train.optimizer, [(self.model.dense_parameters(), 0.0)], eps=train.eps)
        no_ids = torch.zeros(len(model.features) * samples + 1, dtype=torch.int64, device=device)
        features = JaggedFeatures(model.features, no_ids[:0], no_ids, False)
        batch = ClickBatch(
            torch.randn(samples, model.dense, device=device), features, torch.ones(samples, device=device)
        )
        step = GraphStep(
            self.model, Joined(dense, streams), FixedFeed(batch), device=device, reasons=settings.reasons,
            requested_by="--graph" if graph else None, streams=streams,
        )  # fmt: skip
        self.take = step if graph else step.eager

    def _embeddings(self, device: torch.device, streams: SideStreams) -> Embeddings:
        model = self.prepared.model
        return FixedRows(len(model.features), self.prepared.config.train.batch_size, model.dim)

    def steps(self, count: int) -> None:
        with applied(self.prepared.settings):
            for _ in range(count):
                self.take(iter(()), 1e-3)


class WholeStep:
    """The step of a single process."""

    def __init__(self, config: DLRMWorkloadConfig, *, graph: bool) -> None:
        self.prepared = PreparedDLRM(replace(config, fast=replace(config.fast, graph="on" if graph else "off")))
        self.recipe = self.prepared.trial(0).recipe
        self.recipe.model.train()
        self.batches = itertools.chain.from_iterable(self.recipe.order.batches(epoch) for epoch in itertools.count())

    def steps(self, count: int) -> None:
        with applied(self.prepared.settings):
            for _ in range(count):
                take_step(self.recipe, self.batches, 0)


def variants(config: DLRMWorkloadConfig, *, graphs: bool) -> dict[str, Steps]:
    made: dict[str, Steps] = {}
    for way in ("eager", "graph") if graphs else ("eager",):
        made[f"dense part, {way}"] = DensePart(config, graph=way == "graph").steps
        made[f"one process, {way}"] = WholeStep(config, graph=way == "graph").steps
    return made


def measured(takers: dict[str, Steps], rounds: int, each: int, sync: Callable[[], None]) -> dict[str, list[float]]:
    """ms a step, in rounds that alternate; the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in takers}
    for number in range(rounds + 1):
        for name, take in takers.items():
            take(max(1, each // 10))
            sync()
            began = perf_counter()
            take(each)
            sync()
            if number:
                times[name].append((perf_counter() - began) / each * 1e3)
    return times


def config(preset: str, batch: int, *, tiny: bool) -> DLRMWorkloadConfig:
    base = {"intended": intended, "dcnv2": dcnv2}[preset]()
    # The tables of a single process only have to be there.
    model = replace(base.model, row_scale=0.01)
    if tiny:
        model = replace(model, rows=(50, 60), dim=8, bottom=(8, 8), top=(8, 1), interaction="dot", features=())
    data = replace(base.data, ids_per_bag=4, ids_per_feature=()) if tiny else base.data
    train = replace(base.train, batch_size=batch, device="cpu" if tiny else "cuda")
    return replace(base, data=data, model=model, train=train)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["intended", "dcnv2"], choices=("intended", "dcnv2"))
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 2048, 8192], help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--each", type=int, default=100, help="steps of a round")
    parser.add_argument("--note", default="", help="about the machine, stored with the rows")
    parser.add_argument("--dry", action="store_true", help="print, store no rows")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, to try the script; implies --dry")
    options = parser.parse_args()
    if options.tiny:
        options.presets, options.batches, options.rounds, options.each, options.dry = ["intended"], [8], 2, 2, True
    elif not torch.cuda.is_available():
        print("error: torch sees no GPU; try the script with --tiny", file=sys.stderr)
        return 4
    sync: Callable[[], None] = (lambda: None) if options.tiny else torch.cuda.synchronize
    rows = []
    for preset in options.presets:
        for batch in options.batches:
            takers = variants(config(preset, batch, tiny=options.tiny), graphs=not options.tiny)
            times = measured(takers, options.rounds, options.each, sync)
            conditions = {"preset": preset, "batch": batch, "block": options.each, "note": options.note}
            rows += [row(NAME, name, "step_ms", "ms", values, conditions) for name, values in times.items()]
            if not options.tiny:
                saved = [slow - fast for slow, fast in zip(times["dense part, eager"], times["dense part, graph"])]
                rows.append(row(NAME, "dense part, eager minus graph", "step_ms", "ms", saved, conditions))
    for entry in rows:
        print(f"{entry['conditions']['preset']:>9} {entry['conditions']['batch']:>6} {show(entry)}")
    if not options.dry:
        print(f"rows appended to {record(rows)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
