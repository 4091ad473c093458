"""The options of commands about a workload: which config a command line names, and the fields it overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from ..errors import UsageError
from ..workloads import choice as choices
from ..workloads import find
from ..workloads.choice import DEFAULT, resolved
from .parse import OutputOptions, VerboseOption, parse

C = TypeVar("C")
"""The config class of a workload; subclasses use this same variable, so that its flags can be listed."""
T = TypeVar("T", bound="WorkloadOptions[Any]")
SOURCES = ("--preset", "--config", "--resume", "--data")
START, FROM_DIAGNOSIS = "--start-from", "--from-diagnosis"


@dataclass(frozen=True, kw_only=True)
class SourceOptions(OutputOptions):
    preset: str | None = None
    """Start from this preset; `recperf show` lists them."""
    config: str | None = None
    """Start from a saved config: a file or a run's folder."""
    dataset: Annotated[str | None, tyro.conf.arg(name="data")] = None
    """Train on this dataset: a name that `recperf data list` shows, or the path of one. Sets the fields of the workload
    that depend on the data; other options override them."""


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(SourceOptions, Generic[C]):
    values: Annotated[C, tyro.conf.arg(name="", help="")]


@dataclass(frozen=True, kw_only=True)
class RunOptions(WorkloadOptions[C], VerboseOption):
    start_from: str | None = None
    """With --data: a new run with the weights and the config of the run in this folder, on other data. Rows are
    matched by your own ids; --start.checkpoint and --start.forget-days say more."""
    from_diagnosis: str | None = None
    """Train the best config that `recperf diagnose` found: the folder of the run or of its diagnosis."""
    resume: str | None = None
    """Resume the interrupted run in this folder. Config fields that affect the numbers cannot be changed."""
    allow_change: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """With --resume: a field that may be changed nevertheless, such as train.batch_size; can be repeated."""
    run_dir: Path | None = None
    """Folder of the run, new or empty; default runs/<workload>-<time>-<id>."""
    log: tyro.conf.UseAppendAction[tuple[Literal["tensorboard", "wandb", "mlflow"], ...]] = ()
    """Send loss, gradient norm, learning rate, throughput, metrics and budget there too; can be
    repeated. A resumed run continues."""
    peaks: bool = True
    """Compare the run with the ceilings of this machine; if none are saved, measure them first (some seconds)."""
    report: bool = True
    """Write the page of the run, report.html, at the end."""
    ranks: int = 0
    """Number of ranks to start on this host; each holds a part of the tables and of every batch. Leave it
    out under torchrun."""
    restarts: int = 0
    """How many times to restart all ranks after one fails; they resume from the last checkpoint. With torchrun use
    its --max-restarts."""
    dry_run: bool = False
    """Check config, data and folder without training."""


def read_options(
    kind: type[T], choice: Choice, arguments: list[str] | None = None, *, verb: str, description: str
) -> T:
    """Parse the options of a command for the chosen workload, by default from the rest of its command line."""
    options: T = parse(
        kind[choice.workload.config],  # type: ignore[index]
        choice.rest if arguments is None else arguments,
        prog=f"recperf {verb} {choice.workload.name}",
        description=description,
        default=kind(values=choice.config),
    )
    return replace(options, values=resolved(choice, options.values))


@dataclass(frozen=True, kw_only=True)
class Choice(choices.Choice):
    """What a command line names, and its other arguments."""

    rest: list[str]
    """The remaining arguments: overrides and options."""
    sources: tuple[str, ...] = ()
    """The options that name this config: --preset or --config, and --data."""


def choose(
    arguments: list[str], *, default: str = DEFAULT, planning: bool = False, known: tuple[str, ...] = SOURCES
) -> Choice:
    """Take the workload and --preset, --config or --resume out of a command line, and read the config they name."""
    name, sources, rest = _split(arguments, known)
    data = None
    if "--data" in sources:
        from ..data import datasets

        data = datasets.find(sources["--data"])
    values = {flag.lstrip("-").replace("-", "_"): value for flag, value in sources.items() if flag != "--data"}
    choice = choices.choose(name, **values, data=data, default=default, planning=planning)
    named = [word for flag, value in sources.items() if flag != "--preset" for word in (flag, value)]
    preset = ["--preset", choice.preset] if choice.preset else []
    return Choice(**vars(choice), rest=rest, sources=(*preset, *named))


def _split(arguments: list[str], known: tuple[str, ...]) -> tuple[str | None, dict[str, str], list[str]]:
    """The workload's name, which comes first, the options that name a config, and the rest."""
    remaining, rest = list(arguments), []
    name = remaining.pop(0) if remaining and not remaining[0].startswith("-") else None
    sources: dict[str, str] = {}
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        if flag not in known:
            rest.append(argument)
            continue
        if not equals and not remaining:
            raise UsageError(f"{flag} needs a value", fix="recperf run --help")
        sources[flag] = value if equals else remaining.pop(0)
    return name and find(name).name, sources, rest
