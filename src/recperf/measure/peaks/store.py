"""The file of a machine's ceilings, stored under its fingerprint; those of another machine are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

from ... import places
from ...errors import DataError, MachineError, RecperfError
from ...files import write_json, writing
from ...jsonfile import Count, Meta, Number, Problem, Struct, fit, sealed
from ...jsonfile import load as load_json
from ...machine import host_facts, machine_facts
from .other_work import DISTURBED, QUIET

SCHEMA = 2

FIX = "recperf peaks"


class Figure(Struct):
    p20: Number
    p50: Number
    p80: Number
    n: Count

    def __post_init__(self) -> None:
        readings = (self.p20, self.p50, self.p80, self.n)
        if min(readings) <= 0:
            raise ValueError(f"p20, p50, p80 and n are {readings}, not four positive numbers")
        if not self.p20 <= self.p50 <= self.p80:
            raise ValueError("p20, p50 and p80 are out of order")


NOT_MEASURED = cast(Figure, None)
"""Default of a figure that a file may lack; null is not allowed there."""


class Point(Figure):
    table_bytes: Count


class Row(Struct):
    row_bytes: Count
    ns: Figure
    bytes_per_s: Figure
    methods: dict[str, Number] = {}  # noqa: RUF012


class RowTable(Struct):
    table_bytes: Count
    rows: Annotated[list[Row], Meta(min_length=1)]


class RowTables(Struct):
    cache: RowTable
    dram: RowTable
    near: RowTable = cast(RowTable, None)


class Products(Struct):
    float32: Figure
    float64: Figure = NOT_MEASURED
    tf32: Figure = NOT_MEASURED
    bfloat16: Figure = NOT_MEASURED
    float16: Figure = NOT_MEASURED


class OfThreads(Struct):
    """Figures that depend on the number of threads."""

    gemm: Products
    copy: Figure
    read: Figure
    fresh: Figure
    cached: Figure
    gather: RowTables
    update: Figure = NOT_MEASURED
    first_touch: Figure = NOT_MEASURED
    special: Figure = NOT_MEASURED
    other_work: Number | None = None


class Stream(Struct):
    bytes: Count
    points: list[Point]


class Knee(Struct):
    bytes: Count
    points: Annotated[list[Point], Meta(min_length=1)]
    stream: Stream = cast(Stream, None)
    row_bytes: Count = 0
    lookups: Count = 0


class Launch(Struct):
    kernel: Figure
    queue: Figure
    round_trip: Figure


class OfDevice(OfThreads, kw_only=True):
    """Figures of a device."""

    knee: Knee
    calls: dict[str, Figure]
    launch: Launch | None = None
    transfer: dict[str, Figure] = {}  # noqa: RUF012


class Gpu(Struct):
    name: str


class MeasuredMachine(Struct):
    fingerprint: str
    gpus: list[Gpu] | None = None


class BagRatios(Struct):
    """Times of torch over those of C; `source` is a digest of the code."""

    lookups: Figure
    updates: Figure
    source: str
    other_work: Number | None = None


class Peaks(OfDevice, kw_only=True):
    """The file of ceilings."""

    schema: int
    machine: MeasuredMachine
    threads: Count
    other_threads: dict[str, OfThreads]
    gpu: dict[str, OfDevice] | None = None
    quick: bool = False
    measured: str = ""
    notes: list[str] = []  # noqa: RUF012
    bags: dict[str, dict[str, BagRatios]] = {}  # noqa: RUF012
    """By number of threads and bytes of a row; measured when such a table is first used."""


def path_of(facts: dict[str, Any]) -> Path:
    """Where the ceilings of a machine are stored."""
    return places.home() / "machines" / f"{facts['fingerprint']}.json"


def save(peaks: dict[str, Any]) -> Path:
    """Write the ceilings under the fingerprint of their machine, replacing older ones that are no better.

    What those have for other numbers of threads is added to `peaks`.
    """
    path = path_of(peaks["machine"])
    stored = _stored(peaks["machine"])
    if stored is not None and _stays(stored, peaks):
        return path
    if stored is not None:
        before = {
            threads: {"other_work": stored.get("other_work"), **figures}
            for threads, figures in stored["other_threads"].items()
            if threads != str(peaks["threads"])
        }
        peaks["other_threads"] = {**before, **peaks["other_threads"]}
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, sealed(peaks))
    except MachineError as error:
        fix = "free some space there, or set RECPERF_HOME to a folder you may write"
        raise MachineError(error.what, where={"file": path}, fix=fix) from error
    return path


def disturbed(figures: dict[str, Any], most: float) -> bool:
    """Whether other work took more than this share of the cores while figures were measured."""
    return (figures.get("other_work") or 0.0) > most


def better_stored(peaks: dict[str, Any]) -> dict[str, Any] | None:
    """The stored ceilings that these must not replace."""
    stored = _stored(peaks["machine"])
    return stored if stored is not None and _stays(stored, peaks) else None


def _stored(facts: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return load(facts)
    except RecperfError:
        return None


def _stays(stored: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether stored ceilings are better than new ones: measured beside less other work, or in full and undisturbed."""
    if new["quick"] and not stored["quick"] and not disturbed(stored, DISTURBED):
        return True
    return disturbed(new, max(QUIET, stored.get("other_work") or 0.0))


