"""What got slower or faster between two profiles, by part and by kernel, and whether that trips a gate.

A difference counts only where the ranges from p20 to p80 lie apart; where they overlap it is within noise. Kernels have
no spread in a profile, so they explain and never trip a gate.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from .compare import changed_fields
from .record import read_config, read_json
from .report.profile_words import ABSENT, percent, plain
from .result import Field, faults

SCHEMA = 1
GATED_SHARE = 0.05
"""A part smaller than this in both profiles is not held to the gate."""
LARGEST_MS = 1e12
"""No step takes decades; such a number is damage."""
FEW_STEPS = 8
"""Below this the spread says little."""

_PERCENTILES = ("p20", "p50", "p80")
_FIELDS = (
    Field("schema", "integer", ""),
    Field("device", "string", ""),
    Field("steps", "integer", ""),
    Field("batch_size", "integer", ""),
    Field("step_ms", "object", ""),
    *(Field(f"step_ms.{name}", "number", "") for name in _PERCENTILES),
    Field("components", "array", ""),
    Field("components.*.name", "string", ""),
    Field("components.*.share", "number", ""),
    Field("components.*.ms", "object", ""),
    *(Field(f"components.*.ms.{name}", "number", "") for name in _PERCENTILES),
)
_KERNELS = (
    Field("rows", "array", ""),
    Field("rows.*.name", "string", ""),
    Field("rows.*.count", "number", ""),
    Field("rows.*.total_ms", "number", ""),
)


@dataclass(frozen=True)
class Given:
    """One profile, with what stands beside it in its folder."""

    path: Path
    profile: dict[str, Any]
    workload: str | None = None
    config: dict[str, Any] | None = None
    machine: str | None = None


@dataclass(frozen=True)
class Change:
    """One time in both profiles, in ms; None where a profile does not have it."""

    name: str
    old: dict[str, float] | None
    new: dict[str, float] | None
    share: float
    """Of its step, the larger of the two."""

    @property
    def ratio(self) -> float | None:
        """How much more time it takes: 0.1 is a tenth more."""
        if not self.old or not self.new:
            return None
        return _change(self.old["p50"], self.new["p50"])

    @property
    def apart(self) -> bool:
        """Whether the ranges from p20 to p80 do not overlap."""
        if not self.old or not self.new:
            return False
        return self.new["p20"] > self.old["p80"] or self.new["p80"] < self.old["p20"]

    @property
    def says(self) -> str:
        if not self.old or not self.new:
            return "new" if self.new else "gone"
        if not self.apart:
            return "same" if self.old == self.new else "within noise"
        return "slower" if self.new["p50"] > self.old["p50"] else "faster"

    def beyond(self, gate: float) -> bool:
        """Whether it is slower by more than the gate, and not by chance."""
        if self.share < GATED_SHARE or self.says != "slower":
            return False
        # From nothing to something is more than any share of nothing.
        return self.ratio is None or self.ratio > gate

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "old_ms": self.old, "new_ms": self.new, "change": self.ratio, "says": self.says,
                "share": self.share}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """All launches of one name in a step; None where a profile does not have it."""

    name: str
    old_ms: float | None
    new_ms: float | None
    old_count: float | None
    new_count: float | None

    @property
    def more_ms(self) -> float:
        return (self.new_ms or 0.0) - (self.old_ms or 0.0)

    def as_json(self) -> dict[str, Any]:
        ratio = None if self.old_ms is None or self.new_ms is None else _change(self.old_ms, self.new_ms)
        return {"name": self.name, "old_ms": self.old_ms, "new_ms": self.new_ms, "old_count": self.old_count,
                "new_count": self.new_count, "change": ratio}  # fmt: skip


@dataclass(frozen=True)
class Diff:
    files: tuple[str, str]
    warnings: list[str] = field(default_factory=list)
    """What makes the two different measurements: device, workload, batch."""
    notes: list[str] = field(default_factory=list)
    """What else differs, and may be the cause."""
    step: Change = Change("step", None, None, 1.0)
    components: list[Change] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    no_kernels: str | None = None
    """Why kernels are not compared."""

    def regressions(self, gate: float) -> list[Change]:
        return [change for change in (self.step, *self.components) if change.beyond(gate)]

    def as_json(self) -> dict[str, Any]:
        return {
            "profiles": list(self.files),
            "warnings": self.warnings,
            "notes": self.notes,
            "step": self.step.as_json(),
            "components": [change.as_json() for change in self.components],
            "kernels": {"missing": self.no_kernels} if self.no_kernels else [k.as_json() for k in self.kernels],
        }


def parse_gate(text: str) -> float:
    """`5%` as 0.05."""
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text, re.ASCII)
    if not found:
        raise UsageError(f"--gate takes a percentage such as 5%, not {plain(text)[:40]!r}", fix="--gate 5%")
    return float(found[1]) / 100


def load(path: Path) -> Given:
    """A profile.json, or the one in a folder, checked as far as a diff reads it."""
    file = path / "profile.json" if path.is_dir() else path
    if not file.exists():
        what = "no profile there: profile.json is missing" if path.is_dir() else "no profile there"
        raise DataError(what, where={"file": file}, fix="recperf profile WORKLOAD writes one, and so does recperf run")
    if not file.is_file():
        raise DataError("not a file", where={"file": file}, fix="name a profile.json or a folder that holds one")
    profile = read_json(file)
    try:
        wrong = _wrong(profile)
    except (OverflowError, RecursionError):
        wrong = "a number or a nesting in it is absurd"
    if wrong:
        raise DataError(f"not a profile: {plain(wrong)}", where={"file": file}, fix="recperf profile WORKLOAD")
    workload, config = _config(file.parent)
    return Given(file, profile, _text(profile.get("workload")) or workload, config, _machine(file.parent))


def _wrong(profile: Any) -> str | None:
    """What keeps a file from being a profile; none where it is one."""
    if not isinstance(profile, dict):
        return "it is no object"
    found = _faults(profile, _FIELDS)
    if found:
        return "; ".join(found[:3])
    if profile["schema"] != SCHEMA:
        return f"it has schema {profile['schema']}, this recperf reads {SCHEMA}"
    if not profile["components"]:
        return "components is empty"
    spreads = [
        ("step_ms", profile["step_ms"]),
        *((f"components.{p['name']}.ms", p["ms"]) for p in profile["components"]),
    ]
    for name, ms in spreads:
        if not 0 <= ms["p20"] <= ms["p50"] <= ms["p80"] <= LARGEST_MS:
            return f"p20, p50 and p80 of {name} are not times in rising order"
    kernels = profile.get("kernels")
    if isinstance(kernels, dict) and "missing" not in kernels:
        found = [f"kernels.{fault}" for fault in _faults(kernels, _KERNELS)]
        if found:
            return "; ".join(found[:3])
        if any(not 0 <= row[name] <= LARGEST_MS for row in kernels["rows"] for name in ("count", "total_ms")):
            return "kernels.rows has times or counts below 0"
    return None


def _faults(value: dict[str, Any], fields: tuple[Field, ...]) -> list[str]:
    return sorted(fault for fault in faults(value, fields) if not fault.endswith("is not described"))


def _config(folder: Path) -> tuple[str | None, dict[str, Any] | None]:
    """Workload and config beside a profile. They only explain differences, so a file that cannot be read is none."""
    try:
        return read_config(folder / "config.json") if (folder / "config.json").is_file() else (None, None)
    except DataError:
        return None, None


def _machine(folder: Path) -> str | None:
    try:
        facts = read_json(folder / "machine.json") if (folder / "machine.json").is_file() else None
    except DataError:
        return None
    return _text(facts.get("fingerprint")) if isinstance(facts, dict) else None


def diff(old: Given, new: Given) -> Diff:
    """The second profile held against the first."""
    lacking = _no_kernels(old, new)
    return Diff(
        files=(plain(old.path), plain(new.path)),
        warnings=warnings(old, new),
        notes=notes(old, new),
        step=Change("step", _spread(old.profile["step_ms"]), _spread(new.profile["step_ms"]), 1.0),
        components=components(old.profile, new.profile),
        kernels=[] if lacking else kernels(old.profile, new.profile),
        no_kernels=lacking,
    )


def warnings(old: Given, new: Given) -> list[str]:
    """Differences that make the two different measurements."""
    found = []
    for what, one, other in (
        ("workloads", old.workload, new.workload),
        ("presets", _text(old.profile.get("preset")), _text(new.profile.get("preset"))),
        ("devices", old.profile["device"], new.profile["device"]),
        ("batch sizes", old.profile["batch_size"], new.profile["batch_size"]),
    ):
        if one != other and None not in (one, other):
            both = f"{_named(one)} and {_named(other)}"
            found.append(f"different {what}: {both}; these are two measurements, not one thing changed")
    return found


def notes(old: Given, new: Given) -> list[str]:
    """Other differences: each may be the cause, or in the way."""
    found = []
    for what, one, other in (
        ("machine", old.machine, new.machine),
        ("mode", old.profile.get("mode"), new.profile.get("mode")),
        ("threads", old.profile.get("threads"), new.profile.get("threads")),
        *(
            (f"version of {name}", one, other)
            for name, one, other in _pairs(_part(old, "trust", "versions"), _part(new, "trust", "versions"))
        ),
        *((f"switch {n}", _first(a), _first(b)) for n, a, b in _pairs(_part(old, "switches"), _part(new, "switches"))),
        ("seed", _part(old, "trust").get("seed"), _part(new, "trust").get("seed")),
    ):
        # What only one profile records is no difference, except for a switch or a package that only one has.
        if one != other and (None not in (one, other) or what.startswith(("switch", "version"))):
            found.append(f"{plain(what)}: {_named(one)}, then {_named(other)}")
    if old.config is not None and new.config is not None:
        for row in changed_fields([old.config, new.config]):
            found.append(f"config {plain(row.name)}: {_named(row.values[0])}, then {_named(row.values[1])}")
    for given in (old, new):
        if given.profile["steps"] < FEW_STEPS:
            found.append(f"{plain(given.path)} has {given.profile['steps']} steps only: its spread says little")
    if old.path.resolve() == new.path.resolve():
        found.append("a profile is compared with itself")
    return found


def components(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Every part of either, the largest change in time first."""
    parts = [{part["name"]: part for part in profile["components"]} for profile in (old, new)]
    found = []
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        one, other = (each.get(name) for each in parts)
        share = max(part["share"] for part in (one, other) if part)
        found.append(Change(plain(name), _spread(one["ms"]) if one else None, _spread(other["ms"]) if other else None,
                            float(share)))  # fmt: skip
    return sorted(found, key=lambda change: -abs(_middle(change.new) - _middle(change.old)))


