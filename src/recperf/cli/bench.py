"""recperf bench --data NAME"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import tyro

from .. import jsonfile
from ..data import datasets
from ..errors import MachineError, UsageError
from ..files import write_json, writing
from ..runs.record import new_folder
from ..stop import FLAG, child, name_of
from ..workloads import able, find
from .parse import OutputOptions, parse
from .terminal import Terminal, conclude, page_optional

if TYPE_CHECKING:
    from ..runs.report.bench import BenchModel

DESCRIPTION = """Train every model that can train on a dataset, each with its default settings for that data, and put
models and baselines into one table per task and split: quality with intervals, standing against the best baseline,
training time and memory. A model that fails is named with its error; the others go on."""


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
    if options.seeds < 1:
        raise UsageError(f"--seeds is {options.seeds}; it must be at least 1", fix="--seeds 3")
    data = datasets.find(options.dataset)
    workloads = chosen(data, options.models)
    folder = options.out or new_folder(f"bench-{datasets.legal_name(Path(data.name).name)}")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("the folder of the bench is not empty", where={"folder": folder}, fix="choose another --out")
    terminal = Terminal(as_json=options.json, quiet=options.quiet)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    from ..runs.report import bench as benches

    models = []
    with FLAG.explained(f"; the runs so far are in {folder}"):
        for number, workload in enumerate(workloads, 1):
            FLAG.poll()
            terminal.say(f"model {number} of {len(workloads)}: {workload} trains; its log is {folder / workload}")
            models.append(trained(workload, options, folder / workload))
        result = benches.bench(data.name, data.kind, models)
    write_json(folder / "bench.json", result)
    report = benches.report(result, folder)
    from ..runs.report import page
    from ..runs.report.blocks import render

    terminal.say(render(report, verbose=True))
    with page_optional(terminal):
        terminal.facts(("page", str(page.save(report, folder / "bench.html"))))
    terminal.facts(("runs", str(folder)))
    error = None
    if all(model.error for model in models):
        error = MachineError("no model could be trained", where={model.workload: model.error for model in models})
    return conclude(error, jsonfile.as_json(result) if options.json else None)


def chosen(data: datasets.Dataset, models: str | None) -> list[str]:
    """The workloads to train, of those that can train on the data."""
    possible = able(data.kind)
    named = possible if models is None else [find(name.strip()).name for name in models.split(",") if name.strip()]
    unfit = [name for name in named if name not in possible]
    if unfit or not named:
        what = f"{', '.join(unfit)} cannot train on {data.name}, which is a dataset of {data.kind}"
        raise UsageError(what if unfit else "--models names no workload", where={"possible": ", ".join(possible)})
    return list(dict.fromkeys(named))


def trained(workload: str, options: Options, folder: Path) -> BenchModel:
    """Run `recperf run` in a process of its own: its memory is then the model's, and its end is no other model's."""
    from ..runs.report.bench import BenchModel

    command = [sys.executable, "-m", "recperf", "run", workload, "--data", str(options.dataset), "--json"]
    command += ["--run-dir", str(folder), "--seeds", str(options.seeds), "--no-peaks", "--no-report", "--quiet"]
    # The tables say how each model stands; a missed target would only add an error line.
    command += ["--target.beat", "none"]
    with TemporaryFile() as output:
        # A group of its own: a Ctrl-C reaches it once, from here, so that it saves; a second one ends both.
        process = Popen(child(command), stdin=DEVNULL, stdout=output, process_group=0)

        def forward() -> None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, FLAG.received or 0)

        with FLAG.calling(forward):
            if FLAG.received is not None:
                forward()
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        FLAG.poll()
        error = None
        if not (folder / "result.json").exists():
            # Its own error line, or how its process ended.
            error = (
                f"the process was ended by {name_of(-code)}" if code < 0 else f"its process ended with exit code {code}"
            )
            output.seek(0)
            with suppress(ValueError, KeyError, TypeError):
                error = str(jsonfile.decode(output.read())["error"]["what"])
    unit = 1 if sys.platform == "darwin" else 1024
    return BenchModel(workload=workload, run=str(folder), peak_bytes=usage.ru_maxrss * unit, error=error)
