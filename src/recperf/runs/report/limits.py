"""The sections that explain what limits a run: roofline, cache curve, hot and cold ids, what limits a step."""

from __future__ import annotations

from typing import Any

from ...measure.sections import roofline
from . import curves, plots, ranks
from . import formats as fmt
from .blocks import Cell, Figure, Missing, Section, Table, Text, cells
from .formats import NOT_MEASURED, component, count, size
from .plots import from_profile
from .profile_device import roofline_blocks
from .reading import Reading
from .step_sections import keyed, why_missing, workload_blocks

PAIR_COMMAND = "recperf pair micro-dlrm-dram"


def against_ceilings(run: Reading, key: str) -> Section:
    title = "Against this machine’s ceilings"
    if run.profile is None:
        return Section("roofline", title, [Missing("The rate of each component", run.profile_command)])
    if run.peaks is None:
        return Section("roofline", title, [Missing("The ceilings of this machine", run.peaks_command)])
    profile = {**run.profile, "roofline": roofline(run.profile, run.peaks)}
    reason = why_missing(profile, "roofline")
    return Section(
        "roofline",
        title,
        [Text(f"Not measured: {reason}.", "missing")] if reason else roofline_blocks(profile, run.peaks, key),
    )


def knee(run: Reading, key: str) -> Section:
    title = "Where tables outgrow the caches"
    device = run.profile["device"] if run.profile else run.result.performance.device
    if device != "cpu":
        return Section(
            "knee", title, [Text("Not measured: this curve is measured on CPUs, the run used a GPU.", "note")]
        )
    if run.peaks is None:
        return Section("knee", title, [Missing("Lookup time against table size", run.peaks_command)])
    measured, ids = run.peaks["knee"], (run.profile or {}).get("ids") or {}
    marks = [
        curves.Mark(label, ids[name], tone)
        for label, name, tone in (("touched", "touched_bytes", "bad"), ("tables", "working_set_bytes", "embedding"))
        if ids.get(name)
    ]
    points, caches = measured["points"], run.machine.get("caches") or {}
    label = "Time of one lookup against table size: " + " to ".join(
        f"{point['p50']:.3g} ns at {size(point['table_bytes'])}" for point in (points[0], points[-1])
    )
    label += "".join(f"; {mark.label} {size(mark.bytes)}" for mark in marks)
    caption = (
        f"Random rows of {measured['row_bytes']} B, {measured['threads']} thread, {measured['method']}; the line is "
        f"the median of at least {min(p['n'] for p in points)} measurements, the band p20 – p80. "
        "Dotted: the size of each cache."
    )
    if any(mark.bytes > points[-1]["table_bytes"] for mark in marks):
        caption += " Dots beyond the largest measured table have the height of its last point."
    draw = lambda: curves.knee(points, caches, marks)  # noqa: E731
    table = _ids_table(ids) if ids else Missing("The working set of this workload", run.profile_command)
    return Section("knee", title, [Figure(f"{key}-knee", label, caption, draw), table])


def _ids_table(ids: dict[str, Any]) -> Table:
    fields = (
        ("lookups per step", "lookups", count),
        ("distinct rows per step", "unique_rows", count),
        ("bytes per row", "row_bytes", count),
        ("tables allocated", "working_set_bytes", size),
        ("touched while profiled", "touched_bytes", size),
    )
    rows = [cells(label, NOT_MEASURED if ids.get(name) is None else show(ids[name])) for label, name, show in fields]
    return Table(("this workload", ""), rows, "Counted from the ids of the profiled steps.")


def pair(run: Reading, key: str) -> Section:
    title = "Hot against cold ids: only the ids change"
    if run.pair is None:
        return Section("pair", title, [Missing("Hot against cold ids", PAIR_COMMAND)])
    arms = {name: run.pair[name] for name in ("hot", "cold")}
    times = {name: {p.name: p.ms["p50"] for p in from_profile(arm) if p.ms} for name, arm in arms.items()}
    bars = [
        (
            f"{name}, {count(run.pair['ids'][name])} rows",
            [plots.BarPart(part.name, part.phase, part.ms["p50"]) for part in from_profile(arm) if part.ms],
        )
        for name, arm in arms.items()
    ]
    ratios = ", ".join(f"{component(name)} {ratio:.2g} x" for name, ratio in run.pair["ratio"].items() if ratio)
    figure = Figure(
        f"{key}-pair",
        f"Milliseconds of a step with hot and with cold ids. Cold over hot: {ratios}",
        "Median time of each part, for the same model and shapes with new ids every step. Backward passes have the "
        "lighter shade.",
        lambda: plots.stacked(bars, "ms"),
    )
    rows = [(Cell("whole step", "strong"), *_pair_cells(*(arm["step_ms"]["p50"] for arm in arms.values())))]
    for name in dict.fromkeys([*times["hot"], *times["cold"]]):
        rows.append((keyed(name), *_pair_cells(times["hot"].get(name), times["cold"].get(name))))
    steps = arms["hot"].get("steps")
    note = "Medians" + (f" over {count(steps)} steps" if isinstance(steps, int) else "") + ", warm-up excluded."
    table = Table(("part", "cold / hot", "hot", "cold"), rows, note)
    return Section("pair", title, [Text(run.pair["verdict"], "lead"), figure, table])


def _pair_cells(hot: float | None, cold: float | None) -> tuple[Cell, ...]:
    return cells(fmt.gain(cold / hot if hot and cold else None), fmt.time(hot), fmt.time(cold))


def between_ranks(run: Reading, key: str) -> list[Section]:
    """The slowest rank and what the others wait for; no section for a run of one rank."""
    blocks = ranks.blocks(key, run.profile) if run.profile else []
    return [Section("ranks", "Between the ranks", blocks)] if blocks else []


def evidence(run: Reading) -> Section:
    if not run.profile or not run.profile["verdict"]:
        return Section("evidence", "The evidence", [Missing("What limits this run", run.profile_command)])
    return Section("evidence", "What limits a step", workload_blocks(run.profile, run.peaks))