def kernels(old: dict[str, Any], new: dict[str, Any]) -> list[Kernel]:
    """Every kernel of either by its whole name, the largest change in time first."""
    sums: list[dict[str, list[float]]] = [{}, {}]
    for found, profile in zip(sums, (old, new)):
        for row in profile["kernels"]["rows"]:
            total = found.setdefault(plain(row["name"]), [0.0, 0.0])
            total[0] += row["total_ms"]
            total[1] += row["count"]
    rows = []
    for name in dict.fromkeys([*sums[0], *sums[1]]):
        one, other = (each.get(name) for each in sums)
        times = (one[0] if one else None, other[0] if other else None)
        rows.append(Kernel(name, *times, one[1] if one else None, other[1] if other else None))
    return sorted(rows, key=lambda row: -abs(row.more_ms))


def _no_kernels(old: Given, new: Given) -> str | None:
    for given in (old, new):
        part = given.profile.get("kernels")
        if not isinstance(part, dict) or "missing" in part:
            why = plain(part["missing"]) if isinstance(part, dict) else ABSENT
            return f"not measured in {plain(given.path)}: {why}"
    return None


def change_words(change: Change) -> str:
    if change.ratio is None:
        return change.says
    return f"{'+' if change.ratio >= 0 else '-'}{percent(abs(change.ratio))}"


def _change(old: float, new: float) -> float | None:
    ratio = new / old - 1 if old else (0.0 if new == old else math.inf)
    return ratio if math.isfinite(ratio) else None


def _spread(ms: dict[str, Any]) -> dict[str, float]:
    return {name: float(ms[name]) for name in _PERCENTILES}


def _middle(ms: dict[str, float] | None) -> float:
    return ms["p50"] if ms else 0.0


def _text(value: Any) -> str | None:
    return plain(value) if isinstance(value, str) else None


def _named(value: Any) -> str:
    return "none" if value is None else plain(value)[:60]


def _first(value: Any) -> Any:
    """A switch without the reason after its colon."""
    return value.split(":")[0] if isinstance(value, str) else value


def _part(given: Given, *names: str) -> dict[str, Any]:
    """A part of a profile that need not be there."""
    found: Any = given.profile
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _pairs(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])] if old and new else []
