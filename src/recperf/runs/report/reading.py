"""A finished run as its folder holds it, every file checked before anything is drawn from it."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...measure.peaks import faults as peaks_faults
from ...measure.peaks import require_own
from ...measure.spans import PHASES, phase_of
from ..record import PROFILE_MARK, read_config, read_json
from ..result import FIELDS, SCHEMA, Field, faults

PROFILE_SCHEMA = 1
PEAKS_SCHEMA = 1


def _percentiles(path: str) -> list[tuple[str, str]]:
    return [(path, "object"), *((f"{path}.{name}", "number") for name in ("p20", "p50", "p80"))]


_COMPONENTS = [
    *_percentiles("step_ms"),
    ("components", "array"),
    ("components.*.name", "string"),
    ("components.*.phase", "string"),
    *_percentiles("components.*.ms"),
    ("components.*.share", "number"),
    ("components.*.flops", "number or null"),
    ("components.*.bytes", "number or null"),
]

_PROFILE = [
    ("schema", "integer"),
    ("device", "string"),
    ("steps", "integer"),
    ("warmup", "integer"),
    ("batch_size", "integer"),
    *_COMPONENTS,
    ("overhead", "object or null"),
    *((f"overhead.{name}", "number") for name in ("plain_ms", "clocked_ms", "share")),
    ("ids", "object or null"),
    *(
        (f"ids.{name}", "number or null")
        for name in ("lookups", "unique_rows", "row_bytes", "working_set_bytes", "touched_bytes")
    ),
    ("regime", "object or null"),
    ("regime.name", "string"),
    ("regime.sentence", "string"),
    ("regime.evidence", "array"),
    ("regime.evidence.*.what", "string"),
    ("regime.evidence.*.value", "number or string or null"),
    ("regime.evidence.*.unit", "string or null"),
    ("regime.evidence.*.threshold", "string or null"),
    ("regime.evidence.*.says", "string or null"),
    ("communication", "object or absent"),
]

_RANKS = [
    *((name, "integer") for name in ("ranks", "hosts", "slowest", "steps", "sharing")),
    *((name, "number") for name in ("exposed_ms", "exposed_share", "clock_error_ms")),
    *((name, "number or null") for name in ("late_ms", "moving_ms")),
    ("not_told_apart", "string or null"),
    ("each", "array"),
    ("each.*.rank", "integer"),
    *((f"each.*.{name}", "number") for name in ("step_ms", "own_ms", "exposed_ms")),
    *((f"each.*.{name}", "number or null") for name in ("late_ms", "moving_ms", "awaited_ms")),
    ("each.*.largest_part", "string"),
    ("collectives", "array"),
    *((f"collectives.*.{name}", "string") for name in ("part", "what")),
    *(
        (f"collectives.*.{name}", "number")
        for name in ("count", "bytes", "exposed_ms", "late_ms", "moving_ms", "awaited_rank")
    ),
]
"""Of the section that a profile of several ranks has."""

_PAIR = [
    ("schema", "integer"),
    ("ids", "object"),
    ("ids.hot", "integer"),
    ("ids.cold", "integer"),
    ("ratio", "object"),
    ("ratio.*", "number or null"),
    ("verdict", "string"),
    *((half, "object") for half in ("hot", "cold")),
    *((f"{half}.{path}", kind) for half in ("hot", "cold") for path, kind in _COMPONENTS),
]


@dataclass(frozen=True)
class Events:
    """What the training logged: losses by seed, and evaluations in their order."""

    losses: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """One finished run; what was not measured is None."""

    folder: Path
    workload: str
    config: dict[str, Any]
    machine: dict[str, Any]
    result: dict[str, Any]
    events: Events = field(default_factory=Events)
    peaks: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    pair: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def short_name(self) -> str:
        """The name without the time in it, where it is one that recperf gave: the rest tells runs apart as well."""
        return re.sub(r"-\d{8}-\d{6}-(\w{6})$", r" \1", self.name)

    @property
    def quoted(self) -> str:
        """The folder as it is typed in a shell."""
        return shlex.quote(str(self.folder))


def read(folder: Path) -> Reading:
    """Everything a run's folder holds, or an error that names the file at fault."""
    if not (folder / "config.json").is_file():
        what = "no run there: config.json is missing" if folder.is_dir() else "no run there"
        raise DataError(what, where={"folder": folder}, fix="name a run's folder, such as runs/<name of the run>")
    workload, config = read_config(folder / "config.json")
    result = _result(folder, workload)
    machine = _machine(folder / "machine.json")
    return Reading(
        folder=folder,
        workload=workload,
        config=config,
        machine=machine,
        result=result,
        events=_events(folder / "events.jsonl"),
        peaks=_peaks(folder / "peaks.json", machine),
        profile=_profile(folder / "profile.json"),
        pair=_described(folder / "pair.json", _PAIR, ("hot", "cold")),
    )


