"""recperf report RUN|PROFILE|TRACE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UsageError
from ..runs.evidence import Evidence, kind_of, read_peaks, read_profile
from ..runs.report.blocks import Report, render
from ..terminal import print_json, print_text
from .parse import ForceOption, JsonOption, parse

DESCRIPTION = """Write the page of a run, a profile, a bench, a trace of torch.profiler, or a folder with one trace
per rank: one HTML file that works offline. Two runs give one page with their comparison on top."""
NAMES = {"run": "report.html", "profile": "profile.html", "traces": "trace.html", "bench": "bench.html"}
"""The page inside a folder."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption, ForceOption):
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|PROFILE|TRACE")] = ()
    """Folders of finished runs; or one bench, profile or trace, a file (.json, .json.gz) or its folder."""
    out: Path | None = None
    """The page to write; of a run or profile also an .svg file, the picture of one step, and of a bench that of the
    models. Default: report.html, profile.html, bench.html or trace.html in the folder, a trace's name with .html
    beside it, or report-compare.html here for two runs."""
    peaks: Path | None = None
    """Ceilings of the machine that recorded a trace: a file that recperf peaks wrote there. Default: those of this
    machine."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf report", description=DESCRIPTION)
    if not options.paths:
        raise UsageError("report needs a run, a profile or a trace", fix="recperf report runs/<name of the run>")
    out = options.out
    kinds = [kind_of(path) for path in options.paths]
    if len(kinds) > 1 and kinds != ["run", "run"]:
        raise UsageError("only two runs are compared on one page", fix="recperf compare OLD NEW")
    if out is not None and out.suffix == ".svg" and kinds not in (["run"], ["profile"], ["bench"]):
        raise UsageError("an .svg is the picture of one run, profile or bench", fix="--out page.html")
    path, kind = options.paths[0], kinds[0]
    inside = path / NAMES.get(kind, "") if path.is_dir() else path.with_name(f"{path.name.partition('.json')[0]}.html")
    from ..runs.report import page

    out = out or (Path("report-compare.html") if len(kinds) > 1 else inside)
    page.place_of(out, force=options.force, endings=(".svg" if out.suffix == ".svg" else ".html",))
    if len(kinds) > 1:
        from ..runs.compare_report import html_of_runs

        written = page.write(html_of_runs(*map(Evidence, options.paths)), out, force=options.force)
    else:
        report = report_of(path, kind, options.peaks)
        written = page.save(report, out, force=options.force)
        if kind == "run" and not options.json:
            print_text(render(report))
    if options.json:
        paths = [str(path) for path in options.paths]
        print_json({"report": str(written), "of": paths, "bytes": written.stat().st_size})
    else:
        print_text(f"  page      {written}")
    return 0


def report_of(path: Path, kind: str, peaks: Path | None) -> Report:
    """The report of a run, a profile, a bench or a trace."""
    if kind == "run":
        from ..runs.report import run_report

        return run_report.report(Evidence(path), "r1")
    if kind == "bench":
        from ..runs import bench_report

        return bench_report.report(bench_report.read(path), bench_report.beside(path))
    from ..runs.report import trace_report
    from ..runs.report.profiles import report_of as report_of_profile

    if kind == "profile":
        file = path / "profile.json" if path.is_dir() else path
        return report_of_profile(read_profile(file), read_peaks(file.with_name("peaks.json")))
    from .profile_trace import profile_of

    profile = profile_of(path, peaks)
    viewer = trace_report.viewer(Path(profile.trace.file)) if profile.trace else None
    return report_of_profile(profile, viewer=viewer)
