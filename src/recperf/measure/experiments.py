"""Experiments that confirm a verdict: the same step is changed in one way, and its time must follow the shares.

Each variant takes turns with the unchanged step, so that a change of the machine affects both. A step that does not
allow a variant is left alone. All of them train: whoever runs them saves the state before and puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .attribution import divided_ms
from .ceilings import ceilings_of
from .clocks import ThreadClock, cuda_used
from .counting import DispatchMode, named
from .limit_kinds import GRAPH, HOT_IDS, LIMITS, REPLAY, SAME, SMALL, Evidence, Range, limits_by
from .limits import NOTICEABLE
from .operators import RESULT, RowAccess, replaceable
from .peaks.records import Peaks
from .program_facts import is_compiled
from .records import Attribution, DividedOperator, Experiment, Observed, Percentiles
from .trace.nesting import spread as percentiles

SECONDS = 10.0
"""All experiments together may take this long unless more is allowed."""
TURNS = 4
HOT_ROWS = 64
_SPARSE = "aten::_sparse_coo_tensor_with_dims_and_tensors"
OPTIMIZER = "optimizer"
"""The work of an optimizer, which follows the parameters, not the batch."""
TWICE = {name: limit.twice_batch for name, limit in LIMITS.items() if REPLAY not in limit.removed_by} | {
    OPTIMIZER: SAME
}
"""What twice the batch does to the time of each limit that a repeated batch leaves."""
HALF = {limit: (1 / high, 1 / low) for limit, (low, high) in TWICE.items()}


@dataclass(frozen=True)
class Variant:
    name: str
    run: Callable[[], object]
    expected: Range
    rival: Range
    """What is expected if another limit leads."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def confirm(
    step: Callable[..., object],
    batch: Any,
    has_batch: bool,
    attribution: Attribution,
    observed: Observed,
    seconds: float | None = None,
    *,
    peaks: Peaks | None = None,
) -> list[Experiment]:
    """Run the experiments that the step allows and return what each should have done and did."""
    plain = (lambda: step(batch)) if has_batch else step
    shares = attribution.shares
    own_s = max(1e-6, observed.step_ms.p50 / 1e3) * (1 - shares["input"])
    rows: list[Experiment] = []
    if has_batch and shares["input"] >= NOTICEABLE:
        rows.append(_replay(plain, observed.step_ms, shares["input"]))
    if shares["input"] == max(shares.values()):
        # The replay shows that the step waits for its input; nothing else matters as much.
        return rows
    left = SECONDS if seconds is None else seconds
    for variant in _variants(step, plain, batch, has_batch, attribution, observed, peaks):
        turns_s = 2 * TURNS * own_s * 2.5
        if turns_s > left:
            rows.append(Experiment(variant.name, _text(variant.expected), f"it would take {turns_s:.0f} s", "not run"))
            continue
        began = perf_counter()
        rows.append(_run(variant, plain, own_s))
        left -= perf_counter() - began
    return rows


@dataclass(frozen=True)
class ProgramVariant:
    """An experiment with a program, which runs again with some settings."""

    name: str
    settings: dict[str, Any]
    expected: Range
    rival: Range
    why: str = ""

    def shown(self, gain: float, ends: list[float]) -> Experiment:
        """What it shows, by the gain of the changed program and its interval."""
        return judged(self.name, 1 / gain, (1 / ends[0] - 1 / ends[1]) / 2, self.expected, self.rival, self.why)

    def not_run(self, why: str) -> Experiment:
        return Experiment(self.name, _text(self.expected), why, "not run")


