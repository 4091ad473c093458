"""Sections about a step, for every kind of report: verdict, shares, operators, parts, experiments, what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...jsonfile import Struct
from ...measure.attribution import attribute, divided_ms
from ...measure.ceilings import ceilings_of_profile
from ...measure.limits import NOT_JUDGED, TEXTS
from ...measure.peaks.records import Peaks
from ...measure.places import place_text
from ...measure.profile_records import Profile
from ...measure.records import Advice, DividedOperator, Experiment, PartTime, PlaceTime, StepProfile, Verdict
from ...measure.rows import place_rows
from . import charts, timeline
from . import formats as fmt
from .blocks import Block, Cell, Code, Figure, Report, Section, Table, Text, arranged, cells, table_of
from .page import family
from .timeline import TONES

TOP = 12
"""Rows of a long table that are always visible."""
PLACES = 3
ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"


def why_missing(profile: Struct, key: str) -> str | None:
    """Why a section was not measured; None if it was."""
    part = getattr(profile, key)
    reason = ABSENT if part is None else getattr(part, "missing", None)
    return reason and fmt.printable(reason)


def measured_sections(
    profile: Struct, listed: Iterable[tuple[str, str, str, Callable[[Any], list[Block]]]]
) -> tuple[list[Section], dict[str, list[str]]]:
    """The sections that were measured, and the titles of the others by the reason why they were not.

    Each is listed as its key, its title, the field of the profile that it shows, and the function that builds it.
    """
    built: list[Section] = []
    missing: dict[str, list[str]] = {}
    for key, title, field, build in listed:
        reason = why_missing(profile, field)
        if reason:
            missing.setdefault(reason, []).append(title.lower())
        else:
            built.append(Section(key, title, build(getattr(profile, field))))
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


def report_of(profile: StepProfile) -> Report:
    """The report of a profiled step, named after its program."""
    profile = fmt.all_printable(profile)
    verdict, machine = profile.verdict, profile.machine
    subtitle = [profile.device, f"{fmt.time(profile.step_ms.p50)} per step"]
    subtitle += [f"{profile.threads} threads"] if profile.device == "cpu" else []
    subtitle += [f"torch {machine['torch']}"] if machine.get("torch") else []
    return Report(
        key="step",
        title=profile.program["script"] if profile.program else "step",
        name="profile",
        subtitle=" · ".join(subtitle),
        verdict=headline(verdict),
        measured=True,
        facts=step_facts(verdict, profile.places, profile.advice, profile.notes, label="notes"),
        sections=sections(profile),
    )


def headline(verdict: Verdict) -> str:
    """The verdict in one line."""
    because = verdict.because[0] if verdict.because else ""
    confidence = "" if verdict.limit == NOT_JUDGED else f" ({verdict.confidence} confidence)"
    return f"{verdict.limit}{confidence}: {because}"


def step_facts(
    verdict: Verdict, places: list[PlaceTime], advice: Any, unseen: list[str], also: str = "", label: str = "not seen"
) -> list[tuple[str, str | Cell]]:
    """The limit, the places that take most of the step, what to try, and what was not seen; `also` replaces the
    second sentence of the verdict."""
    second = also or next(iter(verdict.because[1:]), "")
    facts: list[tuple[str, str | Cell]] = [("limit", headline(verdict)), *([("", second)] if second else [])]
    facts += [("doubt", "; ".join(verdict.doubts))] if verdict.doubts else []
    facts += [
        ("" if index else "places", f"{place_text(row, width=60)}: {fmt.percent(row.share)}, {row.limit}")
        for index, row in enumerate(places[:PLACES])
    ]
    return [*facts, *advice_facts(advice), *([(label, "; ".join(unseen))] if unseen else [])]


def sections(profile: StepProfile) -> list[Section]:
    shares = share_blocks(profile.shares, divided_ms(profile.waits, profile.operators))
    listed = [
        *timeline.sections(profile.timeline, profile.operators, profile.step_ms.p50),
        Section("limits", "What limits the step", limit_blocks(profile.verdict)),
        Section("advice", "What to change", advice_blocks(profile.advice)),
        Section("shares", "Where the time goes", [*shares, *place_blocks(profile.places)]),
        Section("operators", "Operators", operator_blocks(profile.operators)),
    ]
    if profile.parts:
        listed.append(Section("parts", "Parts", part_blocks(profile.parts)))
    listed.append(Section("experiments", "Experiments", experiment_blocks(profile.experiments)))
    listed.append(Section("trust", "How it was measured", _trust(profile)))
    return arranged(listed)


def limit_blocks(verdict: Verdict) -> list[Block]:
    blocks: list[Block] = [
        Text(sentence, "lead" if index == 0 else "") for index, sentence in enumerate(verdict.because)
    ]
    blocks += [Text(f"Doubt: {doubt}.", "note") for doubt in verdict.doubts]
    return blocks


def workload_sections(profile: Profile, peaks: Peaks | None, key: str) -> list[Section]:
    """A step of a workload: its timeline, the limits that divide it, the evidence for them, its operators."""
    observed = profile.observed
    operators = attribute(observed, ceilings_of_profile(profile, peaks)).operators
    shares = share_blocks(profile.shares, divided_ms(observed.waits, observed.operators), key)
    steps, waited = observed.steps.plain if observed.steps else None, observed.preempted or 0.0
    without = f"; the {waited:.0%} in which other work held their core is left out" if waited >= 0.01 else ""
    evidence = [
        *limit_blocks(profile.verdict),
        Text(f"From {fmt.count(steps)} observed steps of {fmt.time(observed.step_ms.p50)}{without}.", "note"),
        *experiment_blocks(profile.experiments),
        *(Text(fmt.sentence(note), "note") for note in observed.notes if note),
    ]
    return [
        *timeline.sections(observed.timeline, operators, observed.step_ms.p50),
        Section("shares", "Where the time goes", [*shares, *place_blocks(place_rows([], profile.shares, observed))]),
        Section("evidence", "What limits the step", evidence),
        Section("operators", "Operators", operator_blocks(operators)),
    ]


def share_blocks(shares: dict[str, float], whole: float, key: str = "step") -> list[Block]:
    """The shares as a bar and a table; they sum to the `whole`, in ms."""
    shares = {limit: share for limit, share in shares.items() if limit in TEXTS and share >= 0.001}
    ordered = sorted(shares, key=lambda limit: -shares[limit])
    bar = [charts.BarPart(limit, shares[limit], TONES[limit]) for limit in ordered]
    figure = Figure(
        f"{key}-limits",
        "The time of a step by limit: " + ", ".join(f"{limit} {shares[limit]:.0%}" for limit in ordered) + ".",
        "Every moment of the step belongs to exactly one limit.",
        lambda: charts.stacked([("", bar)], "share"),
    )
    columns: dict[str, Callable[[str], Any]] = {
        "limit": lambda limit: Cell(limit, swatch=TONES[limit]),
        "share": lambda limit: fmt.percent(shares[limit]),
        "time": lambda limit: fmt.time(shares[limit] * whole),
        "meaning": lambda limit: TEXTS[limit]["meaning"],
    }
    return [figure, table_of(ordered, columns, left=(3,))]


def place_blocks(places: list[PlaceTime]) -> list[Block]:
    """The places of the program that take most of the step."""
    rows = [cells(place_text(row, width=60), row.limit, fmt.percent(row.share), fmt.time(row.ms)) for row in places]
    return [Table(("place", "limit", "share", "time"), rows, left=(1,), top=PLACES)] if rows else []


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


def _trust(profile: StepProfile) -> list[Block]:
    steps, step, others = profile.steps, profile.step_ms, profile.other_work
    sampling = profile.sampling.share if profile.sampling else 0.0
    known = "is not known" if others is None else f"used {fmt.percent(others)} of the cores"
    lines = [
        f"{steps.seen:,} steps seen: {steps.plain:,} timed (p20 – p80 {fmt.spread(step)}), {steps.traced:,} traced, "
        f"{steps.counted:,} counted.",
        f"Timing costs {fmt.measuring_cost(profile.overhead.share, step)}, sampling the stack {fmt.percent(sampling)} "
        "of the time.",
        f"Other work on this machine {known}.",
    ]
    return [*map(Text, lines), *(Text(fmt.sentence(note), "note") for note in profile.notes)]


DESCRIBED = 3
"""Changes that a terminal describes."""
STATUS = {"rejected": "changes the losses"}
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
    for one in advice[:DESCRIBED]:
        note = f" {one.note}." if one.note and not doubts and not one.measured_ms else ""
        blocks += [Text(f"{one.seen} {_gains(one)}.{note}"), Code("Change", one.change)]
    if others := advice[DESCRIBED:]:
        rows = [cells(Cell(one.change, "code"), one.seen, _gains(one)) for one in others]
        blocks.append(Table(("change", "seen", "gain"), rows, left=(1, 2), fold=f"{len(others)} more changes"))
    if any(one.measured_ms for one in advice):
        blocks.append(_tried(advice))
        notes = (f"{one.name}: {one.note}." for one in advice if one.note and one.status != "not judged")
        blocks += [Text(note, "note") for note in notes]
    return blocks


def advice_facts(advice: Any) -> list[tuple[str, str | Cell]]:
    """The change to try first: of those that were tried, the one that gained most."""
    if not isinstance(advice, list):
        return []
    tried = [one for one in advice if one.status == "tried" and (one.measured_gain or 0.0) > 1.0]
    untried = (one for one in advice if not one.measured_gain and one.status != "rejected")
    one = max(tried, key=lambda one: one.measured_gain or 0.0) if tried else next(untried, None)
    if one is None:
        known = "none of the changes that were tried makes" if advice else "no rule knows a change that makes"
        return [("try", f"{known} this step faster")]
    gains = [f"{fmt.gain(one.predicted_gain, one.predicted_range)} predicted"] if one.predicted_gain else []
    gains += [f"{fmt.gain(one.measured_gain)} measured"] if one.measured_gain else []
    note = one.note or ("" if gains else "its gain cannot be predicted")
    said = [", ".join(gains), note[:1].lower() + note[1:]]
    return [("try", f"{one.change}: {'; '.join(filter(None, said))}")]


def _gains(one: Advice) -> str:
    predicted = f"Predicted gain: {fmt.gain(one.predicted_gain, one.predicted_range)}"
    text = predicted if one.predicted_gain else "Its gain cannot be predicted"
    if one.measured_gain:
        text += f"; measured: {fmt.gain(one.measured_gain)}"
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
