"""What the device of a profile can do at best: the measured ceilings of its processor or its GPU. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ceilings:
    flops_per_s: float
    """Matrix products in the precision of the profile."""
    bytes_per_s: float
    """Copy bandwidth, reads plus writes."""
    operator_ns: float
    """Time to call (on a GPU: to queue) an operator that does nothing."""
    rows: list[dict[str, Any]]
    """Time of random rows from memory, by row size."""
    last_level: int
    """Bytes of the largest cache; 0 where unknown."""


def ceilings(profile: dict[str, Any], peaks: dict[str, Any] | None) -> Ceilings | None:
    """The ceilings of the profile's device; None where they were not measured."""
    device = device_peaks(profile, peaks)
    if peaks is None or device is None:
        return None
    product, copy, rows = product_flops(profile, device), device["copy"]["p50"], device["gather"]["dram"]["rows"]
    if profile.get("device", "cpu") != "cpu":
        return Ceilings(product, copy, device["launch"]["queue"]["p50"], rows, device["l2_bytes"])
    last_level = max(peaks["machine"]["caches"].values(), default=0) // ranks_sharing(profile)
    return Ceilings(product, copy, device["dispatch"]["op"]["p50"], rows, last_level)


def ranks_sharing(profile: dict[str, Any]) -> int:
    """Number of ranks that share the profile's processor."""
    return int((profile.get("communication") or {}).get("sharing", 1))


def device_peaks(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any] | None:
    """The measured peaks of the profile's device; where ranks share a processor, the share of one rank."""
    if peaks is None:
        return None
    device, ranks = profile.get("device", "cpu"), ranks_sharing(profile)
    if device != "cpu":
        return (peaks.get("gpu") or {}).get(device)
    if ranks == 1:
        return peaks
    shared = {**peaks, "gemm": {name: _scaled(figure, 1 / ranks) for name, figure in peaks["gemm"].items()}}
    shared |= {name: _scaled(peaks[name], 1 / ranks) for name in ("copy", "read") if name in peaks}
    shared["gather"] = {
        place: {**table, "rows": [_shared_row(row, ranks) for row in table["rows"]]}
        for place, table in peaks["gather"].items()
    }
    return shared


def product_flops(profile: dict[str, Any], device: dict[str, Any]) -> float:
    """FLOP/s of matrix products in the precision of the profile."""
    gemm = device["gemm"]
    return float(gemm.get(profile.get("precision") or "float32", gemm["float32"])["p50"])


def _scaled(figure: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**figure, **{name: figure[name] * factor for name in ("p20", "p50", "p80") if name in figure}}


def _shared_row(row: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Random rows take longer where other ranks read theirs at the same time."""
    factors = {"ns": ranks, "bytes_per_s": 1 / ranks}
    return {**row, **{name: _scaled(row[name], factor) for name, factor in factors.items() if name in row}}


def row_time(rows: list[dict[str, Any]], row_bytes: int) -> float | None:
    """ns of a row of this size: interpolated between the measured sizes, proportional beyond the largest."""
    points = sorted((row["row_bytes"], row["ns"]["p50"]) for row in rows)
    if not points:
        return None
    if row_bytes <= points[0][0]:
        return float(points[0][1])
    for (size, time), (next_size, next_time) in zip(points, points[1:]):
        if row_bytes <= next_size:
            return float(time + (next_time - time) * (row_bytes - size) / (next_size - size))
    return float(points[-1][1] * row_bytes / points[-1][0])
