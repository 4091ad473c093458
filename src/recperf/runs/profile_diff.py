"""Compares two profiles by part of the step and by kernel, and tells whether a gate on the change is exceeded.

A difference counts only if the ranges from p20 to p80 do not overlap; otherwise it is within noise. A profile has no
spread of single kernels, so kernels explain a difference but never exceed a gate.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import jsonfile
from ..errors import DataError, UsageError
from ..measure.limits import TEXTS
from .record import read_config
from .report.compare import changed_fields
from .report.formats import percent, printable
from .report.profile_facts import why_missing
from .schemas import ComparedProfile, Kernels, Machine, require_schema

SCHEMA = 2
GATED_SHARE = 0.05
"""A part smaller than this in both profiles is not held to the gate."""
NOTICED_SHARE = 0.01
"""A limit whose share is smaller in both profiles is not shown."""
LARGEST_MS = 1e12
"""No step takes decades; a larger number means damage."""
FEW_STEPS = 8
"""With fewer steps than this, the spread says little."""

_PERCENTILES = ("p20", "p50", "p80")


@dataclass(frozen=True)
class LoadedProfile:
    """A profile, with what its folder says about it."""

    path: Path
    profile: dict[str, Any]
    workload: str | None = None
    config: dict[str, Any] | None = None
    machine: str | None = None


@dataclass(frozen=True)
class Change:
    """The time of one part in both profiles, in ms; None if a profile does not have it."""

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
        """Whether it is slower by more than the gate, beyond noise."""
        if self.share < GATED_SHARE or self.says != "slower":
            return False
        # A ratio to zero is larger than any gate.
        return self.ratio is None or self.ratio > gate

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "old_ms": self.old, "new_ms": self.new, "change": self.ratio, "says": self.says,
                "share": self.share}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in a step; None if a profile does not have it."""

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
        return {**vars(self), "change": ratio}


@dataclass(frozen=True)
class Diff:
    files: tuple[str, str]
    warnings: list[str] = field(default_factory=list)
    """Differences that make the profiles incomparable: device, workload, batch size."""
    notes: list[str] = field(default_factory=list)
    """Other differences, which may be the cause of a change."""
    step: Change = Change("step", None, None, 1.0)
    components: list[Change] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    no_kernels: str | None = None
    """Why kernels are not compared."""
    limits: tuple[str | None, str | None] = (None, None)
    """What limits the step in each profile."""
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Share of the step by limit in both, the largest first."""

    def regressions(self, gate: float) -> list[Change]:
        return [change for change in (self.step, *self.components) if change.beyond(gate)]

    def as_json(self) -> dict[str, Any]:
        return {
            "profiles": list(self.files),
            "warnings": self.warnings,
            "notes": self.notes,
            "step": self.step.as_json(),
            "limit": dict(zip(("old", "new"), self.limits)),
            "shares": {limit: dict(zip(("old", "new"), both)) for limit, both in self.shares.items()},
            "components": [change.as_json() for change in self.components],
            "kernels": {"missing": self.no_kernels} if self.no_kernels else [k.as_json() for k in self.kernels],
        }


def parse_gate(text: str) -> float:
    """`5%` as 0.05."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text, re.ASCII)
    if not match:
        raise UsageError(f"--gate takes a percentage such as 5%, not {printable(text)[:40]!r}", fix="--gate 5%")
    return float(match[1]) / 100


def load(path: Path) -> LoadedProfile:
    """A profile.json, or the one in a folder, validated as far as a comparison reads it."""
    file = path / "profile.json" if path.is_dir() else path
    if not file.exists():
        what = "no profile there: profile.json is missing" if path.is_dir() else "no profile there"
        raise DataError(what, where={"file": file}, fix="recperf profile WORKLOAD writes one, and so does recperf run")
    if not file.is_file():
        raise DataError("not a file", where={"file": file}, fix="name a profile.json or a folder that holds one")
    profile = jsonfile.read(file, named=not path.is_dir())
    require_schema(file, profile, SCHEMA)
    what, fix = "is not a profile", "recperf profile WORKLOAD"
    known = jsonfile.require(profile, ComparedProfile, file, what=what, fix=fix)
    wrong = None if known.components else "components is empty"
    spreads = [("step_ms", known.step_ms), *((f"components.{part.name}.ms", part.ms) for part in known.components)]
    for name, ms in spreads:
        if not 0 <= ms.p20 <= ms.p50 <= ms.p80 <= LARGEST_MS:
            wrong = wrong or f"p20, p50 and p80 of {printable(name)} are not times in rising order"
    kernels = profile.get("kernels")
    if isinstance(kernels, dict) and "missing" not in kernels:
        rows = jsonfile.require(kernels, Kernels, file, what=what, at="kernels", fix=fix).rows
        if any(not 0 <= value <= LARGEST_MS for row in rows for value in (row.count, row.total_ms)):
            wrong = wrong or "kernels.rows has negative times or counts"
    if wrong:
        raise DataError(f"{file.name} {what}: {wrong}", where={"file": file}, fix=fix)
    workload, config, machine = _about(file.parent)
    return LoadedProfile(file, profile, _text(profile.get("workload")) or workload, config, machine)


def _about(folder: Path) -> tuple[str | None, dict[str, Any] | None, str | None]:
    """Workload, config and machine of a profile. They only explain differences, so a damaged file counts as missing."""
    workload = config = machine = None
    try:
        if (folder / "config.json").is_file():
            workload, config = read_config(folder)
        path = folder / "machine.json"
        if path.is_file():
            machine = jsonfile.require(jsonfile.read(path), Machine, path, what="is damaged").fingerprint
    except DataError:
        pass
    return workload, config, _text(machine)


