"""The report of a trace of torch.profiler."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...measure.limits import ranks_sentence
from ...measure.trace.records import ComparedRanks, TraceAnalysis, TraceLimit
from . import formats as fmt
from . import profile_report as device
from . import step_sections, timeline
from .blocks import Block, Cell, Report, Section, Table, Text, Viewer, arranged, definitions, table_of
from .step_sections import last_name

Columns = dict[str, Callable[[Any], Any]]
"""The columns of a table: what each shows of a row."""

EMBEDDED = 5_000_000
"""A larger gzipped trace does not become part of a page."""
NESTED = 24
"""Regions or modules that are always visible."""
STEPS = {
    "names": "the ranges that name them",
    "optimizer": "the ends of the optimizer's steps; the trace names none",
    "whole trace": "no named steps; the whole trace counts as one",
}
RANKS_METHOD = (
    "Own work is the step without the time in which only collectives run. A collective ends on all ranks at about the "
    "same time: the rank on which it took least arrived last, and what it took longer elsewhere is waiting for a late "
    "rank. Parts and tables below are those of the slowest rank."
)


def viewer(path: Path) -> Viewer:
    """The trace for Perfetto, part of the page where its gzip is small enough."""
    # A trace shrinks 10 to 20 times: packing one that is far too large would only take time.
    if path.stat().st_size > 40 * EMBEDDED:
        return Viewer(fmt.printable(path.name))
    content = path.read_bytes()
    packed = content if content[:2] == b"\x1f\x8b" else gzip.compress(content, mtime=0)
    return Viewer(fmt.printable(path.name), base64.b64encode(packed).decode() if len(packed) <= EMBEDDED else "")


def report(analysis: TraceAnalysis, *, viewer: Viewer | None = None) -> Report:
    # Names in a trace are anybody's text: one pass keeps control characters out of all of it.
    analysis = fmt.all_printable(analysis)
    several, limit = analysis.ranks_compared, analysis.limit
    built, missing = _sections(analysis)
    step = timeline.sections(limit.timeline, limit.operators, limit.step_ms.p50)
    subtitle = [_device(analysis), f"{fmt.time(analysis.limit.step_ms.p50)} per step"]
    subtitle += [f"torch {analysis.torch}"] if analysis.torch else []
    return Report(
        key="trace",
        title=Path(analysis.file).name,
        name="trace",
        subtitle=" · ".join(subtitle),
        verdict=ranks_sentence(several) or step_sections.headline(analysis.limit.verdict),
        measured=True,
        facts=step_sections.step_facts(
            limit.verdict,
            limit.places,
            limit.advice,
            [*limit.notes, *step_sections.unseen(missing)],
            ranks_sentence(several),
        ),
        sections=arranged([*step, *built, Section("file", "The trace", _file(analysis, missing, viewer))]),
    )


def _sections(analysis: TraceAnalysis) -> tuple[list[Section], dict[str, list[str]]]:
    """The sections that the trace tells about, and the titles of the others by reason."""
    listed: tuple[tuple[str, str, str, Callable[[Any], list[Block]]], ...] = (
        ("ranks", "Ranks", "ranks_compared", _ranks),
        ("limits", "What limits the step", "limit", _limit),
        ("advice", "What to change", "limit", lambda limit: step_sections.advice_blocks(limit.advice)),
        ("shares", "Where the time goes", "limit", _shares),
        ("parts", "Regions and modules", "parts", lambda _: _parts(analysis)),
        ("operators", "Operators", "limit", lambda limit: step_sections.operator_blocks(limit.operators)),
        ("kernels", "Kernels", "kernels", lambda kernels: device.kernels(kernels, analysis.window.wall_ms)),
        ("idle", "Device idle", "idle", device.idle),
        ("transfers", "Copies", "transfers", device.transfers),
        ("communication", "Communication", "communication", lambda _: _communication(analysis)),
    )
    return step_sections.measured_sections(analysis, (row for row in listed if getattr(analysis, row[2]) is not None))


def _device(analysis: TraceAnalysis) -> str:
    used = analysis.window.device
    if used is None:
        return "CPU"
    names = analysis.devices
    name = names[used] if used < len(names) else f"device {used}"
    several = analysis.window.devices
    return name + (f", the busiest of {several}" if several > 1 else "")


def _limit(limit: TraceLimit) -> list[Block]:
    """The verdict, whose ceilings they rest on, and what the trace does not tell."""
    notes = [limit.ceilings, *limit.notes]
    return [*step_sections.limit_blocks(limit.verdict), *(Text(fmt.sentence(note), "note") for note in notes)]


def _shares(limit: TraceLimit) -> list[Block]:
    figure, table = step_sections.share_blocks(limit.shares, limit.step_ms.p50)
    if isinstance(table, Table) and limit.ceilings.startswith("no ceilings"):
        undivided = Cell("the time of operators; without ceilings it is not divided")
        rows = [(*row[:-1], undivided) if row[0].text == "operator" else row for row in table.rows]
        table = replace(table, rows=rows)
    return [figure, table, *step_sections.place_blocks(limit.places)]


def _parts(analysis: TraceAnalysis) -> list[Block]:
    rows, step = analysis.parts, analysis.window.host_ms or 1.0
    if len(rows) < 2:
        return [
            Text(
                "The trace has no regions: torch.profiler.record_function(name) around a piece of code makes one, and "
                "with_stack=True records modules."
            )
        ]
    columns: Columns = {
        "region": _nested,
        "calls": lambda row: fmt.count(row.calls) if row.calls else fmt.NONE,
        "host": lambda row: fmt.time(row.total_ms),
        "of the step": lambda row: fmt.percent(row.total_ms / step, 1),
        "without inner": lambda row: fmt.time(row.host_ms),
    }
    if rows[0].device_ms is not None:
        columns["device"] = lambda row: fmt.time(row.device_ms)
        columns["kernels"] = lambda row: fmt.count(row.kernels)
    note = (
        "Per step, in the thread of the steps. Device work belongs to the region that launched it; the backward pass "
        "to the region that waits for it."
    )
    return [table_of(rows, columns, note, top=NESTED)]


def _nested(row: Any) -> Cell:
    """The last name of a region or a module, with a mark for every name around it."""
    return Cell("› " * row.name.count("/") + last_name(row.name), width=48)


def _communication(analysis: TraceAnalysis) -> list[Block]:
    communication, step = analysis.communication, analysis.window.wall_ms or 1.0
    exposed = communication.exposed_ms
    where = "no other kernel runs" if communication.where == "device" else "the step's thread runs no operator"
    sentence = (
        f"For {fmt.time(exposed)} of a step ({fmt.percent(exposed / step, 0)}) a collective is under way while {where}."
    )
    return [Text(sentence, "lead"), *device.collective_blocks(communication.rows, "Per step.")]


def _ranks(compared: ComparedRanks) -> list[Block]:
    note = "Per step, mean over the ranks, whether or not other work runs meanwhile."
    return [
        *(Text(fmt.sentence(note), "warning") for note in compared.notes),
        *device.rank_blocks("trace", compared, RANKS_METHOD),
        *device.collective_blocks(compared.collectives, note),
    ]


def _file(analysis: TraceAnalysis, missing: dict[str, list[str]], viewer: Viewer | None) -> list[Block]:
    window, own = analysis.window, analysis.ranks
    unknown = f", {analysis.ignored:,} of them of unknown kinds or without a valid time" if analysis.ignored else ""
    software = {"torch": analysis.torch, "CUDA": analysis.cuda}
    steps = f"{window.steps:,}, from {STEPS[window.steps_from]}" if window.named else STEPS["whole trace"]
    rows: list[tuple[str, str | Cell]] = [
        ("file", f"{analysis.file}, {fmt.size(analysis.bytes)}, {analysis.events:,} events{unknown}"),
        ("recorded by", ", ".join(f"{name} {version}" for name, version in software.items() if version) or "unknown"),
        ("device", _device(analysis)),
        ("steps", steps),
        *([("rank", f"{own.rank} of {own.world_size}, {own.backend}")] if own else []),
        *((f"missing: {', '.join(titles)}", reason) for reason, titles in missing.items()),
    ]
    return [definitions(rows), *([viewer] if viewer else [])]
