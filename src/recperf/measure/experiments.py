"""Experiments that confirm a verdict: the same step is changed in one way, and its time must follow the shares.

Each variant takes turns with the unchanged step, so that a change of the machine affects both. A step that does not
allow a variant is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .operators import ids_argument
from .step_parts import cuda_used

SECONDS = 10.0
"""All experiments together may take this long unless more is allowed."""
TURNS = 4
TOLERANCE = 0.25
"""An experiment disagrees where it misses its range by more than this share of the step."""
HOT_ROWS = 64
FIXED = ("dispatch", "python", "launch", "sync", "blocked")
"""Limits whose time does not depend on the batch."""


@dataclass(frozen=True)
class Variant:
    name: str
    run: Callable[[], object]
    low: float
    """The range in which its time must be, in times of the unchanged step."""
    high: float
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def confirm(
    step: Callable[..., object],
    batch: Any,
    has_batch: bool,
    attribution: dict[str, Any],
    observed: dict[str, Any],
    seconds: float | None = None,
    *,
    clocked_update: float = 0.0,
) -> list[dict[str, Any]]:
    """Run the experiments that the step allows and return what each should have done and did.

    `clocked_update`: the share of the step in its optimizer, where clocks inside the step tell it.
    """
    plain = (lambda: step(batch)) if has_batch else step
    expected_s = max(1e-6, observed["step_ms"]["p50"] / 1e3)
    input_share = attribution["shares"]["input"]
    own_s = expected_s * (1 - input_share)
    variants = list(_variants(step, plain, batch, has_batch, attribution, observed, clocked_update))
    rows: list[dict[str, Any]] = []
    if has_batch and input_share >= TOLERANCE / 2:
        rows.append(_replay(plain, expected_s, input_share))
    left = SECONDS if seconds is None else seconds
    for variant in variants:
        turns_s = 2 * TURNS * own_s * 2.5
        if turns_s > left:
            rows.append(_row(variant.name, "not run", f"it would take {turns_s:.0f} s", None))
            continue
        began = perf_counter()
        rows.append(_run(variant, plain, own_s))
        left -= perf_counter() - began
    return rows


def _replay(plain: Callable[[], object], step_s: float, share: float) -> dict[str, Any]:
    """Without waiting for input the step must take the rest of its time."""
    count = max(3, min(50, int(0.3 / step_s)))
    times = [_time(plain, 1) for _ in range(count)]
    measured = median(times) / step_s
    agrees = measured <= 1 - share + TOLERANCE
    return _row(
        "one batch from memory again and again",
        f"{1 - share:.2f} times the step: waiting for input ({share:.0%}) vanishes", f"{measured:.2f} times", agrees,
    )  # fmt: skip


def _variants(
    step: Callable[..., object],
    plain: Callable[[], object],
    batch: Any,
    has_batch: bool,
    attribution: dict[str, Any],
    observed: dict[str, Any],
    clocked_update: float,
) -> Iterator[Variant]:
    own = {limit: share for limit, share in attribution["shares"].items() if limit != "input"}
    whole = sum(own.values()) or 1.0
    if whole < 0.5:
        # The replay shows that the step waits for its input; nothing else matters as much.
        return
    own = {limit: share / whole for limit, share in own.items()}
    on_cpu = observed["device"] == "cpu"
    fixed = sum(own[limit] for limit in FIXED) + (_optimizer_share(attribution, observed) or clocked_update)
    doubled = _doubled(batch) if has_batch else None
    if doubled is not None:
        grows = max(0.0, 1 - fixed)
        # What stays cached with half of the batch may not with all of it, and large products use a device better.
        yield Variant("twice the batch", lambda: step(doubled), 1 + 0.5 * grows, 1 + 1.5 * grows + own["cache"])
    halved = _halved(batch) if has_batch else None
    if halved is not None:
        falls = max(0.0, 1 - fixed) / 2
        low = max(0.0, 1 - 1.5 * falls - own["cache"] / 2)
        yield Variant("half the batch", lambda: step(halved), low, 1 - 0.5 * falls)
    threads = torch.get_num_threads()
    if on_cpu and threads > 1:
        from .peaks.cpu import using_threads

        sure, open_ = own["compute"] + own["latency"], own["bandwidth"] + own["cache"] + own["operator"]
        factor = threads / (threads // 2) - 1
        yield Variant(
            "half the threads", plain, 1 + 0.5 * sure * factor, 1 + (sure + open_) * factor * 1.2,
            lambda: using_threads(threads // 2),
        )  # fmt: skip
    random_rows = attribution["random"] / whole
    if random_rows * _of_lookups(attribution) >= 0.2:
        yield Variant("ids of a few hot rows", plain, 0.0, 1 - 0.3 * random_rows, _HotIds)
    # A step that waits for the device cannot be captured.
    if not on_cpu and own["launch"] >= 0.2 and not observed["waits"].get("sync"):
        captured = _captured(plain)
        if captured is not None:
            gone = own["launch"] + own["python"]
            yield Variant("the step as a CUDA graph", captured, 0.0, 1 - 0.5 * gone)


def _run(variant: Variant, plain: Callable[[], object], step_s: float) -> dict[str, Any]:
    count = max(1, min(100, int(0.05 / step_s)))
    expected = (
        f"{variant.low:.2f} to {variant.high:.2f} times the step"
        if variant.low
        else f"at most {variant.high:.2f} times"
    )
    try:
        with variant.around():
            _time(variant.run, 2)
        ratios = []
        for _ in range(TURNS):
            before = _time(plain, count)
            with variant.around():
                changed = _time(variant.run, count)
            ratios.append(changed / before)
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        return _row(variant.name, expected, f"not possible: {type(error).__name__}: {text}", None)
    ratio = median(ratios)
    agrees = variant.low - TOLERANCE <= ratio <= variant.high + TOLERANCE
    return _row(variant.name, expected, f"{ratio:.2f} times", agrees)


def _row(name: str, expected: str, measured: str, agrees: bool | None) -> dict[str, Any]:
    return {"name": name, "expected": expected, "measured": measured, "agrees": agrees}


def _time(run: Callable[[], object], count: int) -> float:
    synchronize()
    began = perf_counter()
    for _ in range(count):
        run()
    synchronize()
    return (perf_counter() - began) / count


def synchronize() -> None:
    if cuda_used():
        torch.cuda.synchronize()


def _optimizer_share(attribution: dict[str, Any], observed: dict[str, Any]) -> float:
    """Share of the step in operators of an optimizer: their work follows the parameters, not the batch."""
    own = sum(
        sum(ms for limit, ms in row["limits"].items() if limit not in FIXED)
        for row in attribution["operators"]
        if (row["part"] or "").startswith(("optimizer", "update", "dense_update"))
    )
    return float(own / max(1e-9, observed["step_ms"]["p50"] - observed["waits"].get("input", 0.0)))


def _of_lookups(attribution: dict[str, Any]) -> float:
    """The part of the random rows from memory that is in operators whose ids can be replaced."""
    operators = attribution["operators"]
    known = sum(row["random_ms"] for row in operators if ids_argument(row["name"]) is not None)
    return float(known / max(1e-12, sum(row["random_ms"] for row in operators)))


def hot_ids(hot_ms: float, cold_ms: float, random_rows: float) -> dict[str, Any]:
    """The experiment of a matched pair: with ids whose rows stay in a cache, random rows from memory must vanish."""
    ratio, high = hot_ms / cold_ms, 1 - 0.3 * random_rows
    expected = f"at most {high:.2f} times the step: random rows from memory ({random_rows:.0%}) vanish"
    return _row("ids of a few hot rows", expected, f"{ratio:.2f} times", ratio <= high + TOLERANCE)


def _halved(batch: Any) -> Any | None:
    """The first half of a batch that knows how to be cut."""
    if not hasattr(batch, "slice") or not hasattr(batch, "__len__") or len(batch) < 2:
        return None
    return batch.slice(0, len(batch) // 2)


def _doubled(batch: Any) -> Any | None:
    """The batch joined with itself along its first dimension; None where it is not made of tensors of one length."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if any(not tensor.dim() for tensor in tensors) or len({tensor.shape[0] for tensor in tensors}) != 1:
        return None
    return tree_map_only(Tensor, lambda tensor: torch.cat((tensor, tensor)), batch)


class _HotIds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the ids of every lookup by those of a few rows, which stay in a cache."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ids: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = ids_argument(func._schema.name)
        if place is not None and len(args) > place and isinstance(args[place], Tensor):
            ids = args[place]
            if not ids.dtype.is_floating_point and ids.dtype != torch.bool:
                args = (*args[:place], self._hot(ids), *args[place + 1 :])
        return func(*args, **(kwargs or {}))

    def _hot(self, ids: Tensor) -> Tensor:
        key = (tuple(ids.shape), ids.dtype, ids.device)
        if key not in self._ids:
            largest = int(ids.max()) + 1 if ids.numel() else 1
            flat = torch.arange(ids.numel(), device=ids.device) % min(HOT_ROWS, largest)
            self._ids[key] = flat.to(ids.dtype).reshape(ids.shape)
        return self._ids[key]


def _captured(step: Callable[[], object]) -> Callable[[], object] | None:
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
