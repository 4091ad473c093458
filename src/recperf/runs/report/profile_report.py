"""The report of a profile of a workload, as text and as a page."""

from __future__ import annotations

import math
from typing import Any

from ...measure.limits import ranks_sentence
from ...measure.peaks.other_work import DISTURBED
from ...measure.peaks.records import Peaks
from ...measure.profile_records import Profile, Trust
from ...measure.rows import place_rows
from . import charts
from . import device_sections as device
from . import formats as fmt
from .blocks import Block, Cell, Report, Section, Table, Text, Tile, arranged, cells, definitions
from .charts import in_order
from .step_sections import (
    advice_blocks,
    badges,
    headline,
    keyed,
    measured_sections,
    step_facts,
    unseen,
    workload_sections,
)

SHARES_NOTE = "Shares are of the sum of the parts’ medians, which may differ slightly from the step’s."


def report(profile: Profile, peaks: Peaks | None = None, machine: dict[str, Any] | None = None) -> Report:
    # Every text of the report comes from these, so one pass here keeps control characters out of all of it.
    profile, peaks, machine = (fmt.all_printable(value) for value in (profile, peaks, machine))
    torch = profile.trust.versions.get("torch") if profile.trust else None
    step = f"{fmt.time(profile.overhead.plain_ms)} a step of {profile.batch_size:,} samples"
    subtitle = filter(None, [profile.preset, profile.device, step, torch and f"torch {torch}"])
    measured, missing = step_sections_of(profile, peaks, "profile")
    return Report(
        key="profile",
        title=profile.workload or "profile",
        name="profile",
        subtitle=" · ".join(subtitle),
        verdict=headline(profile.verdict),
        measured=True,
        badges=badges(profile.verdict),
        facts=step_facts(
            profile.verdict,
            place_rows([], profile.shares, profile.observed),
            profile.advice,
            unseen(missing),
            ranks_sentence(profile.communication),
        ),
        tiles=_tiles(profile),
        sections=arranged([*measured, Section("trust", "Trust", _trust(profile, machine or {}, missing))]),
    )


def _tiles(profile: Profile) -> list[Tile]:
    step, plain = profile.step_ms, profile.overhead.plain_ms
    timed = f"with timers {fmt.time(step.p50)} (p20 – p80: {fmt.spread(step)}, {profile.steps:,} steps)"
    tiles = [Tile("step", fmt.time(plain), timed)]
    largest = max(profile.components, key=lambda part: part.share)
    tiles.append(Tile("largest part", fmt.percent(largest.share, 0), fmt.component(largest.name)))
    idle = device.idle_tiles(profile.idle) if profile.idle else []
    rate = f"{profile.batch_size / plain * 1e3:,.0f}" if plain else fmt.NONE
    tiles += idle or [Tile("batch / median step", f"{rate} samples/s", "without timers; a run states its throughput")]
    advice = [one for one in profile.advice if one.status != "rejected"] if isinstance(profile.advice, list) else []
    for kind in ("measured", "predicted"):
        gains = {one.name: gain for one in advice if (gain := getattr(one, f"{kind}_gain"))}
        if gains:
            best = max(gains, key=lambda name: gains[name])
            tiles.append(Tile(f"best change, {kind}", fmt.gain(gains[best]), best))
            break
    several = profile.communication
    if several and several.each:
        tiles.append(Tile("slowest rank", str(several.slowest), f"of {several.ranks}, by its own work"))
        tiles.append(device.exposed_tile(several.exposed_ms, several.exposed_share))
    return tiles


def step_sections_of(profile: Profile, peaks: Peaks | None, key: str) -> tuple[list[Section], dict[str, list[str]]]:
    """The sections about a step of a workload, and the titles of those that were not measured, by reason."""
    measured, missing = measured_sections(
        profile,
        (
            ("advice", "What to change", "advice", advice_blocks),
            ("budget", "Step budget", "components", lambda _: budget_blocks(profile, key)),
            ("kernels", "Kernels", "kernels", lambda one: device.kernels(one, profile.step_ms.p50)),
            ("roofline", "Roofline", "roofline", lambda points: device.roofline_blocks(points, peaks, key)),
            ("idle", "Device idle", "idle", device.idle),
            ("transfers", "Transfers", "transfers", device.transfers),
            ("embeddings", "Embeddings", "embeddings", device.embeddings),
            ("communication", "Communication", "communication", lambda several: device.communication(key, several)),
        ),
    )
    return [*workload_sections(profile, peaks, key), *measured], missing


