"""What the commands do, for Python: the same words, the same results, and frames in place of files.

    shop = recperf.dataset(frame, user="customer", item="product", time="when", rating="stars")
    run = recperf.run("next-item", shop, train={"epochs": 3})
    run.recommend(["anna", "ben"], k=10)

Errors are `RecperfError`. Signal handlers, torch's settings and random generators are afterwards as before.
"""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from warnings import warn

from . import errors
from .config import to_json
from .data.datasets import Dataset
from .distributed.ranks import Ranks, enter
from .errors import Interrupted, MachineError, RecperfError, RecperfWarning, UsageError
from .machine import memory_error, out_of_memory
from .stop import FLAG
from .terminal import Terminal, page_optional
from .workloads.choice import Choice, choose, resolved, with_fields
from .workloads.opened import OpenRun

if TYPE_CHECKING:
    from .planning.request import PlanReport
    from .runs.bench_report import BenchReport
    from .runs.compare_report import Compared


@contextmanager
def _as_command(*, quiet: bool = True) -> Iterator[Terminal]:
    """Run the block as a command: Ctrl-C stops it, its progress is shown, it ends in a `RecperfError`; afterwards
    handlers, settings and random generators are as before."""
    import numpy as np
    import torch

    quiet_before, environment = errors.quiet, dict(os.environ)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_gpus, seed = torch.cuda.get_rng_state_all() if on_gpu else [], torch.initial_seed()
    terminal = Terminal(as_json=False, quiet=quiet)
    try:
        with FLAG.listening():
            yield terminal
    except RecperfError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise memory_error(error) from error
        raise
    finally:
        terminal.close()
        errors.quiet = quiet_before
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if on_gpu:
            torch.cuda.set_rng_state_all(of_gpus)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def dataset(source: Any, *, name: str = "", clicks: bool = False, **options: Any) -> Dataset:
    """A dataset to train on, as `recperf data import` makes it.

    `source` is a frame of pandas or polars, a table of pyarrow, a dict of columns, the path of a file, or the name of a
    dataset that is there already. Rows are events: who took which item, and when; with `clicks` they are rows with a
    label and any features. `options` are those of the command, such as `user`, `item`, `time`, `rating` or `label`: the
    columns' names; `items` and `users` may be frames too; and what is held out: `split`, `holdout`, `boundary`,
    `split_seed`. An import that is there already, of the same rows and options, is used again, and divided anew where
    that is asked for.
    """
    from .data import datasets, importing
    from .data.config import SPLIT_FIELDS, SplitOptions
    from .data.events.options import ImportOptions
    from .data.rows.options import ClickOptions
    from .learn.leaks import after_import

    if isinstance(source, Dataset):
        return source
    is_path = isinstance(source, (str, Path))
    if is_path and not options and not clicks and not Path(source).expanduser().is_file():
        return datasets.find(str(source))
    kind, role = (ClickOptions, "clicks") if clicks else (ImportOptions, "events")
    known = {field.name for field in fields_of(kind)} - {role} | {*SPLIT_FIELDS}
    if unknown := options.keys() - known:
        near = errors.did_you_mean(min(unknown), known)
        raise UsageError(f"dataset has no option {min(unknown)!r}{near}", where={"known": ", ".join(sorted(known))})
    with _as_command() as terminal, TemporaryDirectory(prefix="recperf-") as folder:
        path, library = (Path(source).expanduser(), "") if is_path else _written(source, Path(folder, "frame.parquet"))
        for side in options.keys() & {"items", "users"}:
            table = options[side]
            is_file = table is None or isinstance(table, (str, Path))
            options[side] = table and Path(table) if is_file else _written(table, Path(folder, f"{side}.parquet"))[0]
        if not is_path and not name:
            from .files import sha256

            name = f"frame-{sha256(path)[:10]}"
        split = SplitOptions(**{field: options.pop(field) for field in SPLIT_FIELDS if field in options})
        asked: Any = kind(**{role: path, "name": name, **options})
        facts = importing.import_file(asked, split=split, progress=lambda *_: lambda *_: FLAG.poll())
        terminal.close()
    leaks = after_import("clicks" if clicks else "events", Path(facts["folder"])) if facts["imported"] else ()
    for note in (*facts.get("notes", ()), *leaks):
        warn(note, RecperfWarning, stacklevel=2)
    return replace(datasets.find(asked.name), frames=library)


def _written(frame: Any, path: Path) -> tuple[Path, str]:
    """A frame written as a Parquet file, and the library that it is of."""
    from .data.tables import pyarrow
    from .execution.scoring import columns_of, kind_of, to_table

    columns = columns_of(frame)
    pyarrow(".parquet").write_table(to_table(columns, columns), str(path))
    return path, kind_of(frame)


