"""Embedding bags and their sparse update: `reference` (plain torch, any device), `native` (C, on a CPU) and `triton`
(one GPU, all tables in one kernel launch).

implementation, why = choose("auto", table)
pooled = implementation.bag_sum(table, ids, offsets, starts)
grouped = implementation.Grouped(ids, offsets, table.shape[0], starts)
implementation.update(table, state, grouped, gradient, rule="rowwise-adagrad", rate=..., eps=..., decay=..., scale=...)

`table_rules` declares the rules and the shape of their state

On a CPU, `choose_bodies` takes the faster of C and torch for a table that no cache holds, for sums and for updates.

`starts` says where the table of each feature begins when several are stacked in one; without it ids are rows.

`grouped.moved(slots, count)` is for a cache of rows: ids are places among the distinct rows of a batch, in ascending
order, and `slots` says where each lies in a tensor of `count` rows. Groups keep the order of the rows, which decides in
which order triton adds gradients and all of them add up a norm: so a cache gives the same bits as the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import choice
from ..choice import BAG_UPDATE, Name

__all__ = ["BAG_UPDATE", "Bodies", "Name", "choose", "choose_bodies"]

Compare = Callable[[Tensor], dict[str, Any] | str | None]
"""Times of torch over those of C for lookups and updates of a table: p20, p50 and p80; or why they cannot be judged."""


@dataclass(frozen=True)
class Bodies:
    """The implementations of a table's bags, and the reason for them."""

    sum: ModuleType
    update: ModuleType
    """Also groups and hashes ids."""
    why: str


def choose(name: Name, table: Tensor) -> tuple[ModuleType, str]:
    """The implementation and the reason for it; an explicit request that cannot be met is an error."""
    problem = None if table.dtype == torch.float32 else f"the table is {table.dtype}"
    return choice.choose(__name__, name, table.device, fix="--model.bag reference", problem=problem)


def choose_bodies(name: Name, table: Tensor, compare: Compare | None = None) -> Bodies:
    """`choose`, but torch in place of C where `compare` says that on this machine it is faster.

    Sums have the same bits in both, updates do not: a run that is resumed keeps the body of its updates.
    """
    body, why = choose(name, table)
    if name != "auto" or not why.startswith("native: ") or table.device.type != "cpu":
        return Bodies(body, body, why)
    from . import native, reference

    figures, began = compare(table) if compare else None, choice.began_with(BAG_UPDATE)
    reasons = [why.partition(": ")[2], figures]
    sums = update = native
    from_before = False
    if isinstance(figures, dict):
        # C, unless torch was faster in nearly all readings.
        sums, update = (reference if figures[name]["p80"] < 1 else native for name in ("lookups", "updates"))
    if began is not None:
        began_update = reference if began == "reference" else native
        from_before, update = began_update is not update, began_update
    choice.note_used(BAG_UPDATE, "reference" if update is reference else None)
    if isinstance(figures, dict):
        judged = {"lookups": sums, **({} if from_before else {"updates": update})}
        speeds = (_speed(name, body is native, figures[name]) for name, body in judged.items())
        reasons = [f"on this machine {', '.join(speeds)}"]
    if from_before:
        reasons.append(f"updates stay {'C' if update is native else 'torch'}'s, as in the run that is resumed")
    names = [one.__name__.rpartition(".")[2] for one in (sums, update)]
    used = names[0] if sums is update else f"{names[0]} lookups, {names[1]} updates"
    return Bodies(sums, update, f"{used}: {'; '.join(str(reason) for reason in reasons if reason)}")


def _speed(what: str, native: bool, ratio: dict[str, Any]) -> str:
    if native:
        return f"{what} are {ratio['p50']:.1f} times as fast as torch's"
    return f"{what} are torch's, which are {1 / ratio['p50']:.1f} times as fast"
