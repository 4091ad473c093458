"""Which regime a workload is in, from its own readings against this machine's own ceilings. Torch-free.

The rule is `RULES`: a regime is named when all its conditions hold. Several, or none, is "unclear", and says why.
docs/regimes.md shows the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .spans import of_tables

UNCLEAR = "unclear"


@dataclass(frozen=True)
class Condition:
    """A reading that must be at least, or below, a threshold."""

    reading: str
    at_least: bool
    threshold: float

    def holds(self, value: float | None) -> bool:
        return value is not None and (value >= self.threshold if self.at_least else value < self.threshold)

    @property
    def text(self) -> str:
        return f"{'at least' if self.at_least else 'below'} {self.threshold:g}"


def least(reading: str, threshold: float) -> Condition:
    return Condition(reading, True, threshold)


def below(reading: str, threshold: float) -> Condition:
    return Condition(reading, False, threshold)


READINGS = {
    "input": "share of the step that waits for data",
    "communication": "share of the step that waits for other ranks",
    "compute": "counted FLOPs at the rate of this machine's matrix product, as a share of the step",
    "stream": "counted bytes at this machine's copy bandwidth, as a share of the step",
    "table": "share of the step spent on the tables: hashing, lookup, their backward pass and sparse update",
    "beyond": "bytes of table rows touched in the window, in last-level caches of this machine",
    "of memory": "time a looked-up row takes, in times a random row of that size takes from memory here",
    "empty ops": "time an operator takes, in times an operator that does nothing takes here",
    "launch": "share of a traced step in which the device waits for the host to launch work, or for a gap to pass",
    "small": "share of the kernels' time that is in kernels under 10 us, too short to fill a device",
}

RULES: dict[str, tuple[Condition, ...]] = {
    "input-bound": (least("input", 0.5),),
    "communication-bound": (least("communication", 0.5),),
    "compute-bound": (below("input", 0.5), least("compute", 0.5)),
    "bandwidth-bound": (below("input", 0.5), below("compute", 0.5), least("stream", 0.5)),
    "latency-bound": (
        below("input", 0.5), below("compute", 0.5), below("stream", 0.5), least("table", 0.5),
        least("beyond", 2.0), least("of memory", 0.3), below("launch", 0.3),
    ),
    "cache-bound": (
        below("input", 0.5), below("compute", 0.5), below("stream", 0.5), least("table", 0.5), below("beyond", 2.0),
        below("launch", 0.3),
    ),
    "dispatch-bound": (
        below("input", 0.5), below("compute", 0.5), below("stream", 0.5), below("table", 0.5), below("empty ops", 10.0),
        below("launch", 0.3), below("small", 0.4),
    ),
    "launch-bound": (below("input", 0.5), below("compute", 0.5), below("stream", 0.5), least("launch", 0.3)),
    "small-kernel-bound": (
        below("input", 0.5), below("compute", 0.5), below("stream", 0.5), below("table", 0.5), below("launch", 0.3),
        least("small", 0.4),
    ),
}  # fmt: skip

SENTENCES = {
    "input-bound": "The step waits for its data: making or fetching batches takes {input:.0%} of it.",
    "communication-bound": "The step waits for other ranks for {communication:.0%} of its time.",
    "compute-bound": "Arithmetic sets the pace: the counted FLOPs alone would take {compute:.0%} of the step.",
    "bandwidth-bound": "Memory bandwidth sets the pace: the counted bytes alone would take {stream:.0%} of the step.",
    "latency-bound": "Waiting for single rows from memory sets the pace: the tables take {table:.0%} of the step, the "
    "rows it touches would fill {beyond:.0f} last-level caches, and streaming the same bytes would take {stream:.0%} "
    "of it.",
    "cache-bound": "The tables take {table:.0%} of the step, and the rows it touches fit this machine's last-level "
    "cache: work on cached rows sets the pace, not memory beyond the caches.",
    "dispatch-bound": "Calling operators sets the pace: one takes {empty ops:.1f} times what one that does nothing "
    "takes; arithmetic would need {compute:.0%} and memory {stream:.0%} of the step.",
    "launch-bound": "Launching work sets the pace: for {launch:.0%} of the step the device waits for the host's next "
    "kernel; arithmetic would need {compute:.0%} and memory {stream:.0%} of the step.",
    "small-kernel-bound": "Small kernels set the pace: {small:.0%} of the kernels' time is in kernels under 10 µs, too "
    "short to fill the device; arithmetic would need {compute:.0%} and memory {stream:.0%} of the step.",
}

IMPOSSIBLE = 1.5
"""Counted FLOPs that would take so many steps; ceilings vary, but not as much. Bytes may come from a cache."""


def explain(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    """The regime's name, a sentence, and every reading with what it says."""
    readings = read(profile, peaks)
    named = [name for name, conditions in RULES.items() if all(c.holds(readings[c.reading]) for c in conditions)]
    # A share that cannot be says that the ceiling or the count is wrong, and nothing about the workload.
    impossible = (readings["compute"] or 0.0) > IMPOSSIBLE
    name = named[0] if len(named) == 1 and not impossible else UNCLEAR
    known = {key: 0.0 if value is None else value for key, value in readings.items()}
    if impossible:
        sentence = (
            f"Unclear: the counted FLOPs alone would take {readings['compute']:.0%} of the step, which cannot be: the "
            "ceiling was measured on a busy machine, or is of other products. recperf peaks measures it again."
        )
    else:
        sentence = SENTENCES[name].format(**known) if name in SENTENCES else _why_unclear(named, readings)
    sentence = " ".join(filter(None, (sentence, ranks_sentence(profile))))
    return {"name": name, "sentence": sentence, "evidence": _evidence(name, readings)}


