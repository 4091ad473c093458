"""recperf score RUN"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import UsageError
from ..terminal import Terminal, print_json
from ..units import number
from ..workloads.opened import OpenRun
from .parse import ForceOption, OutputOptions, parse

if TYPE_CHECKING:
    from ..execution.scoring import ScoreSummary

DESCRIPTION = """Score the rows of a file with the model of a run. The output has the columns of the file, the
probability of a positive label (score) and its log odds (logit). A stopped command leaves no output."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OutputOptions):
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run."""
    checkpoint: str = "last"
    """The checkpoint to use: last, best, or a name that `recperf check` lists."""
    seed: int | None = None
    """Of a run with several seeds, the seed whose model is used; default: the first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: on a GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, ForceOption):
    input: Path | None = None
    """The rows: CSV or JSON lines (either may be in gzip) or Parquet; the first line of a CSV file names its
    columns."""
    held_out: bool = False
    """Score the held-out rows of the run, with their labels, in place of a file."""
    output: Path
    """The file to write: .parquet or .csv. An older table of scores is replaced."""
    columns: tuple[str, ...] | None = None
    """Columns of the input to write beside the scores; default: all."""
    allow_unknown: bool = False
    """Also score a file of over 100 rows where more than half have an id, in some column, that the data of the model
    has never had."""


def open_run(options: ModelOptions, terminal: Terminal) -> OpenRun:
    return OpenRun(
        options.run, checkpoint=options.checkpoint, device=options.device, seed=options.seed, notice=terminal.notice
    )


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf score", description=DESCRIPTION)
    if (options.input is None) != options.held_out:
        raise UsageError(
            "give either --input or --held-out", fix="recperf score RUN --input rows.csv --output scores.csv"
        )
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    run = open_run(options, terminal)
    from ..execution.scoring import score_file
    from .data.output import Bar

    bar = Bar(terminal, "scoring", "rows")
    try:
        summary = score_file(
            run.model,
            options.input,
            options.output,
            columns=options.columns,
            allow_unknown=options.allow_unknown,
            force=options.force,
            progress=lambda done, total: bar(done, total or 0),
        )
    finally:
        terminal.close()
    terminal.say(text_of(summary))
    if options.json:
        print_json(summary)
    return 0


def text_of(summary: ScoreSummary) -> str:
    """The summary of a scoring for people."""
    from ..execution.serving import unknown_text

    lines = [
        f"{summary.rows:,} rows scored in {summary.seconds:.1f} s on {summary.device}: "
        f"{number(summary.rows_per_s)} rows/s",
        f"  model:  seed {summary.seed}, checkpoint {summary.checkpoint}",
    ]
    if unknown := unknown_text(summary.unknown):
        lines.append(f"  {unknown}")
    if summary.unread:
        lines.append(f"  {summary.unread}")
    return "\n".join([*lines, f"  scores: {summary.output}"])
