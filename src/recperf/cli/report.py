"""recperf report RUN|PROFILE|TRACE"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import UsageError
from ..measure.profile_records import Profile
from ..runs.report.reading import kind_of
from .parse import JsonOption, parse
from .terminal import print_json, print_text

DESCRIPTION = """Write the page of a run, a profile, a trace of torch.profiler, or a folder with one trace per rank: one
HTML file that works offline. Several runs give one page with a comparison on top."""
NAMES = {"run": "report.html", "profile": "profile.html", "traces": "trace.html"}
"""The page inside a folder."""


@dataclass(frozen=True, kw_only=True)
class Options(JsonOption):
    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|PROFILE|TRACE")] = ()
    """Folders of finished runs; or one profile or trace, a file (.json, .json.gz) or its folder."""
    out: Path | None = None
    """The page to write; of a run or profile also an .svg file, the picture of one step. Default: report.html,
    profile.html or trace.html in the folder, a trace's name with .html beside it, or report-compare.html here for
    several runs."""
    peaks: Path | None = None
    """Ceilings of the machine that recorded a trace: a file that recperf peaks wrote there. Default: those of this
    machine."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf report", description=DESCRIPTION)
    if not options.paths:
        raise UsageError("report needs a run, a profile or a trace", fix="recperf report runs/<name of the run>")
    out = options.out
    if out is not None and out.is_dir():
        raise UsageError("--out is a folder; name a file", where={"folder": out}, fix=f"--out {out / 'report.html'}")
    kinds = [kind_of(path) for path in options.paths]
    if len(kinds) > 1 and set(kinds) != {"run"}:
        raise UsageError("only runs are compared on one page", fix="recperf compare OLD NEW")
    if out is not None and out.suffix == ".svg" and kinds not in (["run"], ["profile"]):
        raise UsageError("an .svg is the picture of one run or profile", fix="--out page.html")
    page = write(list(options.paths), kinds[0], out, options.peaks)
    if options.json:
        print_json({"report": str(page), "of": [str(path) for path in options.paths], "bytes": page.stat().st_size})
    else:
        if kinds == ["run"]:
            from ..runs.report import run_report
            from ..runs.report.blocks import render
            from ..runs.report.reading import read

            print_text(render(run_report.report(read(options.paths[0]), "r1")))
        print_text(f"  page      {page}")
    return 0


def write(paths: list[Path], kind: str, out: Path | None, peaks: Path | None) -> Path:
    path = paths[0]
    inside = path / NAMES.get(kind, "") if path.is_dir() else path.with_name(f"{path.name.partition('.json')[0]}.html")
    if kind == "run":
        from ..runs.report import run_report

        return run_report.write(paths, out or (inside if len(paths) == 1 else Path("report-compare.html")))
    if kind == "profile":
        from .. import jsonfile
        from ..runs.report.profile_report import write_page as write_profile
        from ..runs.report.reading import read_peaks
        from ..runs.step_report import load_any

        file = path / "profile.json" if path.is_dir() else path
        profile = load_any(file)
        if not isinstance(profile, Profile):
            return profile.page(out or inside)
        machine = file.with_name("machine.json")
        facts = jsonfile.read(machine) if machine.exists() else None
        return write_profile(profile, read_peaks(file.with_name("peaks.json")), facts, out or inside)
    from ..runs.report.trace_report import write_page
    from .profile_trace import analysis_of

    return write_page(analysis_of(path, peaks), out or inside)