def load(facts: dict[str, Any] | None = None, *, say: Callable[[str], None] = lambda _: None) -> dict[str, Any] | None:
    """The ceilings of this machine; None if they were never measured, or by an older recperf."""
    facts = machine_facts() if facts is None else facts
    path = path_of(facts)
    if not os.path.lexists(path):
        return None
    peaks = _content(path)
    if peaks is None or "update" not in peaks:
        say("the stored ceilings were measured by an older recperf and are not used")
        return None
    require_own(peaks, facts, file=path)
    return peaks


def find() -> dict[str, Any] | None:
    """The ceilings of this machine, found without torch: the newest stored ones of a machine that is equal but perhaps
    for its GPUs. None if they were never measured."""
    facts = host_facts()
    measured = []
    for path in sorted((places.home() / "machines").glob("*.json")):
        try:
            peaks = read_file(path)
        except DataError:
            # It is not known whose file it is; recperf peaks replaces that of this machine.
            continue
        if all(peaks["machine"].get(name) == fact for name, fact in facts.items()):
            measured.append(peaks)
    return max(measured, key=lambda peaks: str(peaks.get("measured")), default=None)


def read_file(path: Path) -> dict[str, Any]:
    """The ceilings of any machine, from a file that recperf peaks wrote, or printed."""
    peaks = _content(path, printed=True)
    if peaks is None:
        raise DataError("the ceilings were measured by an older recperf", where={"file": path}, fix=FIX)
    return peaks


def _content(path: Path, *, printed: bool = False) -> dict[str, Any] | None:
    """The checked content of a file, which has no seal where it was `printed`; None if an older recperf wrote it."""
    try:
        peaks = load_json(path, linked=not printed, named=printed)
    except OSError as error:
        what = f"the file of ceilings cannot be read: {error.strerror or error}"
        if printed:
            raise DataError(what, where={"file": path}, fix="recperf peaks writes one") from None
        raise MachineError(what, where={"file": path}, fix="make it readable, or remove it") from None
    except ValueError as error:
        raise DataError(f"the file of ceilings is damaged: {error}", where={"file": path}, fix=FIX) from None
    schema = peaks.get("schema") if isinstance(peaks, dict) else None
    if isinstance(schema, int) and 1 <= schema < SCHEMA:
        return None
    if schema is not None and schema != SCHEMA:
        what = f"the file of ceilings has schema {schema!r}; this recperf reads {SCHEMA}"
        raise DataError(what, where={"file": path}, fix=FIX)
    errors, seal = faults(peaks), peaks.pop("seal", None) if schema else None
    if not errors and seal not in (None, sealed(peaks)["seal"]):
        errors = ["it was changed after it was written"]
    if errors:
        raise DataError(f"the file of ceilings is damaged: {errors[0]}", where={"file": path}, fix=FIX)
    return dict(peaks) if seal or printed else None


def require_own(peaks: dict[str, Any], facts: dict[str, Any], *, file: Path | None = None) -> None:
    """Refuse ceilings of another machine: a share of its peak says nothing about this one."""
    theirs, ours = peaks["machine"]["fingerprint"], facts["fingerprint"]
    if theirs != ours:
        location = {"file": file} if file else {}
        raise DataError(
            f"these ceilings belong to another machine: measured on {theirs}, this is {ours}",
            where={**location, "measured on": _describe(peaks["machine"]), "this machine": _describe(facts)},
            fix=FIX,
        )


def _describe(facts: dict[str, Any]) -> str:
    gpus = ", ".join(gpu["name"] for gpu in facts.get("gpus") or []) or "no GPU"
    return f"{facts.get('cpu')}, {facts.get('cores')} cores, {gpus}, torch {facts.get('torch')}"


def faults(peaks: Any) -> list[str]:
    """Errors in the content of a file; empty if there are none."""
    problem = fit(peaks, Peaks)
    if isinstance(problem, Problem):
        return [str(problem)]
    return [] if "elementwise" in peaks["calls"] else ["calls.elementwise is missing"]
