"""The report of a trace of torch.profiler."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...measure.limits import ranks_sentence
from ...measure.profile import StepProfile
from ...measure.trace.records import ComparedRanks, TraceAnalysis
from . import formats as fmt
from . import profile_report as device
from . import step_sections
from .blocks import Block, Cell, Report, Section, Text, Viewer, definitions, table_of
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


def report(profile: StepProfile, analysis: TraceAnalysis, *, viewer: Viewer | None = None) -> Report:
    """The report of a profile whose `analysis` is that of a trace."""
    several = analysis.ranks_compared
    built, missing = step_sections.measured_sections(
        (
            ("parts", "Regions and modules", analysis.parts, lambda _: _parts(analysis)),
            ("kernels", "Kernels", profile.kernels, lambda kernels: device.kernels(kernels, analysis.window.wall_ms)),
            ("idle", "Device idle", profile.idle, device.idle),
            ("transfers", "Copies", profile.transfers, device.transfers),
            ("communication", "Communication", analysis.communication, lambda _: _communication(analysis)),
        )
    )
    evidence: list[Block] = [Text(fmt.sentence(note), "note") for note in (analysis.ceilings_of, *profile.notes)]
    sections = [
        *([Section("ranks", "Ranks", _ranks(several))] if several else []),
        *step_sections.sections_of(profile, profile.step_ms.p50, profile.advice, evidence),
        *built,
        Section("file", "The trace", _file(analysis, missing, viewer)),
    ]
    torch = f"torch {analysis.torch}" if analysis.torch else None
    return step_sections.report_of_step(
        profile,
        profile.advice,
        Path(analysis.file).name,
        [_device(analysis), f"{fmt.time(profile.step_ms.p50)} per step", torch],
        sections,
        unseen=("not seen", [*profile.notes, *step_sections.unseen(missing)]),
        key="trace",
        ranks=ranks_sentence(several),
    )


def _device(analysis: TraceAnalysis) -> str:
    used = analysis.window.device
    if used is None:
        return "CPU"
    names = analysis.devices
    name = names[used] if used < len(names) else f"device {used}"
    several = analysis.window.devices
    return name + (f", the busiest of {several}" if several > 1 else "")


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
        *device.rank_blocks(compared, RANKS_METHOD),
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
