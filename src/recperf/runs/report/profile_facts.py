"""What several sections need from a profile: verdict, missing sections, cells of components, parts of a step."""

from __future__ import annotations

from typing import Any

from ...measure.attribution import attribute, divided_ms
from ...measure.ceilings import ceilings_of_profile
from . import formats as fmt
from . import step_sections
from .blocks import Block, Cell, Text
from .formats import component
from .svg import family

Profile = dict[str, Any]

TOP = 12
"""Rows of a long table that are always visible."""
SHARES_NOTE = "Shares are of the sum of the parts’ medians, which may differ slightly from the step’s."
ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"


def why_missing(profile: Profile, key: str) -> str | None:
    """Why a section was not measured; None if it was."""
    part = profile.get(key)
    if part is None:
        return ABSENT
    if isinstance(part, dict) and "missing" in part:
        return fmt.printable(part["missing"])
    return None


def limit_blocks(profile: Profile, peaks: Profile | None) -> list[Block]:
    """What limits the step of a workload: sentences, shares, experiments, and operators with their limits."""
    observed = profile["observed"]
    operators = attribute(observed, ceilings_of_profile(profile, peaks))["operators"]
    return [
        *step_sections.limit_blocks(profile),
        Text(_observed_steps(observed), "note"),
        *step_sections.share_blocks(profile, divided_ms(observed)),
        *step_sections.experiment_blocks(profile["experiments"]),
        *step_sections.operator_blocks(operators),
        *(Text(f"{note[0].upper()}{note[1:]}.", "note") for note in observed.get("notes") or () if note),
    ]


def _observed_steps(observed: Profile) -> str:
    steps, waited = (observed.get("steps") or {}).get("plain"), observed.get("preempted") or 0.0
    without = f"; the {waited:.0%} in which other work held their core is left out" if waited >= 0.01 else ""
    return f"From {fmt.count(steps)} observed steps of {fmt.time(observed['step_ms']['p50'])}{without}."


def keyed(name: str, text: str = "") -> Cell:
    """The name of a component with the colour that it has in figures."""
    hue, faint = family(name)
    return Cell(text or component(name), swatch=hue, faint=faint, width=30)
