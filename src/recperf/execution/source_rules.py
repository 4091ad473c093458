"""Advice from the source of a program: rules look for what costs time in its syntax tree, at lines that a profile has
measured. Where a rule can, it writes the change as an edit, which trials measure. Torch-free.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..measure.advice import NOTICEABLE
from ..measure.places import place_text
from ..measure.records import Advice, Place, PlaceTime
from ..runs.step_report import Report
from . import source_inputs, source_kernels, source_memory, source_models, source_steps
from .program_source import Edit, Source, keeps, with_edits
from .source_findings import Finding

EDITS = "edits "
"""Begins the names of settings that are edits."""
RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    *source_steps.RULES, *source_inputs.RULES, *source_models.RULES, *source_kernels.RULES,
    source_memory.sampled_softmax,
)  # fmt: skip
REMAINS = 0.02
"""Of a step, what is left of the time at a line at the end of a prediction's range. A convention."""
ANYWHERE = ("detect_anomaly", "float64", "double", "pad_sequence", "from_numpy")
"""Words of what acts at other lines than its own, so that a file without a noticeable line may hold it."""
SMALL = 0.01
"""A line that takes a smaller share of the step stays as it is."""
SAME = {"reports": "reports", "float64": "precision", "unique": "duplicates"}
"""Advice from the source that takes the place of another about the same."""


def advise_on_sources(report: Report, files: Iterable[Path]) -> None:
    """Add what the rules say about the files of a program to the advice of its report, the most time first."""
    findings: defaultdict[str, list[tuple[Finding, float, Place]]] = defaultdict(list)
    own = {one.name: one for one in report.advice or []}
    for file in files:
        with suppress(OSError, UnicodeDecodeError, SyntaxError, RecursionError):
            with file.open(encoding="utf-8", newline="") as stream:
                text = stream.read()
            if not (any(_is_in(one, str(file)) for one in report.places) or any(word in text for word in ANYWHERE)):
                continue
            source = Source(text, str(file))
            times = _Times(report, source)
            for rule in RULES:
                for finding in rule(source):
                    share = times.of(finding)
                    if finding.agrees and finding.name not in own:
                        continue
                    if share >= SMALL or finding.always:
                        findings[finding.name].append((finding, share, times.place(finding)))
    advice = [one for rows in findings.values() if (one := _advice(rows, report)) is not None]
    for one in advice:
        if findings[one.name][0][0].agrees:
            for field in ("seen", "predicted_gain", "predicted_range"):
                setattr(one, field, getattr(own[one.name], field))
    replaced = {SAME.get(one.name) for one in advice if one.settings} | {one.name for one in advice}
    others = [one for one in report.advice or [] if one.name not in replaced]
    # What its lines do not tell may be worth the most.
    unknown = {name for name, rows in findings.items() if any(row[0].always and row[0].edits for row in rows)}
    report.advice = sorted([*advice, *others], key=lambda one: (one.name not in unknown, -(one.predicted_gain or 0.0)))


def _advice(rows: list[tuple[Finding, float, Place]], report: Report) -> Advice | None:
    """One advice of all that a rule found; edits of parts of the same text exclude each other."""
    possible = [row for row in rows if row[0].edits] or rows
    possible.sort(key=lambda row: -row[1])
    finding, _, place = possible[0]
    # What is not known by its lines is known for the whole program.
    whole = max if finding.works else sum
    share = min(1.0 - REMAINS, whole([share for _, share, _ in possible]))
    if share < NOTICEABLE and not finding.always:
        return None
    where = f", first at {place_text(place)}" if len(possible) > 1 else f": {place_text(place)}"
    cost = f", {share:.0%} of the step" if share >= SMALL else ""
    loader = report.program_facts.loader if report.program_facts else None
    if finding.name == "padding" and loader is not None and loader.padding is not None:
        cost += f"; {loader.padding:.0%} of the ids of a batch are zeros"
    advice = Advice(finding.name, f"{finding.seen}{where}{cost}.", finding.change, changes=finding.changes)
    if share >= SMALL and not finding.always:
        advice.predicted_gain = 1 / (1 - share * (1 - REMAINS))
        advice.predicted_range = [1 / (1 - share / 2), 1 / (1 - share * (1 - REMAINS))]
    if finding.edits:
        if (settings := settings_of(found for found, _, _ in possible)) is None:
            return None
        advice.settings = settings
    else:
        advice.note = finding.reason
    return advice


def settings_of(findings: Iterable[Finding]) -> dict[str, Any] | None:
    """The edits of findings of one name; None where they do not keep what a program returns and trains."""
    found = list(findings)
    settings = {f"{EDITS}{found[0].name}": [list(edit) for one in found for edit in one.edits]}
    return settings if all(keeps(*pair) for pair in _texts(settings).values()) else None


def _is_in(place: PlaceTime, file: str) -> bool:
    return file == place.file or file.endswith(f"/{place.file.removeprefix('…/')}")


class _Times:
    """What the lines of a file take of a step."""

    def __init__(self, report: Report, source: Source) -> None:
        self.source = source
        self.places = [one for one in report.places if _is_in(one, source.path)]
        self.operators = report.operators
        self.whole = sum(report.waits.values()) + sum(row.ms for row in report.operators)

    def of(self, finding: Finding) -> float:
        """The share of the step of the lines of a finding, with those of the functions that they call."""
        lines: set[int] = set()
        for node in finding.nodes:
            lines |= self._lines(node)
        share = sum(one.share for one in self.places if one.line in lines)
        if finding.works == "float64":
            share = sum(row.ms for row in self.operators if row.precision == "float64") / (self.whole or 1.0)
        return share

    def _lines(self, node: Any, depth: int = 2) -> set[int]:
        lines = set(range(node.lineno, node.end_lineno + 1))
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            function = self.source.function(call.func)
            if depth and function is not None and function not in self.source.above(node):
                lines |= self._lines(function, depth - 1)
        return lines

    def place(self, finding: Finding) -> Place:
        """The line of a finding that takes most."""
        lines: set[int] = set()
        for node in finding.nodes:
            lines |= self._lines(node)
        here = [one for one in self.places if one.line in lines]
        if here:
            most = max(here, key=lambda one: one.share)
            return Place(most.function, most.file, most.line)
        line = min((edit.begin for edit in finding.edits), default=0)
        number = min(lines, default=self.source.text.count("\n", 0, line) + 1)
        return Place("<module>", Path(self.source.path).name, number)


def sources_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of files with the edits that settings hold."""
    return {path: after for path, (_, after) in _texts(settings).items()}


def _texts(settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The files that edits change, before and after."""
    edits: defaultdict[str, list[Edit]] = defaultdict(list)
    for name, value in settings.items():
        if name.startswith(EDITS):
            for one in value:
                edits[one[0]].append(Edit(*one))
    result = {}
    for path, changes in edits.items():
        with open(path, encoding="utf-8", newline="") as stream:
            text = stream.read()
        result[path] = text, with_edits(text, changes)
    return result
