"""Experiments with a program: it runs again beside itself, changed in one way, and its time must follow the shares."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ..measure.attribution import attribute
from ..measure.experiments import of_program
from ..measure.limits import decide
from ..measure.records import Experiment
from .script import ScriptOutcome
from .trial_search import FEW, NotTried, Search

PART = 0.25
"""Of the time for trials, that of all experiments together."""


def confirm(trials: Search, outcome: ScriptOutcome, say: Callable[[str], None]) -> None:
    """Run the experiments that the program allows, and decide with what they show."""
    report, evidence = outcome.report, outcome.evidence
    if report is None or evidence is None or not evidence.observed.operators:
        return
    observed, ceilings, peaks = evidence
    attribution = attribute(observed, ceilings)
    facts = report.program_facts
    rows: list[Experiment] = []
    latest = 0.0
    for variant in of_program(attribution, observed, peaks=peaks, has_loader=bool(facts and facts.loader)):
        left = trials.began + PART * trials.seconds - monotonic()
        if left <= latest:
            rows.append(variant.not_run("the time for experiments was over"))
            continue
        say(f"trying {variant.name}")
        began = monotonic()
        try:
            shown = trials.compare(variant.settings, monotonic() + left, FEW)
        except NotTried as error:
            rows.append(variant.not_run(str(error)))
        else:
            rows.append(variant.shown(shown.gain, shown.range))
        latest = monotonic() - began
    report.experiments = rows
    if any(row.outcome != "not run" for row in rows):
        report.verdict = decide(attribution, observed, ceilings, rows, report.places)
