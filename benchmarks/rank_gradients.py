"""The dense gradients of two gloo ranks: recperf's buckets, and torch's DistributedDataParallel (DDP).

One pair of processes holds two trainings that begin alike, and they take turns in pairs of blocks; which goes first
alternates. So both see the same state of the machine, and each must have the losses and weights of the other to the
bit. A ratio is that of a pair of blocks: of their time, by the last rank to be done, and of the CPU time of all ranks,
which other work on the machine changes less. Its interval is that of the median (95 %, by resampling the pairs). A
second pair of trainings, both with recperf's buckets, says how well this tells two ways apart.

DDP sums with torch's own reducer: gradients are views of its buckets, and the loss of the whole batch travels as the
gradient of one more parameter. DDP hears of gradients from one backward pass of autograd, as hstu's is. That of the
click models is written out, and that of dlrm-v4 is several passes, one for each part that has a name in a profile; so
their gradients are passed through autograd once they are all there.

`--resume` compares the weights of a training with those of one whose exchange is created anew in the middle, as by a
resumed process, on as many ranks as `--ranks` says.

Run as `python benchmarks/rank_gradients.py`; it starts the ranks itself. Needs TorchRec.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from _ranks import join, start
from _rows import record, row, show
from recperf.distributed.config import BUCKET_BYTES
from recperf.distributed.library import require_torchrec
from recperf.distributed.step import Agreement, RankStep, Reduction
from recperf.distributed.waits import SharedWindow
from recperf.errors import RecperfError
from recperf.execution.clocked_steps import endless
from recperf.measure.peaks.other_work import OtherWork
from recperf.measure.spans import span
from recperf.train.device import applied
from recperf.train.loop import RecordNorm, take_step
from recperf.workloads import find

NAME = "rank_gradients"
WORKLOADS = {
    "micro-dlrm": ("default", 0, 20),
    "dlrm": ("experiment", 256, 4),
    "dlrm-v4": ("laptop", 0, 4),
    "hstu": ("default", 0, 4),
}
"""The preset of each, its samples of a batch (0: the preset's), and the steps of a block."""
OURS, SAME, TORCH = "recperf", "recperf again", "DDP"
AIM = 1.03
"""DDP would replace recperf's buckets if it were no slower than this and resumed to the bit."""
WHOLE_MB, RESAMPLED = 1 << 10, 5000
"""A bucket for all gradients, and how often pairs are resampled for an interval."""

Pairs = tuple[list[float], list[float]]


class Parameters(nn.Module):
    """What DDP wraps: dense parameters, and one for the loss."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.each = nn.ParameterList(parameters)
        self.loss = nn.Parameter(torch.zeros((), device=parameters[0].device))
        """Its gradient is the loss."""

    def forward(self) -> None:
        """Losses are computed elsewhere: DDP only prepares for a backward pass."""


def summed(_, bucket):  # type: ignore[no-untyped-def]
    """How DDP sums a bucket: losses of ranks add up, where its default is a mean. DDP refuses postponed annotations."""
    return distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda one: one.value()[0])


class TorchStep(RankStep):
    """The step of a rank with DDP in place of its reduction."""

    def __init__(self, ours: RankStep) -> None:
        super().__init__(ours.model, ours.optimizer, ours.reduction, ours.tables, table_rate=ours.table_rate)
        self.agreement = Agreement(ours.reduction.world)
        self.held = Parameters([one for one in ours.reduction.parameters if one.requires_grad])
        self.parameters = list(self.held.parameters())
        megabytes = BUCKET_BYTES >> 20 if ours.reduction.overlap else WHOLE_MB
        self.ddp = DistributedDataParallel(self.held, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
        # A mean of losses scaled up is cheaper than a hook in Python, but would scale the gradients of rows too.
        self.scale = 1 if self.tables else ours.reduction.world.size
        if self.tables:
            self.ddp.register_comm_hook(None, summed)

    def __call__(
        self, batches: Iterator[Any], rate: float, record_norm: RecordNorm | None = None
    ) -> tuple[Tensor, int]:
        with span("data"):
            batch = next(batches)
        if self.tables:
            self.tables.set_rate(float(rate) * self.table_rate)
            self.tables.follow(batch.following, batch.following_ready)
        loss = self.model.loss(batch.part) * (batch.weight * self.scale)
        self.agreement.begin()
        with span("backward"):
            self._backward(loss)
        with span("embedding"):
            if self.tables:
                self.tables.prefetch.send_ahead()
        with span("reduce"):
            self.agreement.finish_all_reduce()
            value, self.held.loss.grad = self.held.loss.grad, None
        with span("update"):
            if record_norm:
                record_norm(self.optimizer.gradient_norm())
            self.optimizer.step(rate)
        assert value is not None
        return value.clone(), len(batch)

    def _backward(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            self.ddp()
            (loss + self.held.loss * loss.detach()).backward()  # type: ignore[no-untyped-call]
            return
        loss.backward()
        self.held.loss.grad = loss.detach()
        parameters = [one for one in self.parameters if one.grad is not None]
        gradients = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        # From here on DDP looks at gradients.
        self.ddp()
        torch.autograd.backward(parameters, gradients)


def renewed(step: RankStep) -> RankStep:
    """The step as a process that has just begun would have it."""
    ours, old = type(step) is RankStep, step.reduction
    plain = RankStep(
        step.model, step.optimizer, Reduction(old.named, old.world, overlap=old.overlap), step.tables,
        table_rate=step.table_rate,
    )  # fmt: skip
    # Hooks of the old one do nothing: it is not armed.
    return plain if ours else TorchStep(plain)


class Training:
    """A training that takes steps of its own kind."""

    def __init__(self, prepared: Any, name: str) -> None:
        self.trial = prepared.trial(0)
        self.recipe = self.trial.recipe
        self.recipe.model.train()
        self.batches = endless(self.recipe.order, 0)
        if name == TORCH:
            self.set(TorchStep(self.recipe.whole_step))
        self.losses: list[float] = []
        self.random = torch.get_rng_state()

    def set(self, step: RankStep) -> None:
        self.recipe = replace(self.recipe, whole_step=step)

    def take(self, count: int) -> None:
        """Steps at the learning rate of the middle of training."""
        # What hstu draws comes from the generator of the process, which both trainings use.
        torch.set_rng_state(self.random)
        losses = [take_step(self.recipe, self.batches, self.recipe.steps // 2)[0] for _ in range(count)]
        self.losses += map(float, losses)
        self.random = torch.get_rng_state()

    def dense(self) -> list[Tensor]:
        return list(self.recipe.whole_step.reduction.parameters)


def blocks(first: Training, other: Training, window: SharedWindow, count: int, each: int) -> tuple[Pairs, Pairs]:
    """ms a step of either by pairs of blocks, and the CPU time of a step on all ranks."""
    taken: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for block in range(count + 1):
        for number in (0, 1) if block % 2 else (1, 0):
            training = (first, other)[number]
            window.meet()
            # What the caches hold is the other's.
            training.take(max(1, each // 10))
            began, used = perf_counter(), process_time()
            training.take(each)
            passed, used = perf_counter() - began, process_time() - used
            if block:
                taken[number].append(window.world.maximum(round(passed * 1e9)) / 1e6 / each)
                cpu[number].append(window.world.total(used) * 1e3 / each)
    return taken, cpu


def interval(ratios: list[float]) -> list[float]:
    """Of the median: 95 %."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (RESAMPLED, len(ratios)))
    return [float(edge) for edge in np.percentile(np.median(drawn, 1), (2.5, 97.5))]


def prepared_of(name: str, overlap: str) -> tuple[Any, Any]:
    preset, samples, _ = WORKLOADS[name]
    workload, config = find(name), find(name).presets[preset]()
    config = replace(
        config,
        train=replace(config.train, device="cpu", threads=1, batch_size=samples or config.train.batch_size),
        distributed=replace(config.distributed, overlap=overlap),
    )
    return config, workload.prepare(config)


def compare(name: str, overlap: str, options: argparse.Namespace, window: SharedWindow) -> list[dict[str, Any]]:
    """Rows of one workload: DDP over ours, and ours over itself."""
    world, rows = window.world, []
    config, prepared = prepared_of(name, overlap)
    each = options.each or WORKLOADS[name][2]
    with applied(prepared.settings):
        for other_way in (TORCH, SAME):
            ours, other = Training(prepared, OURS), Training(prepared, other_way)
            work = OtherWork()
            wall, cpu = blocks(ours, other, window, options.blocks, each)
            conditions = {
                "ranks": world.size, "backend": world.backend, "preset": WORKLOADS[name][0],
                "batch": config.train.batch_size, "overlap": prepared.settings.reasons["overlap"], "block": each,
                "dense_parameters": sum(one.numel() for one in ours.dense()),
                "losses_equal": ours.losses == other.losses,
                "weights_equal": all(map(torch.equal, ours.dense(), other.dense())),
                "other_work": work.share(world.total(work.own_seconds())), "note": options.note,
            }  # fmt: skip
            label = f"{name}, {other_way}"
            for metric, pairs in {"step": wall, "cpu": cpu}.items():
                ratios = [theirs / mine for mine, theirs in zip(*pairs)]
                low, high = interval(ratios)
                verdict = "yes" if high <= AIM else "no" if low > AIM else "not decided"
                facts = {**conditions, "interval": [low, high], "within_aim": verdict}
                rows.append(row(NAME, f"{label} over {OURS}", f"{metric}_ratio", "x", ratios, facts))
                if other_way == TORCH:
                    rows.append(row(NAME, f"{name}, {OURS}", f"{metric}_ms", "ms", pairs[0], conditions))
                    rows.append(row(NAME, label, f"{metric}_ms", "ms", pairs[1], conditions))
    return rows


def resume(name: str, overlap: str, options: argparse.Namespace, window: SharedWindow) -> list[dict[str, Any]]:
    """Rows that say how many weights differ after some steps with an exchange that was created anew before them."""
    rows, world, half = [], window.world, options.resume // 2
    config, prepared = prepared_of(name, overlap)
    with applied(prepared.settings):
        for way in (OURS, TORCH):
            straight, resumed = Training(prepared, way), Training(prepared, way)
            straight.take(2 * half)
            resumed.take(half)
            resumed.set(renewed(resumed.recipe.whole_step))
            resumed.take(half)
            pairs = list(zip(straight.dense(), resumed.dense()))
            differ = sum(int((one != other).sum()) for one, other in pairs)
            conditions = {
                "ranks": world.size, "backend": world.backend, "steps": half, "batch": config.train.batch_size,
                "overlap": prepared.settings.reasons["overlap"], "weights_equal": not differ,
                "losses_equal": straight.losses == resumed.losses,
                "dense_parameters": sum(one.numel() for one, _ in pairs), "note": options.note,
            }  # fmt: skip
            rows.append(row(NAME, f"{name}, {way}, resumed", "changed", "weights", [float(differ)], conditions))
    return rows


def rank(options: argparse.Namespace) -> None:
    """What each rank does; the first stores the rows."""
    world = join(options.meeting)
    window = SharedWindow(world)
    for name in options.workloads:
        for overlap in options.overlap:
            rows = (resume if options.resume else compare)(name, overlap, options, window)
            if world.is_leader:
                for entry in rows:
                    facts = entry["conditions"]
                    equal = "equal" if facts["weights_equal"] else "weights differ"
                    edges = " to ".join(f"{edge:.3f}" for edge in facts.get("interval", []))
                    print(f"{show(entry)} {edges}; {equal}; {facts['overlap'].partition(':')[0]}", flush=True)
                if not options.dry:
                    print(f"rows appended to {record(rows)}", file=sys.stderr)
            world.barrier()
    world.leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--overlap", nargs="+", choices=("auto", "on", "off"), default=["auto"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=60, help="pairs of them")
    parser.add_argument("--each", type=int, default=0, help="steps of a block; 0: as many as suit the workload")
    parser.add_argument("--resume", type=int, default=0, metavar="STEPS", help="compare so many steps instead")
    parser.add_argument("--note", default="", help="about the machine, stored with the rows")
    parser.add_argument("--dry", action="store_true", help="print, store no rows")
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        require_torchrec()
    except RecperfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    if not options.meeting:
        return start(options.ranks)
    rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