def of_program(
    attribution: Attribution, observed: Observed, *, peaks: Peaks | None, has_loader: bool
) -> Iterator[ProgramVariant]:
    """The experiments that a program allows, whose step cannot be called from outside."""
    shares = attribution.shares
    waits = shares["input"]
    if has_loader and waits >= NOTICEABLE:
        why = f": waiting for input ({waits:.0%}) vanishes"
        yield ProgramVariant(REPLAY, {"replay": True}, (0.0, 1 - waits), SAME, why)
    threads = observed.threads
    if observed.device == "cpu" and threads > 1 and waits < max(shares.values()):
        expected, rival = _expected(shares, _half_threads(peaks, threads) | {"input": SAME})
        yield ProgramVariant("half the threads", {"threads": threads // 2}, expected, rival)


def _replay(plain: Callable[[], object], step_ms: Percentiles, share: float) -> Experiment:
    """Without waiting for input the step must take the rest of its time."""
    count = max(3, min(50, int(300 / step_ms.p50)))
    times = percentiles([seconds_of(plain, 1) * 1e3 / step_ms.p50 for _ in range(count)])
    spread = (times.p80 - times.p20 + (step_ms.p80 - step_ms.p20) / step_ms.p50) / 2
    return judged(REPLAY, times.p50, spread, (0.0, 1 - share), SAME, f": waiting for input ({share:.0%}) vanishes")


def _variants(
    step: Callable[..., object],
    plain: Callable[[], object],
    batch: Any,
    has_batch: bool,
    attribution: Attribution,
    observed: Observed,
    peaks: Peaks | None,
) -> Iterator[Variant]:
    own = {limit: share for limit, share in attribution.shares.items() if limit != "input"}
    whole = sum(own.values()) or 1.0
    own = {limit: share / whole for limit, share in own.items()}
    on_cpu = observed.device == "cpu"
    by_batch = _without_optimizer(own, attribution, observed)
    doubled = _doubled(batch) if has_batch else None
    if doubled is not None:
        yield Variant("twice the batch", lambda: step(doubled), *_expected(by_batch, TWICE))
    if has_batch and hasattr(batch, "slice") and hasattr(batch, "__len__") and len(batch) > 1:
        # It knows how to be cut.
        halved = batch.slice(0, len(batch) // 2)
        yield Variant("half the batch", lambda: step(halved), *_expected(by_batch, HALF))
    threads = torch.get_num_threads()
    if on_cpu and threads > 1:
        from .peaks.cpu import using_threads

        ranges = _expected(own, _half_threads(peaks, threads))
        yield Variant("half the threads", plain, *ranges, lambda: using_threads(threads // 2))
    rows = attribution.operators
    replaced = sum(row.random_ms for row in rows if replaceable(row.name, backward=_is_backward(row)))
    random_rows = attribution.random / whole * replaced / max(1e-12, sum(row.random_ms for row in rows))
    # A compiled function that met a dispatch mode would never run compiled again.
    if random_rows >= 0.2 and not is_compiled():
        yield Variant(HOT_IDS, plain, (0.0, 1 - 0.3 * random_rows), SAME, _HotIds)
    # A step that waits for the device cannot be captured.
    if not on_cpu and own["launch"] >= 0.2 and not observed.waits.get("sync"):
        captured = captured_step(plain)
        if captured is not None:
            gone = sum(share for limit, share in own.items() if GRAPH in LIMITS[limit].removed_by)
            yield Variant(GRAPH, captured, (0.0, 1 - 0.5 * gone), SAME)


def _is_backward(row: DividedOperator) -> bool:
    return row.place is not None and row.place.backward


def _half_threads(peaks: Peaks | None, threads: int) -> dict[str, Range]:
    """What half the threads do to the time of each limit.

    At least half of what they do to its measured ceiling: two threads may share a core, and one may reach all memory
    bandwidth. At most what they do to perfectly divided work.
    """
    every, half = (ceilings_of(peaks, threads=count) for count in (threads, threads // 2))
    slower = {
        name: limit.half_threads(every, half) if every is not None and half is not None else 1.0
        for name, limit in LIMITS.items()
        if limit.half_threads is not None
    }
    most = 1 + 1.2 * (threads / (threads // 2) - 1)
    changed = {limit: ((1 + times) / 2, max(most, times)) for limit, times in slower.items()}
    calls = dict.fromkeys(limits_by(Evidence.CALLS), (1 - SMALL, 1 + SMALL))
    return dict.fromkeys(TWICE, SAME) | calls | changed


def _expected(own: dict[str, float], factors: dict[str, Range]) -> tuple[Range, Range]:
    """The time that follows from the shares, and the one if the runner-up had the share of the leader. Where no other
    limit has a noticeable share, the latter is that of the limit that would be most different."""

    def time_of(shares: dict[str, float]) -> Range:
        low, high = (sum(share * factors[limit][end] for limit, share in shares.items()) for end in (0, 1))
        return low, high

    expected = time_of(own)
    first, second = sorted((limit for limit in own if limit != OPTIMIZER), key=lambda limit: -own[limit])[:2]
    if own[second] >= NOTICEABLE:
        return expected, time_of({**own, first: own[second], second: own[first]})
    return expected, max(factors.values(), key=lambda one: abs(sum(one) - sum(expected)))


def _run(variant: Variant, plain: Callable[[], object], step_s: float) -> Experiment:
    count = max(1, min(100, int(0.05 / step_s)))
    try:
        with variant.around():
            seconds_of(variant.run, 2)
        ratios = []
        for _ in range(TURNS):
            before = seconds_of(plain, count)
            with variant.around():
                changed = seconds_of(variant.run, count)
            ratios.append(changed / before)
    except Exception as error:
        why = f"not possible: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Experiment(variant.name, _text(variant.expected), why, "not run")
    times = percentiles(ratios)
    return judged(variant.name, times.p50, times.p80 - times.p20, variant.expected, variant.rival)


def judged(name: str, measured: float, spread: float, expected: Range, rival: Range, why: str = "") -> Experiment:
    """What an experiment shows. The spread of its repeats widens both ranges, and what is printed decides."""
    (low, high), (rival_low, rival_high) = (
        (round(max(0.0, one[0] - spread), 2), round(one[1] + spread, 2)) for one in (expected, rival)
    )
    measured = round(measured, 2)
    outcome = "agrees" if low <= measured <= high else "disagrees"
    effect = abs(sum(expected) - sum(rival)) / 2
    if outcome == "agrees" and (rival_low <= measured <= rival_high or spread > effect):
        outcome = "inconclusive"
    return Experiment(name, _text((low, high)) + why, f"{measured:.2f} times", outcome)


def _text(expected: Range) -> str:
    low, high = expected
    return f"{low:.2f} to {high:.2f} times the step" if low else f"at most {high:.2f} times the step"


def seconds_of(run: Callable[[], object], count: int) -> float:
    """Seconds of one run, without those in which other work had the core, as of observed steps."""
    clock = ThreadClock()
    synchronize()
    began = clock.now()
    for _ in range(count):
        run()
    synchronize()
    spent = clock.now().since(began)
    clock.close()
    return (spent.wall - spent.waiting) / count / 1e9


def synchronize() -> None:
    if cuda_used():
        torch.cuda.synchronize()


def _without_optimizer(own: dict[str, float], attribution: Attribution, observed: Observed) -> dict[str, float]:
    """The shares with the work of an optimizer as one of its own: it follows the parameters, not the batch."""
    step_ms = divided_ms(observed.waits, observed.operators) - observed.waits.get("input", 0.0)
    parts = (OPTIMIZER, "update", "dense_update")
    rows = [row for row in attribution.operators if (row.part or "").startswith(parts)]
    limits = limits_by(Evidence.COPIES, Evidence.WORK, Evidence.RANKS)
    work = {limit: sum(row.limits.get(limit, 0.0) for row in rows) / max(1e-9, step_ms) for limit in limits}
    rest = {limit: max(0.0, share - work.get(limit, 0.0)) for limit, share in own.items()}
    return {**rest, OPTIMIZER: 1 - sum(rest.values())}


def hot_ids(hot: Percentiles, cold: Percentiles, random_rows: float) -> Experiment:
    """The experiment of a matched pair: with ids whose rows stay in a cache, random rows from memory must vanish."""
    spread = (hot.p80 / cold.p20 - hot.p20 / cold.p80) / 2
    why = f": random rows from memory ({random_rows:.0%}) vanish"
    expected = (0.0, 1 - 0.3 * random_rows)
    return judged(HOT_IDS, hot.p50 / cold.p50, spread, expected, SAME, why)


def _doubled(batch: Any) -> Any | None:
    """The batch joined with itself along its first dimension; None where that may not be a batch: its tensors differ in
    length, one could be offsets, there are only ids, whose offsets the step may hold, or there is something else that
    could describe the others."""
    leaves = tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    known = all(isinstance(leaf, (Tensor, str, float, bool, type(None))) for leaf in leaves)
    if not known or any(not tensor.dim() for tensor in tensors) or len({len(tensor) for tensor in tensors}) != 1:
        return None
    if any(_could_be_offsets(tensor) for tensor in tensors):
        return None
    if all(tensor.dim() == 1 and not tensor.is_floating_point() for tensor in tensors):
        return None
    return tree_map_only(Tensor, lambda tensor: torch.cat((tensor, tensor)), batch)


def _could_be_offsets(tensor: Tensor) -> bool:
    """Whether these are ascending positions from 0 on, in another tensor of as many elements."""
    if tensor.dim() > 1 or tensor.is_floating_point() or tensor.dtype == torch.bool or not len(tensor):
        return False
    return int(tensor[0]) == 0 and int(tensor[-1]) <= len(tensor) and bool((tensor.diff() >= 0).all())


class _HotIds(DispatchMode):
    """Replaces the ids of every lookup, and of its backward pass, by those of a few rows, which stay in a cache.

    Autograd keeps the ids of the forward pass, so both passes see the same ids and replace them in the same way. New
    ids follow from sizes alone: no call waits for the device, and they are rows of the table of that very call.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        backward = torch._C._current_graph_task_id() != -1
        access = replaceable(name, backward=backward)
        if access is not None and len(args) > access.ids:
            new = self._replaced(access, args[access.ids], args, named(func, args, kwargs))
            args = (*args[: access.ids], new, *args[access.ids + 1 :])
        elif name == _SPARSE and backward and args[0] == 1 and not kwargs.get("is_coalesced"):
            # A sparse gradient of a table: sparse dimensions, dense ones, size, ids, rows.
            args = (*args[:3], self._hot(args[3], args[2][0]), *args[4:])
        return func(*args, **kwargs)

    def _replaced(self, access: RowAccess, ids: Any, args: Any, arguments: dict[str, Any]) -> Any:
        if access.table == RESULT:
            return self._hot(ids, arguments["num_weights"])
        table, dim = args[access.table], arguments.get("dim", 0)
        # Integers and booleans may be ids, offsets or masks for what follows.
        if not isinstance(table, Tensor) or not table.is_floating_point() or not table.dim():
            return ids
        if access.unit == "listed":
            return [self._hot(one, size) for one, size in zip(ids, table.shape)] if len(ids) <= table.dim() else ids
        elements = access.unit == "element" and "dim" not in arguments
        return self._hot(ids, table.numel() if elements else table.shape[dim])

    def _hot(self, ids: Any, rows: int) -> Any:
        """As many ids of a few of the `rows`; what is not a tensor of ids stays."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or not ids.numel() or not rows:
            return ids
        key = (tuple(ids.shape), ids.dtype, ids.device, min(HOT_ROWS, rows))
        if key not in self._ids:
            flat = torch.arange(ids.numel(), device=ids.device) % min(HOT_ROWS, rows)
            self._ids[key] = flat.to(ids.dtype).reshape(ids.shape)
        return self._ids[key]


def captured_step(step: Callable[[], object]) -> Callable[[], object] | None:
    """The step as a CUDA graph; None where it cannot be captured."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except Exception:
        torch.cuda.synchronize()
        # A capture that fails leaves the generator waiting for its end.
        generator.graphsafe_set_state(before)
        return None
    return graph.replay