def run(
    workload: str | None = None,
    dataset: Dataset | str | Path | None = None,
    *,
    data: Dataset | str | Path | Mapping[str, Any] | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: str | Path | None = None,
    start_from: str | Path | None = None,
    ranks: int = 1,
    run_dir: str | Path | None = None,
    allow_change: Sequence[str] = (),
    log: Sequence[str] = (),
    peaks: bool = True,
    report: bool = True,
    quiet: bool = False,
    data_fields: Mapping[str, Any] | None = None,
    **fields: Any,
) -> OpenRun:
    """Train a workload as `recperf run` does, and return the run when it is trained.

    `dataset` is what `recperf.dataset` returns, or the name of one. `fields` are those of the config, in dicts by
    section as in config.json: `train={"epochs": 3}, data={"split": "leave-one-out"}, seed=7`; `data` may also name the
    dataset, and `data_fields` are the fields of that section then. With Ctrl-C the
    training is saved and the run returned, to be resumed: its `finished` is False. A missed target is no error:
    `run.result.quality.met` says so. `ranks` starts so many processes on this host; in a program that torchrun started,
    its processes are the ranks, and each gets the run.
    """
    from .data import datasets

    if isinstance(data, Mapping):
        data_fields = {**data, **(data_fields or {})}
    elif data is not None:
        if dataset is not None:
            raise UsageError("two datasets are given", fix="data={...} has fields of the config")
        dataset = data
    if data_fields:
        fields["data"] = dict(data_fields)
    found = dataset if isinstance(dataset, Dataset) or dataset is None else datasets.find(str(dataset))
    choice = choose(workload, preset=preset, config=config, resume=resume, start_from=start_from, data=found)
    values = resolved(choice, with_fields(choice.config, fields))
    world = Ranks.from_environment()
    if ranks != 1 or world.size > 1:
        from .distributed.launch import require_ranks

        require_ranks(world, 0 if ranks == 1 else ranks, choice.workload.name, hasattr(values, "distributed"))
    if values.start.run is not None and not choice.resume:
        from .execution.starting import continued

        if ranks > 1 or world.size > 1:
            raise UsageError("a single process starts from another run", fix="leave out ranks; a resume may have it")
        values = continued(choice.workload, values)
    if ranks > 1 and world.size == 1:
        if choice.resume and (fields or allow_change):
            raise UsageError("ranks resume a run as it is", fix="recperf run --resume RUN --ranks N --FIELD VALUE")
        options = {"--run-dir": run_dir, "--resume": resume}
        folder = _on_ranks(choice.workload.name, values, ranks, options, [*_switches(peaks, report, quiet, log)])
    else:
        place = None if run_dir is None else Path(run_dir).expanduser()
        with _as_rank(world):
            folder = _in_process(world, choice, values, place, tuple(allow_change), tuple(log), peaks, report, quiet)
    return OpenRun(folder, frames=found.frames if found is not None else "")


@contextmanager
def _as_rank(world: Ranks) -> Iterator[None]:
    """Be a rank of torchrun's, or alone, and alone afterwards."""
    if world.size == 1:
        yield
        return
    from torch import distributed

    if distributed.is_initialized():
        what = "recperf.run connects the ranks itself, but torch.distributed is initialized already"
        raise UsageError(what, fix="call torch.distributed.destroy_process_group() before")
    enter(world)
    try:
        yield
        world.leave()
    finally:
        # After an error the process group is not destroyed: that would wait for ranks that may be gone.
        world.joined = False
        enter(Ranks())


def _in_process(
    world: Ranks,
    choice: Choice,
    values: Any,
    folder: Path | None,
    allow_change: tuple[str, ...],
    log: tuple[str, ...],
    peaks: bool,
    report: bool,
    quiet: bool,
) -> Path:
    """Train here, alone or as one of several ranks; returns the folder of the run."""
    from .distributed.job import forget_run
    from .execution.run import TrainingRun

    with _as_command(quiet=quiet or not world.is_leader) as terminal:
        training = TrainingRun(
            workload=choice.workload,
            config=values,
            report=terminal,
            resume=choice.resume,
            saved=choice.config if choice.resume else None,
            folder=folder,
            allow_change=allow_change,
            loggers=log,
            peaks=peaks,
        )
        try:
            training.train()
        except Interrupted:
            # What was saved is resumed later; without a folder there is nothing.
            if training.folder is None or not (training.folder / "config.json").exists():
                raise
            return training.folder
        assert training.folder is not None
        if report and world.is_leader:
            with page_optional(terminal):
                OpenRun(training.folder).page()
        # The program may train again: only ranks that are restarted go on with the run that they were at.
        forget_run()
        # The other ranks read what rank 0 wrote.
        world.barrier()
    return training.folder