def budget_blocks(profile: Profile, key: str) -> list[Block]:
    """The parts of a step as a bar and a table."""
    step, parts = profile.step_ms, in_order(profile.components)
    total = math.fsum(part.share for part in parts)
    rows = [
        cells(
            keyed(part.name), fmt.percent(part.share, 1), fmt.time(part.ms.p50), fmt.spread(part.ms),
            Cell(part.phase, "muted"),
        )
        for part in parts
    ]  # fmt: skip
    whole = ("whole step", fmt.percent(total, 1), fmt.time(step.p50), fmt.spread(step), "")
    rows.append(tuple(Cell(text, "strong") for text in whole))
    figure = charts.budget_figure(f"{key}-budget", parts, f"a step of {fmt.time(step.p50)}")
    table = Table(("part", "share", "p50", "p20 – p80", "phase"), rows, f"Steps with timers. {SHARES_NOTE}", left=(4,))
    if abs(total - 1) > 0.01:
        warning = Text(f"The parts sum to {total:.1%} of the step, so do not trust this budget.", "warning")
        return [warning, figure, table]
    return [figure, table]


def _trust(profile: Profile, machine: dict[str, Any], missing: dict[str, list[str]]) -> list[Block]:
    """What a reader must know to believe the other sections."""
    trust = profile.trust or Trust()
    steps = f"{profile.steps} measured after {profile.warmup} of warm-up, batch {profile.batch_size:,}"
    rows: list[tuple[str, str | Cell]] = [("steps", steps)]
    overheads = trust.profiling or {"budget": profile.overhead}
    for name, cost in overheads.items():
        text = fmt.NOT_MEASURED
        if cost:
            plain, clocked = fmt.time(cost.plain_ms), fmt.time(cost.clocked_ms)
            share = fmt.measuring_cost(cost.share, profile.step_ms)
            text = f"{share}: a step takes {plain} without, {clocked} with it"
        rows.append((f"cost of measuring ({name})", text))
    clocks = trust.clocks or {}
    units = (("sm_mhz", "SM", "MHz"), ("mem_mhz", "memory", "MHz"), ("power_w", "power", "W"))
    listed = [f"{label} {clocks[name]:,.0f} {unit}" for name, label, unit in units if clocks.get(name) is not None]
    rows.append(("clocks", ", ".join(listed) or fmt.NOT_MEASURED))
    versions = ", ".join(f"{name} {text}" for name, text in trust.versions.items() if text)
    rows.append(("versions", versions or "not recorded"))
    if trust.seed is not None:
        rows.append(("seed", str(trust.seed)))
    busy = trust.other_work.get("share")
    if busy is not None:
        doubt = "; too much for the times to be trusted" if busy > DISTURBED else ""
        rows.append(("other processes", f"{busy:.0%} of all cores{doubt}"))
    rows += [(f"switch {name}", why) for name, why in profile.switches.items()]
    if trace := profile.trace:
        rows.append(("trace", f"{trace.file}, {fmt.size(trace.bytes)}, {trace.steps} steps"))
    rows += [(f"not measured: {', '.join(titles)}", reason) for reason, titles in missing.items()]
    rows += [("not measured", reason) for reason in trust.not_measured]
    for name in ("cpu", "cores", "memory_gib", "system", "fingerprint"):
        if machine.get(name) is not None:
            rows.append((f"machine: {name.replace('_gib', ' (GiB)')}", str(machine[name])))
    gpus = ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or [] if isinstance(gpu, dict))
    return [definitions([*rows, *([("machine: GPUs", gpus)] if gpus else [])])]
