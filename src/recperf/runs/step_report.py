"""The report of a profiled step as users of the Python API see it: printed, saved, as a page, and in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from ..errors import DataError
from ..files import write_json
from ..jsonfile import Count, Number, check, read
from ..measure.advice import Advice
from ..measure.limits import UNDECIDED, Verdict

KIND = "step profile"
SCHEMA = 1


class _Content(TypedDict):
    verdict: Verdict
    shares: dict[str, Number]
    parts: list[dict[str, Any]]
    operators: list[dict[str, Any]]
    experiments: list[dict[str, Any]]
    advice: list[Advice]
    step_ms: dict[str, Number]
    steps: dict[str, Any]
    device: str
    threads: Count


class Report:
    """What limits a step, and the figures behind it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    @property
    def verdict(self) -> Verdict:
        return Verdict(**self._content["verdict"])

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step by limit; they sum to 1."""
        return dict(self._content["shares"])

    @property
    def parts(self) -> list[dict[str, Any]]:
        """Modules, spans and named regions with their time, largest first."""
        return list(self._content["parts"])

    @property
    def operators(self) -> list[dict[str, Any]]:
        """Operators with their time, counted work and limits, largest first."""
        return list(self._content["operators"])

    @property
    def places(self) -> list[dict[str, Any]]:
        """Functions, files and lines of the program by limit, with their share of the step, largest first."""
        return list(self._content.get("places") or ())

    @property
    def experiments(self) -> list[dict[str, Any]]:
        """What each experiment should have done and did."""
        return list(self._content["experiments"])

    @property
    def advice(self) -> list[Advice]:
        """Changes that would make the step faster, the largest predicted gain first."""
        return [Advice(**one) for one in self._content["advice"]]

    @property
    def step_ms(self) -> dict[str, float]:
        """p20, p50 and p80 of the plain steps."""
        return dict(self._content["step_ms"])

    def as_json(self) -> dict[str, Any]:
        """Everything that `save` writes."""
        return self._content

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON; `recperf.load` reads it."""
        write_json(Path(path), self._content)
        return Path(path)

    def page(self, path: str | Path) -> Path:
        """Write the report as one HTML file that works offline."""
        from .report import page

        return page.write(self._html(), Path(path))

    def __str__(self) -> str:
        from .report.step_sections import report_of
        from .report.text import render

        return render(report_of(self._content))

    def __repr__(self) -> str:
        verdict = self.verdict
        if verdict.limit in UNDECIDED:
            return f"<recperf report: {verdict.limit}>"
        return f"<recperf report: {verdict.limit}, {verdict.share:.0%} of the step, {verdict.confidence} confidence>"

    def _repr_html_(self) -> str:
        """The page inside a frame, so that its styles do not reach the notebook."""
        from html import escape

        return f'<iframe srcdoc="{escape(self._html(), quote=True)}" style="width:100%;height:640px;border:0"></iframe>'

    def _html(self) -> str:
        from .report import page
        from .report.step_sections import report_of

        return page.render("what limits the step", [report_of(self._content)])


def load(path: str | Path) -> Report:
    """Read a report that `save` wrote."""
    content = read(Path(path), named=True)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise DataError(
            "this file is not a profile of a step",
            where={"file": path},
            fix="recperf.load reads what report.save wrote",
        )
    if content.get("schema") != SCHEMA:
        raise DataError(
            f"the profile has schema {content.get('schema')!r}; this recperf reads {SCHEMA}", where={"file": path}
        )
    check(content, _Content, Path(path), what="is damaged")
    return Report(content)
