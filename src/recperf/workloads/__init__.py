"""The workloads by name. Importing this room imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from ..distributed.ranks import current
from ..errors import UsageError, closest
from ..execution.workload import Workload, load
from ..tasks import NEXT_ITEM

if TYPE_CHECKING:
    from ..data.datasets import Dataset
    from ..distributed.shares import Division

WORKLOADS = {
    "micro-dlrm": "recperf.workloads.micro_dlrm.config:MICRO_DLRM",
    "micro-dlrm-dram": "recperf.workloads.micro_dlrm_dram.config:MICRO_DLRM_DRAM",
    "dlrm": "recperf.workloads.dlrm.config:DLRM",
    "dlrm-v4": "recperf.workloads.dlrm_v4.config:DLRM_V4",
    "next-item": "recperf.workloads.next_item.config:NEXT_ITEMS",
    "hstu": "recperf.workloads.next_item.hstu:HSTU",
}
"""One line per workload: where its `Workload` object is defined."""


@cache
def _installed() -> dict[str, str]:
    """Workloads of other installed packages, registered as entry points of the group recperf.workloads."""
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group="recperf.workloads")}


def names() -> tuple[str, ...]:
    return (*WORKLOADS, *(name for name in _installed() if name not in WORKLOADS))


def find(name: str) -> Workload:
    place = WORKLOADS.get(name) or _installed().get(name)
    if place is not None:
        workload: Workload = load(place)
        return workload
    guess = closest(name, names())
    raise UsageError(
        f"unknown workload {name!r}" + (f"; did you mean {guess!r}?" if guess else ""),
        where={"known": ", ".join(names())},
        fix=f"recperf run {guess}" if guess else "recperf show",
    )


def able(kind: str) -> list[str]:
    """Workloads that can train on datasets of a kind, those made for it first: they list it before other kinds."""
    kinds = {name: list(find(name).datasets) for name in names()}
    return sorted((name for name in kinds if kind in kinds[name]), key=lambda name: kinds[name].index(kind))


def proposed(dataset: Dataset) -> str | None:
    """The workload to try first on a dataset: for events that a user imported, next items."""
    possible = able(dataset.kind)
    own = [name for name in possible if find(name).task is NEXT_ITEM] if dataset.manifest is not None else []
    return next(iter([*own, *possible]), None)


def division(prepared: Any, planned: Callable[[Any], Any] | None = None) -> Division:
    """How the trials of this process share their work with other ranks, where there are some; `planned` counts it."""
    from ..distributed.shares import Division

    if current().size == 1:
        return Division()
    divided: Division = load("recperf.workloads.ranks:RankDivision")(prepared, planned and planned(prepared.config))
    return divided
