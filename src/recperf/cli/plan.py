"""recperf plan WORKLOAD --gpu DEVICE"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from ..planning.report import side_by_side
from ..planning.request import Planned, Request, html_of, plans, reports_of
from ..planning.summary import Plan
from ..runs.report import page
from ..runs.report.blocks import render_sections
from ..terminal import Terminal, print_json
from .options import C, Choice, SourceOptions, WorkloadOptions, choose, read_options
from .parse import ForceOption, VerboseOption

DESCRIPTION = """Say how many devices a workload needs, how long it trains to its quality target and what that costs.
The fields of the config can be set too."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SourceOptions, Request, VerboseOption, ForceOption):
    out: Path | None = None
    """Write the plan with all its tables as a page to this file (.html)."""


@dataclass(frozen=True, kw_only=True)
class Options(WorkloadOptions[C], PlanOptions):
    """With the fields of the workload's config."""


def command(arguments: list[str]) -> int:
    choice = choose(arguments, default="dlrm-v4", planning=True)
    options = read_options(Options, choice, verb="plan", description=DESCRIPTION)
    if options.out is not None:
        page.place_of(options.out, force=options.force)
    terminal = Terminal(as_json=options.json, quiet=options.quiet, verbose=options.verbose)
    planned = Planned(
        name=choice.workload.name,
        preset=choice.preset,
        config=options.values,
        work=choice.workload.planned(options.values),
        command=partial(_run_command, choice),
        has_data="--data" in choice.sources,
    )
    request = Request(**{field.name: getattr(options, field.name) for field in fields(Request)})
    made = plans(request, planned, terminal.notice)
    _show(made, options, terminal)
    if options.json:
        print_json(to_builtins(made[0] if len(made) == 1 else {"plans": made}))
    return 0


def _show(plans: list[Plan], options: Options[Any], terminal: Terminal) -> None:
    """Print the plan, or several side by side, and write its page."""
    reports = reports_of(plans)
    if len(plans) > 1:
        terminal.say("\n".join(render_sections(side_by_side(plans))).strip())
    for one in reports if options.verbose or len(plans) == 1 else []:
        terminal.show(one)
    if options.out is not None:
        terminal.facts(("page", str(page.write(html_of(plans), options.out, force=options.force))))


def _run_command(choice: Choice, data: str) -> str:
    """The `recperf run` of this config on a dataset, without what the plan decides."""
    fields: list[str] = []
    rest = list(choice.rest)
    while rest:
        flag = rest.pop(0)
        values = list(takewhile(lambda value: not value.startswith("--"), rest))
        del rest[: len(values)]
        # Options of the plan itself have no dot.
        if "." in flag.partition("=")[0] and not flag.startswith("--train.batch-size"):
            fields += [flag, *values]
    return shlex.join(["run", choice.workload.name, *choice.sources, *(("--data", data) if data else ()), *fields])