def ranks_sentence(profile: dict[str, Any]) -> str:
    """Which rank the others wait for, and what waiting costs; empty of one rank."""
    found = profile.get("communication") or {}
    if "each" not in found:
        return ""
    own = {row["rank"]: row["own_ms"] for row in found["each"]}
    slowest = own.pop(found["slowest"])
    others = sum(own.values()) / len(own)
    little = ", by less than 5%" if slowest < 1.05 * others else ""
    split = ""
    if found["late_ms"] is not None:
        split = f": {found['late_ms']:.3g} ms for a rank that comes late, {found['moving_ms']:.3g} ms for bytes to move"
    return (
        f"Rank {found['slowest']} of {found['ranks']} is the slowest{little}: its own work takes {slowest:.3g} ms of a "
        f"step, that of the others {others:.3g} ms. Exposed communication: ranks wait in collectives for "
        f"{found['exposed_share']:.0%} of a step, {found['exposed_ms']:.3g} ms{split}."
    )


def read(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, float | None]:
    """Every reading the rules ask for; none where a ceiling or a component was not measured."""
    parts = {part["name"]: part for part in profile["components"]}
    step_s = profile["step_ms"]["p50"] / 1e3
    readings: dict[str, float | None] = dict.fromkeys(READINGS)
    readings["input"] = parts["data"]["share"] if "data" in parts else 0.0
    readings["communication"] = sum(p["share"] for p in parts.values() if p["phase"] == "communication")
    readings["table"] = sum(part["share"] for name, part in parts.items() if of_tables(name))
    readings["launch"] = launch_share(profile)
    readings["small"] = small_share(profile)
    found = ceilings(profile, peaks)
    if found is None:
        return readings
    flops = sum(part["flops"] or 0 for part in parts.values())
    moved = sum(part["bytes"] or 0 for part in parts.values())
    readings["compute"] = flops / found.flops_per_s / step_s
    readings["stream"] = moved / found.bytes_per_s / step_s
    if profile.get("operators"):
        readings["empty ops"] = step_s * 1e9 / profile["operators"] / found.operator_ns
    if "embedding" in parts and profile["ids"]["lookups"]:
        row_ns = parts["embedding"]["ms"]["p50"] * 1e6 / profile["ids"]["lookups"]
        ceiling = row_time(found.rows, profile["ids"]["row_bytes"])
        readings["of memory"] = row_ns / ceiling if ceiling else None
    if found.last_level:
        readings["beyond"] = profile["ids"]["touched_bytes"] / found.last_level
    return readings


@dataclass(frozen=True)
class Ceilings:
    """What the device of a profile can do at best."""

    flops_per_s: float
    bytes_per_s: float
    operator_ns: float
    """To call, or to queue, an operator that does nothing."""
    rows: list[dict[str, Any]]
    """Random rows from memory, by size."""
    last_level: int
    """Bytes of the largest cache; 0 where unknown."""


def ceilings(profile: dict[str, Any], peaks: dict[str, Any] | None) -> Ceilings | None:
    """Of the processor or of the GPU the profile is of; products in the precision it used."""
    part = device_part(profile, peaks)
    if peaks is None or part is None:
        return None
    product, copy, rows = product_of(profile, part), part["copy"]["p50"], part["gather"]["dram"]["rows"]
    if profile.get("device", "cpu") != "cpu":
        return Ceilings(product, copy, part["launch"]["queue"]["p50"], rows, part["l2_bytes"])
    last_level = max(peaks["machine"]["caches"].values(), default=0) // sharing(profile)
    return Ceilings(product, copy, part["dispatch"]["op"]["p50"], rows, last_level)


