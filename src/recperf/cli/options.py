"""The options of commands about a workload: which config a command line names, and the fields it overrides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import tyro

from ..errors import DataError, UsageError, closest, did_you_mean
from ..train.config import StartConfig
from ..workloads import able, find
from .parse import OutputOptions, VerboseOption, parse

if TYPE_CHECKING:
    from ..data import datasets
    from ..execution.workload import Workload

C = TypeVar("C")
"""The config class of a workload; subclasses use this same variable, so that its flags can be listed."""
T = TypeVar("T", bound="WorkloadOptions[Any]")
DEFAULT = "micro-dlrm"
SOURCES = ("--preset", "--config", "--resume", "--data")
START = "--start-from"


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
    resume: str | None = None
    """Resume the interrupted run in this folder. Config fields that affect the numbers cannot be changed."""
    allow_change: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """With --resume: a field that may be changed nevertheless, such as train.batch_size; can be repeated."""
    run_dir: Path | None = None
    """Folder of the run, new or empty; default runs/<workload>-<time>-<id>."""
    log: tyro.conf.UseAppendAction[tuple[Literal["tensorboard", "wandb"], ...]] = ()
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
    _require_data(options.values, choice.workload.name)
    return replace(options, values=choice.workload.resolve(options.values))


def _require_data(config: Any, workload: str) -> None:
    """Refuse a path that does not exist but is the name of a dataset."""
    path = getattr(getattr(config, "data", None), "path", None)
    if path is None or len(Path(path).parts) != 1 or Path(path).exists():
        return
    from ..data import datasets

    name = closest(str(path), datasets.names())
    if name is not None:
        raise DataError(
            f"data.path is {str(path)!r}, which does not exist; datasets are named with --data",
            fix=f"recperf run {workload} --data {name}",
        )


@dataclass(frozen=True)
class Choice:
    workload: Workload
    config: Any
    resume: Path | None
    rest: list[str]
    """The remaining arguments: overrides and options."""
    preset: str | None = None
    """The named preset, or the workload's default; None for a saved config."""
    sources: tuple[str, ...] = ()
    """The options that name this config: --preset or --config, and --data."""


def choose(
    arguments: list[str], *, default: str = DEFAULT, planning: bool = False, known: tuple[str, ...] = SOURCES
) -> Choice:
    """Take the workload and --preset, --config or --resume out of a command line, and read the config they name. For
    planning, a workload without any of them starts from the preset that it names for plans."""
    name, sources, rest = _split(arguments, known)
    named = tuple(word for flag, value in sources.items() if flag != "--preset" for word in (flag, value))
    data = None
    if "--data" in sources and "--resume" not in sources:
        from ..data import datasets

        data = datasets.find(sources.pop("--data"))
        # Where no workload is named: one made for the kind of data.
        default = next(iter(able(data.kind)), default)
    if START in sources and data is None:
        raise UsageError(
            f"{START} needs --data: the data to go on with", fix="recperf run --resume goes on with the same"
        )
    if len(sources) > 1:
        raise UsageError(f"{' and '.join(sources)} exclude each other")
    choice = _read(name, sources, rest, default, planning and data is None)
    named = (*(("--preset", choice.preset) if choice.preset else ()), *named)
    return replace(choice, config=choice.config if data is None else _on(data, choice), sources=named)


def _on(data: datasets.Dataset, choice: Choice) -> Any:
    """The config of a choice for a dataset."""
    workload = choice.workload
    if data.kind in workload.datasets:
        return workload.datasets[data.kind](choice.config, data)
    others = able(data.kind)
    log = data.folder / "u.data" if data.kind == "movielens" and data.folder is not None else None
    if log is not None and "events" in workload.datasets:
        fix = f"recperf data import {log} --user 1 --item 2 --rating 3 --time 4 --name NAME, then --data NAME"
    else:
        fix = f"recperf run {others[0]} --data {data.name}" if others else "recperf data list"
    can = f"these can: {', '.join(others)}" if others else "no workload can"
    raise UsageError(f"{workload.name} cannot train on {data.name}, which is a dataset of {data.kind}; {can}", fix=fix)


def _read(name: str | None, sources: dict[str, str], rest: list[str], default: str, planning: bool) -> Choice:
    """The config that a preset or a saved file names."""
    saved = next((sources[flag] for flag in ("--config", "--resume", START) if flag in sources), None)
    if saved is None:
        workload = find(name or default)
        planned = workload.plan_preset if planning else None
        preset = sources.get("--preset") or planned or next(iter(workload.presets))
        if preset not in workload.presets:
            raise UsageError(
                f"workload {workload.name!r} has no preset {preset!r}{did_you_mean(preset, workload.presets)}",
                where={"known": ", ".join(workload.presets)},
            )
        return Choice(workload, workload.presets[preset](), None, rest, preset)
    path = Path(saved)
    if "--config" not in sources and not path.is_dir():
        flag = next(iter(sources))
        raise DataError("there is no such run", where={"folder": path}, fix=f"recperf run {flag} runs/<name>")
    from ..workloads.opened import read_saved

    workload, config = read_saved(path)
    if name and name != workload.name:
        raise UsageError(f"the config is for workload {workload.name!r}, not {name!r}", where={"file": path})
    if START in sources:
        config = replace(config, start=StartConfig(run=path))
    return Choice(workload, config, path if "--resume" in sources else None, rest)


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