def _result(folder: Path, workload: str) -> dict[str, Any]:
    path = folder / "result.json"
    if not path.exists() and (folder / PROFILE_MARK).exists():
        raise DataError(
            "this folder holds a profile, not a run",
            where={"folder": folder},
            fix="its page is profile.html; recperf diff compares two profiles",
        )
    if not path.exists():
        raise DataError(
            "the run is not finished: result.json is missing",
            where={"folder": folder},
            fix=f"recperf run --resume {shlex.quote(str(folder))}",
        )
    value = read_json(path)
    _refuse(path, value, FIELDS, SCHEMA)
    if value["workload"] != workload:
        what = f"result.json is of workload {value['workload']!r}, config.json of {workload!r}"
        raise DataError(what, where={"file": path})
    return dict(value)


def _machine(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("fingerprint"), str):
        raise DataError("machine.json does not describe a machine: fingerprint is missing", where={"file": path})
    caches = value.get("caches") or {}
    if not isinstance(caches, dict) or not all(isinstance(size, int) and size > 0 for size in caches.values()):
        raise DataError("machine.json does not describe a machine: caches are not sizes", where={"file": path})
    return value


def _peaks(path: Path, machine: dict[str, Any]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    value = read_json(path)
    _require_schema(path, value, PEAKS_SCHEMA)
    wrong = peaks_faults(value)
    if wrong:
        raise DataError(f"peaks.json is damaged: {wrong[0]}", where={"file": path}, fix="recperf peaks")
    require_own(value, machine, file=path)
    return dict(value)


def _profile(path: Path) -> dict[str, Any] | None:
    found = _described(path, _PROFILE, ("",))
    ranks = (found or {}).get("communication")
    if ranks is not None and "each" in ranks:
        _refuse_faults(path, ranks, tuple(Field(name, kind, "") for name, kind in _RANKS), "communication: ")
    return found


def _described(path: Path, described: list[tuple[str, str]], halves: tuple[str, ...]) -> dict[str, Any] | None:
    """A measured file whose shares must sum to 1 in each of its halves."""
    if not path.exists():
        return None
    value = read_json(path)
    _refuse(path, value, tuple(Field(name, kind, "") for name, kind in described), PROFILE_SCHEMA)
    for half in halves:
        components = (value[half] if half else value)["components"]
        shares = [component["share"] for component in components]
        if not components or min(shares) < 0 or abs(math.fsum(shares) - 1) > 0.01:
            where = f"{half}.components" if half else "components"
            raise DataError(f"{path.name} does not fit: the shares of {where} do not sum to 1", where={"file": path})
    return dict(value)


def _refuse(path: Path, value: Any, fields: tuple[Field, ...], schema: int) -> None:
    _require_schema(path, value, schema)
    _refuse_faults(path, value, fields)


def _refuse_faults(path: Path, value: Any, fields: tuple[Field, ...], of: str = "") -> None:
    # A later version may add fields; only what is missing or of another type is in the way.
    wrong = [fault for fault in faults(value, fields) if not fault.endswith("is not described")]
    if wrong:
        raise DataError(f"{path.name} does not fit its description: {of}{'; '.join(wrong[:3])}", where={"file": path})


def _require_schema(path: Path, value: Any, schema: int) -> None:
    if not isinstance(value, dict) or "schema" not in value:
        raise DataError(f"{path.name} is not a file that recperf wrote: it has no schema", where={"file": path})
    if value["schema"] != schema:
        what = f"{path.name} has schema {value['schema']!r}; this recperf reads {schema}"
        raise DataError(what, where={"file": path}, fix="use the version of recperf that wrote it")


def _events(path: Path) -> Events:
    found = Events()
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where={"file": path}) from None
    # A kill can tear the last line; what ends without a newline is no event.
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
            if event["kind"] == "step":
                loss = event["loss"]
                if loss is not None and math.isfinite(loss):
                    found.losses.setdefault(int(event["seed"]), []).append((int(event["step"]), float(loss)))
            elif event["kind"] == "metric":
                found.metrics.append({**event, "seed": int(event["seed"]), "step": int(event["step"])})
        except (ValueError, TypeError, KeyError):
            what = "events.jsonl has a line that is not an event"
            raise DataError(what, where={"file": path, "line": number}) from None
    return found


@dataclass(frozen=True)
class Share:
    """One part of a step."""

    name: str
    phase: str
    share: float
    ms: dict[str, float] | None


def step_parts(run: Reading, *, profiled: bool) -> list[Share]:
    """What a step is made of: from the profile, or from the spans clocked while training; empty: not measured."""
    if profiled:
        return shares(run.profile) if run.profile else []
    budget = run.result["performance"]["budget"] or {}
    # Backward and update spans have one part each, so an undeclared part is a forward span of a model not loaded here.
    return in_order(Share(name, phase_of(name, default="forward"), share, None) for name, share in budget.items())


def shares(profile: dict[str, Any]) -> list[Share]:
    parts = profile["components"]
    return in_order(Share(part["name"], part["phase"], part["share"], part["ms"]) for part in parts)


def in_order(parts: Iterable[Share]) -> list[Share]:
    """Parts as a step goes through them; within a phase, as they were measured."""
    return sorted(parts, key=lambda part: PHASES.index(part.phase) if part.phase in PHASES else len(PHASES))