def _switches(peaks: bool, report: bool, quiet: bool, log: Sequence[str]) -> Iterator[str]:
    yield from ([] if peaks else ["--no-peaks"]) + ([] if report else ["--no-report"]) + (["--quiet"] if quiet else [])
    for name in log:
        yield from ("--log", name)


def _on_ranks(workload: str, values: Any, ranks: int, options: Mapping[str, Any], switches: list[str]) -> Path:
    """Train on several ranks of this host, which are processes of their own; returns the folder of the run."""
    from .distributed.launch import launch
    from .files import write_json
    from .runs.record import CONFIG_SCHEMA, new_folder

    folder = Path(options["--resume"] or options["--run-dir"] or new_folder(workload)).expanduser()
    failures: list[RecperfError] = []
    with _as_command() as terminal, TemporaryDirectory(prefix="recperf-") as temporary:
        if options["--resume"]:
            words = ["--resume", str(folder)]
        else:
            file = Path(temporary, "config.json")
            write_json(file, {"schema": CONFIG_SCHEMA, "workload": workload, "config": to_json(values)})
            words = ["--config", str(file), "--run-dir", str(folder)]
        code = launch([*words, *switches], ranks, failures.append, restarts=0, notice=terminal.notice)
    if code == Interrupted.exit_code and (folder / "config.json").exists():
        return folder
    if failures:
        raise failures[0]
    if code not in (0, errors.GateFailed.exit_code):
        raise MachineError(f"the ranks ended with exit code {code}", where={"run": folder})
    return folder


def bench(
    data: Dataset | str | Path,
    *,
    models: Sequence[str] | None = None,
    seeds: int = 1,
    out: str | Path | None = None,
    quiet: bool = False,
) -> BenchReport:
    """Train every model that can train on a dataset, or only some, as `recperf bench` does: each in a process of its
    own, whose memory is then the model's."""
    from msgspec.structs import asdict

    from .data import datasets
    from .runs.bench_report import BenchReport
    from .workloads.benching import require_one, train_all

    found = data if isinstance(data, Dataset) else datasets.find(str(data))
    with _as_command(quiet=quiet) as terminal:
        names = None if models is None else ",".join(models)
        folder = None if out is None else Path(out).expanduser()
        result, _ = train_all(found, models=names, seeds=seeds, folder=folder, say=terminal.say)
    require_one(result)
    return BenchReport(**asdict(result))


def compare(old: Any, new: Any) -> Compared:
    """What changed from the first to the second of two runs, reports, or paths of runs, profiles and traces."""
    from .runs.compare_report import Compared
    from .runs.sides import load

    def place(one: Any) -> Path:
        return one.folder if isinstance(one, OpenRun) else Path(one).expanduser()

    return Compared.of(load(place(old)), load(place(new)))


def plan(
    workload: str = "dlrm-v4",
    *,
    data: Dataset | str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    **request: Any,
) -> PlanReport:
    """How many devices a workload needs, how long it trains and what that costs, as `recperf plan` says it.

    `request` has the options of the command, such as `gpu="h200"`, `ranks=8` or `price="3USD"`; `fields` are those of
    the config, in dicts by section.
    """
    from .data import datasets
    from .planning.request import Planned, PlanReport, Request, plans

    found = data if isinstance(data, Dataset) or data is None else datasets.find(str(data))
    choice = choose(workload, preset=preset, config=config, data=found, planning=True)
    values = resolved(choice, with_fields(choice.config, dict(fields or {})))
    known = {field.name for field in fields_of(Request)}
    if unknown := request.keys() - known:
        near = errors.did_you_mean(min(unknown), known)
        raise UsageError(f"plan has no option {min(unknown)!r}{near}", where={"known": ", ".join(sorted(known))})
    texts = {name: _text(request[name]) for name in ("ranks", "gpu", "price") if request.get(name) is not None}
    source = ["--preset", choice.preset] if choice.preset else ["--config", str(config)]
    named = [*source, *(["--data", found.name] if found else [])]

    def command(published: str) -> str:
        return shlex.join(["run", choice.workload.name, *named, *(["--data", published] if published else [])])

    planned = Planned(
        name=choice.workload.name,
        preset=choice.preset,
        config=values,
        work=choice.workload.planned(values),
        command=command,
        has_data=found is not None,
    )
    return PlanReport(plans(Request(**{**request, **texts}), planned, lambda text: None))


def _text(value: Any) -> str:
    """A number, a name or several of them as the command line has them."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else str(value)
