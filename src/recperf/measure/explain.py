"""Which regime a workload is in, from its readings against the measured ceilings of this machine. Torch-free.

regimes.toml says when a regime is named: all its rules hold, and those of no other regime do. Otherwise the verdict is
"unclear", with the reason.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .ceilings import ceilings, row_time
from .spans import kind_of

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


_FILE = tomllib.loads(files(__package__).joinpath("regimes.toml").read_text(encoding="utf-8"))
READINGS: dict[str, str] = _FILE["readings"]
SECOND: dict[str, str] = _FILE["second"]
REGIMES: dict[str, dict[str, Any]] = _FILE["regimes"]
RULES = {
    name: tuple(Condition(reading, sign == ">=", threshold) for reading, sign, threshold in regime["rules"])
    for name, regime in REGIMES.items()
}
IMPOSSIBLE = 1.5
"""A compute share above this cannot be real. Ceilings vary, but less; bytes may come from a cache."""

NOTICEABLE = 0.15
"""Smaller shares are not named as the second limit."""


def explain(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    """The name of the regime, a sentence, and the readings that led to it."""
    readings = read(profile, peaks)
    matching = [name for name, conditions in RULES.items() if all(c.holds(readings[c.reading]) for c in conditions)]
    # An impossible share means that the ceiling or the count is wrong, and says nothing about the workload.
    impossible = (readings["compute"] or 0.0) > IMPOSSIBLE
    name = matching[0] if len(matching) == 1 and not impossible else UNCLEAR
    if impossible:
        sentence = (
            f"Unclear: the counted FLOPs alone would take {readings['compute']:.0%} of the step, which is impossible: "
            "the ceiling was measured on a busy machine, or for other products. Run recperf peaks again."
        )
    elif name == UNCLEAR:
        sentence = _why_unclear(matching, readings)
    else:
        known = {key: value or 0.0 for key, value in readings.items()}
        sentence = REGIMES[name]["sentence"].format(**known, operators=profile.get("operators", 0))
    sentence = " ".join(filter(None, (sentence, ranks_sentence(profile))))
    return {"name": name, "sentence": sentence, "evidence": _evidence(name, readings)}


def verdict(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    """The regime with its confidence, and the second limit."""
    regime, readings = explain(profile, peaks), read(profile, peaks)
    name = regime["name"]
    limit = REGIMES.get(name, {}).get("limit")
    others = {key: readings[key] or 0.0 for key in SECOND if key != limit}
    largest = max(others, key=lambda key: others[key])
    confidence, why = _confidence(profile, name, readings)
    return {
        **regime,
        "confidence": confidence,
        "why_confidence": why,
        "second": SECOND[largest].format(others[largest]) if others[largest] >= NOTICEABLE else None,
    }


def _confidence(profile: dict[str, Any], name: str, readings: dict[str, float | None]) -> tuple[str, str]:
    if name == UNCLEAR:
        return "low", "no single regime matches, or a reading could not be measured"
    doubts = []
    for condition in RULES[name]:
        value = readings[condition.reading]
        if value is not None and abs(value - condition.threshold) < 0.1 * condition.threshold:
            doubts.append(f"a reading is within 10 % of its threshold ({value:.2f}, {condition.text})")
    step, share = profile["step_ms"], profile["overhead"]["share"]
    if step["p80"] > 1.25 * step["p20"]:
        doubts.append(f"steps vary: p80 is {step['p80'] / step['p20']:.2f} times p20")
    if abs(share) > 0.1:
        doubts.append(f"measuring changed the step by {share:.0%}")
    if not doubts:
        return "high", "all readings are far from their thresholds, steps vary little, and so does measuring them"
    return ("medium" if len(doubts) == 1 else "low"), "; ".join(doubts)


def ranks_sentence(profile: dict[str, Any]) -> str:
    """The slowest rank and what waiting costs; empty for a single rank."""
    communication = profile.get("communication") or {}
    if "each" not in communication:
        return ""
    own = {row["rank"]: row["own_ms"] for row in communication["each"]}
    slowest = own.pop(communication["slowest"])
    others = sum(own.values()) / len(own)
    margin = ", by less than 5%" if slowest < 1.05 * others else ""
    split = ""
    if communication["late_ms"] is not None:
        late, moving = communication["late_ms"], communication["moving_ms"]
        split = f": {late:.3g} ms for a late rank, {moving:.3g} ms for data transfer"
    return (
        f"Rank {communication['slowest']} of {communication['ranks']} is the slowest{margin}: its own work takes "
        f"{slowest:.3g} ms per step, that of the others {others:.3g} ms. Exposed communication: ranks wait in "
        f"collectives for {communication['exposed_share']:.0%} of a step, {communication['exposed_ms']:.3g} ms{split}."
    )


def read(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, float | None]:
    """Every reading of the rules; None where a ceiling or a component was not measured."""
    parts = {part["name"]: part for part in profile["components"]}
    step_s = profile["step_ms"]["p50"] / 1e3
    readings: dict[str, float | None] = dict.fromkeys(READINGS)
    readings["input"] = parts["data"]["share"] if "data" in parts else 0.0
    readings["communication"] = sum(part["share"] for part in parts.values() if part["phase"] == "communication")
    readings["table"] = sum(part["share"] for name, part in parts.items() if kind_of(name) in ("tables", "hash"))
    readings["launch"] = launch_share(profile)
    readings["small"] = small_share(profile)
    limits = ceilings(profile, peaks)
    if limits is None:
        return readings
    flops = sum(part["flops"] or 0 for part in parts.values())
    moved = sum(part["bytes"] or 0 for part in parts.values())
    readings["compute"] = flops / limits.flops_per_s / step_s
    readings["stream"] = moved / limits.bytes_per_s / step_s
    if profile.get("operators"):
        readings["empty ops"] = step_s * 1e9 / profile["operators"] / limits.operator_ns
    if "embedding" in parts and profile["ids"]["lookups"]:
        row_ns = parts["embedding"]["ms"]["p50"] * 1e6 / profile["ids"]["lookups"]
        ceiling = row_time(limits.rows, profile["ids"]["row_bytes"])
        readings["of memory"] = row_ns / ceiling if ceiling else None
    if limits.last_level:
        readings["beyond"] = profile["ids"]["touched_bytes"] / limits.last_level
    return readings


def small_share(profile: dict[str, Any]) -> float:
    """Share of the kernel time in small kernels; 0 without a trace."""
    kernels = profile.get("kernels") or {}
    whole = sum(row["total_ms"] for row in kernels.get("rows", ()))
    return float(kernels["small"]["total_ms"] / whole) if whole else 0.0


def launch_share(profile: dict[str, Any]) -> float:
    """Share of the step in which the device idles for any reason but its input; 0 without a trace."""
    idle = profile.get("idle") or {}
    if "causes" not in idle or not idle["wall_ms"]:
        return 0.0
    return float(sum(ms for cause, ms in idle["causes"].items() if cause != "input wait") / idle["wall_ms"])


def part_ms(profile: dict[str, Any], name: str) -> dict[str, float]:
    """p20, p50 and p80 of a part of the step, or of the whole "step"."""
    if name == "step":
        return dict(profile["step_ms"])
    return dict(next(part["ms"] for part in profile["components"] if part["name"] == name))


def _evidence(name: str, readings: dict[str, float | None]) -> list[dict[str, Any]]:
    """The readings of the named regime with their thresholds; for an unclear one, all readings."""
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


def _why_unclear(matching: list[str], readings: dict[str, float | None]) -> str:
    missing = [READINGS[name] for name, value in readings.items() if value is None]
    if missing:
        return "Unclear: not measured: " + "; ".join(missing) + ". Run recperf peaks to measure this machine."
    if matching:
        return "Unclear: the readings match " + " and ".join(matching) + "."
    return "Unclear: no limit stands out; the readings match no regime."