def sharing(profile: dict[str, Any]) -> int:
    """Ranks that have a part each of the profile's processor."""
    return int((profile.get("communication") or {}).get("sharing", 1))


def device_part(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any] | None:
    """The measured ceilings of the processor, or of the GPU, that a profile is of; of a processor that ranks share, one
    rank's part."""
    if peaks is None:
        return None
    device, ranks = profile.get("device", "cpu"), sharing(profile)
    if device != "cpu":
        return (peaks.get("gpu") or {}).get(device)
    if ranks == 1:
        return peaks
    found = {**peaks, "gemm": {name: _times(figure, 1 / ranks) for name, figure in peaks["gemm"].items()}}
    found |= {name: _times(peaks[name], 1 / ranks) for name in ("copy", "read") if name in peaks}
    found["gather"] = {
        place: {**table, "rows": [_shared_row(row, ranks) for row in table["rows"]]}
        for place, table in peaks["gather"].items()
    }
    return found


def product_of(profile: dict[str, Any], part: dict[str, Any]) -> float:
    """FLOP/s of products in the precision the profile used."""
    gemm = part["gemm"]
    return float(gemm.get(profile.get("precision") or "float32", gemm["float32"])["p50"])


def _times(figure: dict[str, Any], factor: float) -> dict[str, Any]:
    return {**figure, **{name: figure[name] * factor for name in ("p20", "p50", "p80") if name in figure}}


def _shared_row(row: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Random rows of some size, which take longer where others read theirs too."""
    slower = {
        name: _times(row[name], factor) for name, factor in (("ns", ranks), ("bytes_per_s", 1 / ranks)) if name in row
    }
    return {**row, **slower}


def small_share(profile: dict[str, Any]) -> float:
    """Of the kernels' time in small ones; 0 where no trace tells."""
    kernels = profile.get("kernels") or {}
    whole = sum(row["total_ms"] for row in kernels.get("rows", ()))
    return float(kernels["small"]["total_ms"] / whole) if whole else 0.0


def launch_share(profile: dict[str, Any]) -> float:
    """What the device waits for the host other than for its input; 0 where no trace tells."""
    idle = profile.get("idle") or {}
    if "causes" not in idle or not idle["wall_ms"]:
        return 0.0
    return float(sum(ms for cause, ms in idle["causes"].items() if cause != "input wait") / idle["wall_ms"])


def part_ms(profile: dict[str, Any], name: str) -> dict[str, float]:
    """The p20, p50 and p80 of a part of a profiled step, or of the whole "step"."""
    if name == "step":
        return dict(profile["step_ms"])
    return dict(next(part["ms"] for part in profile["components"] if part["name"] == name))


def row_time(rows: list[dict[str, Any]], row_bytes: int) -> float | None:
    """ns a row of this size takes, between the measured sizes in a straight line, beyond them in proportion."""
    points = sorted((row["row_bytes"], row["ns"]["p50"]) for row in rows)
    if not points:
        return None
    if row_bytes <= points[0][0]:
        return float(points[0][1])
    for (size, time), (next_size, next_time) in zip(points, points[1:]):
        if row_bytes <= next_size:
            return float(time + (next_time - time) * (row_bytes - size) / (next_size - size))
    return float(points[-1][1] * row_bytes / points[-1][0])


def _evidence(name: str, readings: dict[str, float | None]) -> list[dict[str, Any]]:
    """The readings of the named regime with their thresholds; of an unclear one, all of them."""
    first = {c.reading: c for rule in RULES.values() for c in reversed(rule)}
    conditions = RULES.get(name) or tuple(first[reading] for reading in READINGS)
    rows = []
    for condition in conditions:
        value = readings[condition.reading]
        rows.append(
            {
                "what": READINGS[condition.reading],
                "value": value,
                "unit": "not measured" if value is None else "",
                "threshold": condition.text,
                "says": name if name in RULES else ("holds" if condition.holds(value) else "does not hold"),
            }
        )
    return rows


def _why_unclear(named: list[str], readings: dict[str, float | None]) -> str:
    """In one sentence; the readings themselves stand in the evidence."""
    missing = [READINGS[name] for name, value in readings.items() if value is None]
    if missing:
        return "Unclear: not measured: " + "; ".join(missing) + ". recperf peaks measures this machine's ceilings."
    if named:
        return "Unclear: the evidence fits " + " and ".join(named) + "."
    return "Unclear: no single limit stands out; no regime's conditions all hold."
