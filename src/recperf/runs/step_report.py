"""The report of a profiled step as users of the Python API see it: printed, saved, as a page, and in a notebook."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataError
from ..files import write_json
from ..jsonfile import read, sealed
from ..measure.limits import UNDECIDED
from ..measure.profile import KIND, StepProfile
from ..outputs import output_file


class Report(StepProfile):
    """What limits a step, and the figures behind it."""

    @classmethod
    def of(cls, profile: StepProfile) -> Report:
        return cls(**{name: getattr(profile, name) for name in profile.__struct_fields__})

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the report as JSON; `recperf.load` reads it. With `force` it replaces a file that is not a report."""
        place = output_file(
            path, endings=(".json",), ours=_is_report, what="a report", option="another name", force=force
        )
        write_json(place, sealed(self))
        return Path(path)

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the report as one HTML file that works offline; a name in .svg asks for the picture of a step. With
        `force` it replaces a file that is not a page of recperf."""
        from .report import page
        from .report.profiles import report_of

        return page.save(report_of(self), Path(path), force=force)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """What matters most in a few lines; with `verbose` everything that the page shows."""
        from .report.blocks import render
        from .report.profiles import report_of

        return render(report_of(self), verbose=verbose)

    def __repr__(self) -> str:
        verdict = self.verdict
        if verdict.limit in UNDECIDED:
            return f"<recperf report: {verdict.limit}>"
        return f"<recperf report: {verdict.limit}, {verdict.share:.0%} of the step, {verdict.confidence} confidence>"

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from .report import page
        from .report.profiles import report_of

        return page.framed(report_of(self))

    def html(self) -> str:
        from .report import page
        from .report.profiles import report_of

        return page.html_of(report_of(self))


def _is_report(path: Path) -> bool:
    try:
        content = read(path)
    except DataError:
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def load(path: str | Path) -> Report:
    """Read a profile.json: one that `report.save` or `recperf profile` wrote, or that of a run."""
    from .evidence import read_profile

    return Report.of(read_profile(Path(path)))
