"""Sections about a step, for every kind of report: verdict, shares, operators, parts, experiments, what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...measure.limit_kinds import LIMITS
from ...measure.limits import NOT_JUDGED, is_filled, memory_sentence
from ...measure.places import place_text
from ...measure.records import (
    Advice,
    Children,
    DividedOperator,
    Experiment,
    Explanation,
    PartTime,
    PlaceTime,
    StepMemory,
    Verdict,
)
from . import charts, timeline
from . import formats as fmt
from .blocks import Block, Cell, Code, Figure, Report, Section, Table, Text, arranged, cells, table_of
from .svg import family

TOP = 12
"""Rows of a long table that are always visible."""
PLACES = 3
ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"


def why_missing(measured: object) -> str | None:
    """Why a section was not measured; None if it was."""
    reason = ABSENT if measured is None else getattr(measured, "missing", None)
    return reason and fmt.printable(reason)


def measured_sections(
    listed: Iterable[tuple[str, str, Any, Callable[[Any], list[Block]]]],
) -> tuple[list[Section], dict[str, list[str]]]:
    """The sections that were measured, and the titles of the others by the reason why they were not.

    Each is listed as its key, its title, what was measured, and the function that builds it from that.
    """
    built: list[Section] = []
    missing: dict[str, list[str]] = {}
    for key, title, content, build in listed:
        reason = why_missing(content)
        if reason:
            missing.setdefault(reason, []).append(title.lower())
        else:
            built.append(Section(key, title, build(content)))
    return built, missing


def unseen(missing: dict[str, list[str]]) -> list[str]:
    """The sections that were not measured, with the reason."""
    return [f"{', '.join(titles)} ({reason})" for reason, titles in missing.items()]


def last_name(path: str | None) -> str:
    """The last name of the path of a part, such as `embedding` of `forward/embedding`."""
    return (path or "").rpartition("/")[2]


def keyed(name: str, text: str = "") -> Cell:
    """The name of a component with the colour that it has in figures."""
    hue, faint = family(name)
    return Cell(text or fmt.component(name), swatch=hue, faint=faint, width=30)


def sections_of(
    step: Explanation, whole_ms: float, advice: list[Advice] | None, evidence: list[Block]
) -> list[Section]:
    """The sections that every kind of profile has about a step of `whole_ms`, of which the shares are."""
    verdict, shares = step.verdict, [*share_blocks(step.shares, whole_ms), *place_blocks(step.places)]
    because = [Text(text, "" if index else "lead") for index, text in enumerate(verdict.because)]
    doubts = (Text(f"Doubt: {doubt}.", "note") for doubt in verdict.doubts)
    return [
        *timeline.sections(step.timeline, step.operators, step.step_ms.p50),
        *([] if advice is None else [Section("advice", "What to change", advice_blocks(advice))]),
        Section("shares", "Where the time goes", shares),
        Section("limits", "What limits the step", [*because, *doubts, *evidence]),
        *memory_sections(step.memory),
        *child_sections(step.children),
        *timeline.flame(step.stacks, step.step_ms.p50),
        Section("operators", "Operators", operator_blocks(step.operators)),
    ]


def report_of_step(
    step: Explanation,
    advice: list[Advice] | None,
    title: str,
    subtitle: Iterable[str | None],
    sections: list[Section],
    *,
    unseen: tuple[str, list[str]],
    key: str = "profile",
    ranks: str = "",
) -> Report:
    """The report of a step: its limit, the places that take most of it, what to try, and what was not seen; `ranks` is
    the sentence about several of them."""
    verdict = step.verdict
    second = ranks or next(iter(verdict.because[1:]), "")
    facts: list[tuple[str, str | Cell]] = [("limit", headline(verdict)), *([("", second)] if second else [])]
    facts += [("doubt", "; ".join(verdict.doubts))] if verdict.doubts else []
    facts += [
        (
            "" if index else "places",
            f"{place_text(row, width=60)}: {fmt.between(row.share, row.low, row.high)}, {row.limit}",
        )
        for index, row in enumerate(step.places[:PLACES])
    ]
    scarce = [one for one in step.memory if one.growth or is_filled(one)]
    facts += [("" if index else "memory", memory_sentence(one)) for index, one in enumerate(scarce)]
    facts += [*advice_facts(advice), *([(unseen[0], "; ".join(unseen[1]))] if unseen[1] else [])]
    return Report(
        key=key,
        title=title,
        name=key,
        subtitle=" · ".join(filter(None, subtitle)),
        verdict=ranks or headline(verdict),
        measured=True,
        facts=facts,
        sections=arranged(sections),
    )


def headline(verdict: Verdict) -> str:
    """The verdict in one line."""
    because = verdict.because[0] if verdict.because else ""
    confidence = "" if verdict.limit == NOT_JUDGED else f" ({verdict.confidence} confidence)"
    return f"{verdict.limit}{confidence}: {because}"


def share_blocks(shares: dict[str, float], whole: float) -> list[Block]:
    """The shares as a bar and a table; they sum to the `whole`, in ms."""
    shares = {limit: share for limit, share in shares.items() if limit in LIMITS and share >= 0.001}
    ordered = sorted(shares, key=lambda limit: -shares[limit])
    bar = [charts.BarPart(limit, shares[limit], LIMITS[limit].colour) for limit in ordered]
    figure = Figure(
        "The time of a step by limit: " + ", ".join(f"{limit} {shares[limit]:.0%}" for limit in ordered) + ".",
        "Every moment of the step belongs to exactly one limit.",
        lambda: charts.stacked([("", bar)], "share"),
    )
    columns: dict[str, Callable[[str], Any]] = {
        "limit": lambda limit: Cell(limit, swatch=LIMITS[limit].colour),
        "share": lambda limit: fmt.percent(shares[limit]),
        "time": lambda limit: fmt.time(shares[limit] * whole),
        "meaning": lambda limit: LIMITS[limit].meaning,
    }
    return [figure, table_of(ordered, columns, left=(3,))]


def place_blocks(places: list[PlaceTime]) -> list[Block]:
    """The places of the program that take most of the step."""
    rows = [
        cells(
            place_text(row, width=60), row.limit, fmt.percent(row.share), fmt.ends(row.low, row.high), fmt.time(row.ms)
        )
        for row in places
    ]
    head = ("place", "limit", "share", "95% interval", "time")
    return [Table(head, rows, left=(1,), top=PLACES)] if rows else []


def memory_sections(memory: list[StepMemory]) -> list[Section]:
    """What fills the memory of the host and of a device at the peak of a step."""
    blocks: list[Block] = []
    for one in memory:
        parts = [cells(name, fmt.size(count), fmt.percent(count / one.peak_bytes)) for name, count in one.parts.items()]
        parts.append(cells(Cell("peak", "strong"), fmt.size(one.peak_bytes), ""))
        blocks += [Text(memory_sentence(one), "lead"), Table((one.device, "bytes", "share"), parts)]
        lines = [cells(place_text(row, width=60), row.part, fmt.size(row.bytes)) for row in one.lines]
        grows = [cells(place_text(row, width=60), "grows, per step", fmt.size(row.bytes)) for row in one.growth]
        if lines or grows:
            blocks.append(Table(("place", "part", "bytes"), [*grows, *lines], left=(1,), top=PLACES))
    return [Section("memory", "Memory", blocks)] if blocks else []


def child_sections(children: list[Children]) -> list[Section]:
    """What other processes of the program did while they worked."""
    blocks: list[Block] = []
    for one in children:
        busy = f"{one.what}: {one.processes}, busy for {fmt.percent(one.busy)} of their time"
        rows = [
            cells(place_text(row, width=60), fmt.percent(row.share), fmt.ends(row.low, row.high), fmt.percent(row.off))
            for row in one.lines
        ]
        note = f"Share: of the time in which they work, by {one.samples:,} samples of their stacks."
        head = ("place", "share", "95% interval", "off the processor")
        blocks += [Text(busy + ".", "lead"), Table(head, rows, note, top=PLACES)]
    return [Section("children", "Worker processes", blocks)] if blocks else []


def operator_blocks(operators: list[DividedOperator]) -> list[Block]:
    if not operators:
        return [Text("No operator was seen.", "missing")]
    more = math.fsum(row.ms for row in operators[TOP:])
    table = table_of(
        operators,
        {
            "operator": lambda row: Cell(row.name, width=52),
            "part": lambda row: Cell(last_name(row.part), width=24),
            "place": lambda row: Cell(_place(row), width=32),
            "calls": lambda row: fmt.count(round(row.calls, 1)),
            "time": lambda row: fmt.time(row.ms),
            "limit": lambda row: _limits(row.limits),
            "FLOP": lambda row: fmt.scaled(row.flops) if row.flops else "",
            "bytes": lambda row: fmt.size(row.bytes) if row.bytes else "",
        },
        left=(1, 2, 5),
        top=TOP,
        rest=f"{max(0, len(operators) - TOP):,} more operators take {fmt.time(more)}.",
    )
    noted = [row for row in operators[:TOP] if row.note]
    return [table, *(Text(f"{row.name}: {row.note}.", "note") for row in noted[:3])]


def _place(row: DividedOperator) -> str:
    backward = (row.part or "").endswith("backward")
    return place_text(row.place, short=True).removeprefix("backward of " if backward else "")


def _limits(limits: dict[str, float]) -> str:
    whole = sum(limits.values()) or 1.0
    large = sorted((limit for limit in limits if limits[limit] / whole >= 0.1), key=lambda limit: -limits[limit])
    return ", ".join(f"{limit} {limits[limit] / whole:.0%}" if len(large) > 1 else limit for limit in large)


def part_blocks(parts: list[PartTime]) -> list[Block]:
    columns: dict[str, Callable[[PartTime], Any]] = {
        "part": lambda part: Cell(part.name, width=60),
        "time": lambda part: fmt.time(part.ms),
        "of all operators": lambda part: fmt.percent(part.share_of_operators),
    }
    caption = "Parts are modules, spans and regions named by record_function; times are those of their operators."
    return [table_of(parts, columns, caption, top=TOP, rest=f"{max(0, len(parts) - TOP):,} more parts.")]


def experiment_blocks(experiments: list[Experiment]) -> list[Block]:
    if not experiments:
        return [Text("None: the step was not run again.", "note")]
    tones = {"agrees": "good", "disagrees": "bad"}
    rows = [
        cells(row.name, row.expected, row.measured, Cell(row.outcome, tones.get(row.outcome, "muted")))
        for row in experiments
    ]
    return [Table(("experiment", "expected", "measured", ""), rows, left=(1, 2, 3))]


DESCRIBED = 3
"""Changes that a terminal describes."""
STATUS = {"rejected": "changes the losses"}
NO_GAIN = "no gain"
STATUS_TONES = {"tried": "good", "rejected": "bad", "not judged": "bad"}


def advice_blocks(advice: list[Advice]) -> list[Block]:
    """The changes with the largest gains, the others on a page only, and a table of all where some were tried."""
    if not advice:
        return [Text("No rule of recperf knows a change that would make this step faster.", "note")]
    doubts = [one.note for one in advice if one.status == "not judged" and one.note]
    blocks: list[Block] = []
    if doubts:
        which = "The change is" if len(advice) == 1 else f"{len(doubts)} of {len(advice)} changes are"
        blocks.append(Text(f"{which} not judged. {doubts[0]}.", "warning"))
    worth = [one for one in advice if one.status != NO_GAIN]
    for one in worth[:DESCRIBED]:
        said = one.measured_ms or one.status == "not tried"
        note = f" {one.note}." if one.note and not doubts and not said else ""
        blocks += [Text(f"{one.seen} {_gains(one)}.{note}"), Code("Change", one.change)]
    if others := worth[DESCRIBED:]:
        rows = [cells(Cell(one.change, "code"), one.seen, _gains(one)) for one in others]
        blocks.append(Table(("change", "seen", "gain"), rows, left=(1, 2), fold=f"{len(others)} more changes"))
    if any(one.measured_ms for one in advice):
        blocks.append(_tried(advice))
        notes = (
            f"{one.name}: {one.note}." for one in advice if one.note and one.status not in ("not judged", "not tried")
        )
        blocks += [Text(note, "note") for note in notes]
    return blocks


def advice_facts(advice: list[Advice] | None) -> list[tuple[str, str | Cell]]:
    """The change to try first: of those that were tried, the one that gained most. Those without a gain follow."""
    if advice is None:
        return []
    tried = [one for one in advice if one.status == "tried" and (one.measured_gain or 0.0) > 1.0]
    untried = (one for one in advice if not one.measured_gain and one.status != "rejected")
    one = max(tried, key=lambda one: one.measured_gain or 0.0) if tried else next(untried, None)
    dropped = [
        f"{row.change.partition(';')[0]}: {fmt.gain(row.measured_gain, row.measured_range)}"
        for row in advice
        if row.status == NO_GAIN
    ]
    facts: list[tuple[str, str | Cell]] = [(NO_GAIN, "; ".join(dropped))] if dropped else []
    if one is None:
        known = "none of the changes that were tried makes" if advice else "no rule knows a change that makes"
        return [("try", f"{known} this step faster"), *facts]
    note = one.note or ("" if one.predicted_gain else "its gain cannot be predicted")
    note = f"not tried: {note}" if one.status == "not tried" else note[:1].lower() + note[1:]
    return [("try", f"{one.change}: {'; '.join(filter(None, (_gain(one), note)))}"), *facts]


def _gain(one: Advice) -> str:
    """What was measured, or else predicted."""
    if one.measured_gain:
        return f"{fmt.gain(one.measured_gain, one.measured_range)} measured"
    return f"{fmt.gain(one.predicted_gain, one.predicted_range)} predicted" if one.predicted_gain else ""


def _gains(one: Advice) -> str:
    gain = _gain(one)
    text = f"Gain: {gain}" if gain else "Its gain cannot be predicted"
    text += f", not tried: {one.note}" if one.status == "not tried" else ""
    return text + ("; it changes the losses" if one.same_losses is False else "")


def _tried(advice: list[Advice]) -> Table:
    def losses(one: Advice) -> str:
        same, difference = one.same_losses, one.largest_difference
        return fmt.yes_or_no(same) + (f" ({difference:.1e})" if difference and not same else "")

    return table_of(
        advice,
        {
            "name": lambda one: Cell(one.name, width=28),
            "predicted gain": lambda one: fmt.gain(one.predicted_gain, one.predicted_range),
            "step": lambda one: fmt.time(one.measured_ms),
            "measured gain": lambda one: fmt.gain(one.measured_gain, one.measured_range),
            "same losses": losses,
            "status": lambda one: Cell(STATUS.get(one.status, one.status), STATUS_TONES.get(one.status, "muted")),
        },
        "Gains with their ranges; step: measured with the change.",
        left=(5,),
    )
