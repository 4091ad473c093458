"""Sections of a profile that follow from its readings: roofline and embedding tables. Only counting ids needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import DataError
from .attribution import BELIEVED, DOES_NOT_APPLY
from .ceilings import ceilings_of_profile, missed_share
from .peaks.records import Peaks
from .profile_records import (
    Cached,
    Component,
    Embeddings,
    Missing,
    RooflinePoint,
    Skew,
    StepBudget,
    StepFigures,
    TableLookups,
)
from .records import Percentiles

if TYPE_CHECKING:
    from torch import Tensor


def roofline(profile: StepBudget, peaks: Peaks | None) -> list[RooflinePoint] | Missing:
    """Each part with counted work, relative to the measured ceilings of the device."""
    ceilings = ceilings_of_profile(profile, peaks)
    if ceilings is None:
        return Missing("the ceilings of this device were not measured; run recperf peaks")
    product = ceilings.product(profile.precision)
    rows = [_point(part, product, ceilings.stream) for part in profile.components if part.flops or part.bytes]
    return [row for row in rows if row is not None] or Missing("no part with counted work was timed")


def _point(part: Component, product: float, stream: float) -> RooflinePoint | None:
    seconds = part.ms.p50 / 1e3
    if seconds <= 0:
        return None
    flops, moved = part.flops or 0, part.bytes or 0
    compute, memory = flops / product / seconds, moved / stream / seconds
    roof: float | None = max(compute, memory)
    bound = "neither" if max(compute, memory) < 0.5 else "compute" if compute >= memory else "memory"
    if max(compute, memory) > BELIEVED:
        roof, bound = None, DOES_NOT_APPLY
    return RooflinePoint(
        name=part.name,
        flops=flops,
        bytes=moved,
        intensity=flops / moved if moved else None,
        flops_per_s=flops / seconds,
        bytes_per_s=moved / seconds,
        ceiling_flops_per_s=product,
        ceiling_bytes_per_s=stream,
        share_of_roof=roof,
        bound=bound,
    )


def embeddings(
    profile: StepFigures, peaks: Peaks | None, tables: list[tuple[str, int]], batches: list[Tensor]
) -> Embeddings:
    """What the lookups of some batches touched, by table; `batches` hold the row numbers over all tables."""
    import torch

    row_bytes, count = profile.ids.row_bytes, len(batches)
    touched, counts = torch.unique(torch.cat(batches).cpu(), return_counts=True)
    distinct = [torch.unique(batch).cpu() for batch in batches]
    by_table, start = [], 0
    for name, rows in tables:
        inside = (touched >= start) & (touched < start + rows)
        lookups = float(counts[inside].sum()) / count
        unique = sum(int(((one >= start) & (one < start + rows)).sum()) for one in distinct) / count
        descending = counts[inside].sort(descending=True).values
        head = int(descending[: max(1, len(descending) // 100)].sum())
        by_table.append(
            TableLookups(
                name=name,
                rows=rows,
                row_bytes=row_bytes,
                lookups=lookups,
                unique=unique,
                unique_ratio=unique / lookups if lookups else 0.0,
                touched_bytes=int(inside.sum()) * row_bytes,
                busiest_share=head / max(1, int(descending.sum())),
            )
        )
        start += rows
    lookups, unique = sum(table.lookups for table in by_table), sum(table.unique for table in by_table)
    return Embeddings(
        tables=by_table,
        lookups=lookups,
        unique=unique,
        unique_ratio=unique / lookups if lookups else 0.0,
        gb_per_s=_rates(profile),
        cached=_cached(profile, peaks),
        skew=Skew(
            largest_table_share=max(table.lookups for table in by_table) / lookups if lookups else 0.0,
            gini=_gini([table.lookups for table in by_table]),
        ),
    )


def _gini(values: list[float]) -> float:
    """The Gini coefficient: 0 for equal parts, towards 1 where one of many has everything."""
    count, whole = len(values), sum(values)
    if not whole:
        return 0.0
    return 2 * sum(rank * value for rank, value in enumerate(sorted(values), 1)) / (count * whole) - 1 - 1 / count


def _rates(profile: StepBudget) -> dict[str, float | None]:
    """GB/s: counted bytes over the time of the parts that move them."""
    parts = {part.name: part for part in profile.components}

    def rate(*names: str) -> float | None:
        present = [parts[name] for name in names if name in parts]
        seconds = sum(part.ms.p50 for part in present) / 1e3
        return sum(part.bytes or 0 for part in present) / seconds / 1e9 if seconds else None

    return {"forward": rate("embedding"), "backward_and_update": rate("embedding_backward", "sparse_update")}


def _cached(profile: StepFigures, peaks: Peaks | None) -> Cached:
    if ceilings_of_profile(profile, peaks) is None:
        return Cached(None, "the caches of this device were not measured; run recperf peaks")
    missed = missed_share(profile.observed)
    if missed is None:
        return Cached(None, "no random rows were counted")
    return Cached(missed < 0.5, f"{missed:.0%} of the random rows of a step come from memory")


def part_ms(profile: StepBudget, name: str) -> Percentiles:
    """p20, p50 and p80 of a part of the step, or of the whole "step"."""
    if name == "step":
        return profile.step_ms
    parts = {part.name: part.ms for part in profile.components}
    if name not in parts:
        raise DataError(f"the profile has no part {name!r}", where={"parts": ", ".join(parts)})
    return parts[name]


def swept_ms(profile: StepBudget, name: str) -> Percentiles:
    """What a sweep shows of a profile: its "step" without timers, its parts with them."""
    return profile.overhead.plain if name == "step" else part_ms(profile, name)
