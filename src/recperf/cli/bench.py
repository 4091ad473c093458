"""recperf bench --data NAME"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .. import jsonfile
from ..data import datasets
from ..errors import MachineError, UsageError
from ..terminal import Terminal, conclude, page_optional
from .parse import OutputOptions, parse

DESCRIPTION = """Train every model that can train on a dataset, each with its default settings for that data, and say
which to take: for each task one table of models and baselines, scored on the same users or rows, with their
differences, training time, memory, and the time of one recommendation. A model that fails is named with its error; the
others go on."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    dataset: Annotated[str | None, tyro.conf.arg(name="data")] = None
    """The dataset: a name that `recperf data list` shows, or the path of one."""
    models: str | None = None
    """Train only these workloads, separated by commas. Default: all that can train on the data."""
    seeds: int = 1
    """Train every model with this many seeds."""
    out: Path | None = None
    """Folder, new or empty, for bench.json, bench.html and the run of each model; default
    runs/bench-<data>-<time>-<id>."""


def command(arguments: list[str]) -> int:
    options = parse(Options, arguments, prog="recperf bench", description=DESCRIPTION)
    if options.dataset is None:
        raise UsageError("bench needs a dataset", fix="recperf bench --data NAME; recperf data list shows the names")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    from ..workloads.benching import require_one, train_all

    data = datasets.find(options.dataset)
    result, folder = train_all(data, models=options.models, seeds=options.seeds, folder=options.out, say=terminal.say)
    from ..runs.bench_report import beside, report, text
    from ..runs.report import page

    terminal.say(text(result))
    with page_optional(terminal):
        terminal.facts(("page", str(page.save(report(result, beside(folder)), folder / "bench.html"))))
    terminal.facts(("runs", str(folder)))
    error = None
    try:
        require_one(result)
    except MachineError as none:
        error = none
    return conclude(error, jsonfile.as_json(result) if options.json else None)
