"""What makes a plan fit, and what makes its step shorter.

Every change is an option of `recperf run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..distributed.config import Kind, KindOrAuto
from ..distributed.placement import rows_for_all
from .devices import Device
from .memory import memory_of
from .predict import Prediction
from .sharding import Parallelism, place

REMEDIES: tuple[Kind, ...] = ("row", "table", "column")
"""In the order they are tried. Columns come last: each shard has its own row-wise Adagrad state, so that the training
differs."""
MOST_OVERRIDES = 4
"""Tables whose sharding a remedy changes at most."""
NOTICEABLE = 0.02
"""Changes that shorten a step by a smaller share are not mentioned."""


def largest_batch(fits: Callable[[int], bool], too_large: int) -> int:
    """The largest number of samples of a rank that fits, where `too_large` do not, to about 2 %; 0: none. Every number
    is predicted anew: a smaller batch has more distinct ids for each of its samples."""
    if too_large == 1 or not fits(1):
        return 0
    low, high = 1, too_large
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def remedies(plan: Prediction, device: Device) -> Iterator[tuple[str, Parallelism]]:
    """Changes that make the plan fit, the smallest first: options of `recperf run`."""
    for options, changed in _smaller(plan, plan.parallelism):
        placed = place(plan.work.tables, plan.ranks, plan.rank_batch, changed)
        if memory_of(plan.work, placed, plan.skew, plan.rank_batch, device, changed).fits:
            yield options, changed


def improvements(
    plan: Prediction, predicted: Callable[[Parallelism], Prediction], most: int = 3
) -> list[tuple[str, Prediction]]:
    """Changes that shorten the step and still fit, the best first: options of `recperf run`, and the step with them. On
    one rank there are none."""
    changes = [] if plan.ranks == 1 else _faster(plan, plan.parallelism)
    tried = [(options, predicted(changed)) for options, changed in changes]
    better = [one for one in tried if one[1].memory.fits and one[1].step.value <= (1 - NOTICEABLE) * plan.step.value]
    return sorted(better, key=lambda one: one[1].step.value)[:most]


def _smaller(plan: Prediction, parallelism: Parallelism) -> Iterator[tuple[str, Parallelism]]:
    """Changes that may need less memory."""
    if _copied(plan):
        return
    if parallelism.all_to_all == "fp32":
        yield "--distributed.all-to-all fp16", replace(parallelism, all_to_all="fp16")
    yield from _shardings(parallelism, ("auto", "row"))
    tables, rows = plan.memory.largest_tables, {table.name: table.rows for table in plan.work.tables}
    for count in range(1, min(len(tables), MOST_OVERRIDES) + 1):
        for kind in REMEDIES:
            if kind != "row" or all(rows_for_all(rows[name], plan.ranks) for name in tables[:count]):
                named = {**parallelism.shardings, **dict.fromkeys(tables[:count], kind)}
                yield _sharded(parallelism, parallelism.kind, named)
    if parallelism.all_to_all == "fp32":
        for options, changed in _shardings(parallelism, ("auto", "row")):
            yield f"{options} --distributed.all-to-all fp16", replace(changed, all_to_all="fp16")


def _copied(plan: Prediction) -> bool:
    """Whether tables can only be copied to every rank, so that no rows are sent."""
    return any(table.copied for table in plan.work.tables)


def _faster(plan: Prediction, parallelism: Parallelism) -> Iterator[tuple[str, Parallelism]]:
    """Changes that may need less time."""
    if parallelism.all_to_all == "fp32" and not _copied(plan):
        yield "--distributed.all-to-all fp16", replace(parallelism, all_to_all="fp16")
    if not parallelism.pipeline:
        yield "--distributed.pipeline", replace(parallelism, pipeline=True)
    if parallelism.overlap == "off":
        yield "--distributed.overlap on", replace(parallelism, overlap="on")
    if not parallelism.balance and plan.work.sample_work is not None:
        yield "--distributed.balance", replace(parallelism, balance=True)
    if not _copied(plan):
        yield from _shardings(parallelism, ("auto", "row", "table"))


def _sharded(parallelism: Parallelism, kind: str, named: Mapping[str, str]) -> tuple[str, Parallelism]:
    """The tables sharded in another way, and the option that says so."""
    sharding = ",".join([kind, *(f"{name}={of_name}" for name, of_name in named.items())])
    return f"--distributed.sharding {sharding}", replace(parallelism, sharding=sharding)


def _shardings(parallelism: Parallelism, kinds: tuple[KindOrAuto, ...]) -> Iterator[tuple[str, Parallelism]]:
    """All tables sharded in another way."""
    for kind in kinds:
        if parallelism.shardings or kind != parallelism.kind:
            yield _sharded(parallelism, kind, {})
