"""Builds the report of any profile: of a step, a program, a trace or a workload."""

from __future__ import annotations

from dataclasses import replace

from ...measure.attribution import divided_ms
from ...measure.learning_records import LearningReport
from ...measure.limits import ranks_sentence
from ...measure.peaks.records import Peaks
from ...measure.profile import StepProfile
from . import formats as fmt
from . import profile_report, trace_report
from .blocks import Block, Cell, Report, Section, Text, Viewer
from .step_sections import experiment_blocks, part_blocks, report_of_step, sections_of


def report_of(profile: StepProfile, peaks: Peaks | None = None, *, viewer: Viewer | None = None) -> Report:
    """The report of a profile; `peaks` are the ceilings behind that of a workload, `viewer` is the trace for
    Perfetto."""
    # Names in a program, a trace or a file are anybody's text: one pass keeps control characters out of all of it.
    profile, peaks = fmt.all_printable(profile), fmt.all_printable(peaks)
    if profile.workload is not None:
        return profile_report.report(profile, profile.workload, peaks)
    if profile.trace is not None:
        return trace_report.report(profile, profile.trace, viewer=viewer)
    return _of_step(profile)


def _of_step(profile: StepProfile) -> Report:
    """The report of a profiled step, named after its program."""
    torch, whole = profile.machine.get("torch"), divided_ms(profile.waits, profile.operators)
    sections = [
        *sections_of(profile, whole, profile.advice, experiment_blocks(profile.experiments)),
        *([Section("parts", "Parts", part_blocks(profile.parts))] if profile.parts else []),
        *([Section("learning", "Learning", _learning(profile.learning))] if profile.learning else []),
        Section("trust", "Trust", _trust(profile)),
    ]
    if profile.ranks is not None:
        several = [*profile_report.rank_blocks(profile.ranks, trace_report.RANKS_METHOD)]
        several += profile_report.collective_blocks(profile.ranks.collectives, profile_report.PER_STEP)
        sections.insert(0, Section("ranks", "Ranks", several))
    threads = f"{profile.threads} threads" if profile.device == "cpu" else None
    subtitle = [profile.device, f"{fmt.time(profile.step_ms.p50)} per step", threads, torch and f"torch {torch}"]
    title = profile.program["script"] if profile.program else "step"
    report = report_of_step(
        profile, profile.advice, title, subtitle, sections,
        unseen=("notes", profile.notes), ranks=ranks_sentence(profile.ranks),
    )  # fmt: skip
    if profile.learning is None:
        return report
    lines = [str(finding) for finding in profile.learning.findings] or ["nothing found"]
    learning: list[tuple[str, str | Cell]] = [("" if at else "learning", line) for at, line in enumerate(lines)]
    # Below the limit with its sentences, above what to change about it.
    above = next((at for at, (name, _) in enumerate(report.facts) if at and name), len(report.facts))
    return replace(report, facts=[*report.facts[:above], *learning, *report.facts[above:]])


def _learning(learning: LearningReport) -> list[Block]:
    seen = f"{learning.looks:,} of {learning.steps:,} steps looked at, in {learning.cost:.1%} of the time"
    lines = [str(finding) for finding in learning.findings] or ["Nothing found."]
    return [*map(Text, lines), *(Text(fmt.sentence(note), "note") for note in [seen, *learning.notes])]


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