def diff(old: LoadedProfile, new: LoadedProfile) -> Diff:
    """The changes from the first profile to the second."""
    lacking = _no_kernels(old, new)
    return Diff(
        files=(printable(old.path), printable(new.path)),
        warnings=warnings(old, new),
        notes=notes(old, new),
        step=Change("step", _spread(old.profile["step_ms"]), _spread(new.profile["step_ms"]), 1.0),
        components=components(old.profile, new.profile),
        kernels=[] if lacking else kernels(old.profile, new.profile),
        no_kernels=lacking,
        limits=(_text(_part(old, "verdict").get("limit")), _text(_part(new, "verdict").get("limit"))),
        shares=shares(_part(old, "shares"), _part(new, "shares")),
    )


def shares(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """The shares by limit in both profiles, without those under 1 % in both."""
    both = {limit: (_share(old.get(limit)), _share(new.get(limit))) for limit in TEXTS} if old and new else {}
    large = [limit for limit, values in both.items() if max(values) >= NOTICED_SHARE]
    return {limit: both[limit] for limit in sorted(large, key=lambda limit: -max(both[limit]))}


def _share(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def warnings(old: LoadedProfile, new: LoadedProfile) -> list[str]:
    """Differences that make the two different measurements."""
    differences = []
    for what, one, other in (
        ("workloads", old.workload, new.workload),
        ("presets", _text(old.profile.get("preset")), _text(new.profile.get("preset"))),
        ("devices", old.profile["device"], new.profile["device"]),
        ("batch sizes", old.profile["batch_size"], new.profile["batch_size"]),
    ):
        if one != other and None not in (one, other):
            both = f"{_named(one)} and {_named(other)}"
            differences.append(f"different {what}: {both}; the profiles measure different things")
    return differences


def notes(old: LoadedProfile, new: LoadedProfile) -> list[str]:
    """Other differences: each may cause the change, or hide it."""
    differences = []
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
            differences.append(f"{printable(what)}: {_named(one)}, then {_named(other)}")
    if old.config is not None and new.config is not None:
        for row in changed_fields([old.config, new.config]):
            differences.append(f"config {printable(row.name)}: {_named(row.values[0])}, then {_named(row.values[1])}")
    for loaded in (old, new):
        if loaded.profile["steps"] < FEW_STEPS:
            differences.append(
                f"{printable(loaded.path)} has only {loaded.profile['steps']} steps, so its spread says little"
            )
    if old.path.resolve() == new.path.resolve():
        differences.append("a profile is compared with itself")
    return differences


def components(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Every part of either profile, the largest change in time first."""
    parts = [{part["name"]: part for part in profile["components"]} for profile in (old, new)]
    changes = []
    for name in dict.fromkeys([*parts[0], *parts[1]]):
        one, other = (by_name.get(name) for by_name in parts)
        share = max(part["share"] for part in (one, other) if part)
        before, after = (_spread(part["ms"]) if part else None for part in (one, other))
        changes.append(Change(printable(name), before, after, float(share)))
    return sorted(changes, key=lambda change: -abs(_median(change.new) - _median(change.old)))


def kernels(old: dict[str, Any], new: dict[str, Any]) -> list[Kernel]:
    """Every kernel of either profile by its whole name, the largest change in time first."""
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for sums, profile in ((before, old), (after, new)):
        for row in profile["kernels"]["rows"]:
            total = sums.setdefault(printable(row["name"]), [0.0, 0.0])
            total[0] += row["total_ms"]
            total[1] += row["count"]
    rows = []
    for name in dict.fromkeys([*before, *after]):
        (old_ms, old_count), (new_ms, new_count) = (sums.get(name, (None, None)) for sums in (before, after))
        rows.append(Kernel(name, old_ms, new_ms, old_count, new_count))
    return sorted(rows, key=lambda row: -abs(row.more_ms))


def _no_kernels(old: LoadedProfile, new: LoadedProfile) -> str | None:
    """Why the kernels cannot be compared."""
    for loaded in (old, new):
        reason = why_missing(loaded.profile, "kernels")
        if reason:
            return f"not measured in {printable(loaded.path)}: {reason}"
    return None


def change_text(change: Change) -> str:
    if change.ratio is None:
        return change.says
    return f"{'+' if change.ratio >= 0 else '-'}{percent(abs(change.ratio), 1)}"


def pooled(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One spread from several rounds of the same measurement: the median of the medians, and the whole range."""
    return {
        "p20": min(ms["p20"] for ms in rounds),
        "p50": statistics.median(ms["p50"] for ms in rounds),
        "p80": max(ms["p80"] for ms in rounds),
    }


def variation(rounds: Sequence[Mapping[str, float]]) -> float:
    """How far the medians of several rounds lie apart, as a share of their median."""
    medians = [ms["p50"] for ms in rounds]
    middle = statistics.median(medians)
    return (max(medians) - min(medians)) / middle if middle else 0.0


def _change(old: float, new: float) -> float | None:
    ratio = new / old - 1 if old else (0.0 if new == old else math.inf)
    return ratio if math.isfinite(ratio) else None


def _spread(ms: dict[str, Any]) -> dict[str, float]:
    return {name: float(ms[name]) for name in _PERCENTILES}


def _median(ms: dict[str, float] | None) -> float:
    return ms["p50"] if ms else 0.0


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _named(value: Any) -> str:
    return "none" if value is None else printable(value)[:60]


def _first(value: Any) -> Any:
    """A switch without the reason after its colon."""
    return value.split(":")[0] if isinstance(value, str) else value


def _part(loaded: LoadedProfile, *names: str) -> dict[str, Any]:
    """An optional part of a profile; empty if it is missing."""
    part: Any = loaded.profile
    for name in names:
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else {}


def _pairs(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])] if old and new else []
