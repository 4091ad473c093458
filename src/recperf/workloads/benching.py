"""Trains every model that can train on a dataset, for `recperf bench` and `recperf.bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile

from .. import jsonfile
from ..data import datasets
from ..errors import MachineError, UsageError
from ..files import write_json, writing
from ..runs.bench import Bench, BenchModel, bench
from ..runs.record import BENCH, new_folder
from ..stop import FLAG, child, name_of
from . import able, find

USERS = 5000
"""Users whose held-out item is ranked, at most."""


def train_all(
    data: datasets.Dataset, *, models: str | None, seeds: int, folder: Path | None, say: Callable[[str], None]
) -> tuple[Bench, Path]:
    """Train the models, by default all that can, and write bench.json; returns its content and its folder."""
    if seeds < 1:
        raise UsageError(f"--seeds is {seeds}; it must be at least 1", fix="--seeds 3")
    workloads = chosen(data, models)
    folder = folder or new_folder(f"bench-{datasets.legal_name(Path(data.name).name)}")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("the folder of the bench is not empty", where={"folder": folder}, fix="choose another --out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    trained_models = []
    with FLAG.explained(f"; the runs so far are in {folder}"):
        for number, workload in enumerate(workloads, 1):
            FLAG.poll()
            say(f"model {number} of {len(workloads)}: {workload} trains; its log is {folder / workload}")
            trained_models.append(trained(workload, data, seeds, folder / workload))
        result = bench(data.name, data.kind, trained_models)
    write_json(folder / BENCH, result)
    return result, folder


def require_one(result: Bench) -> None:
    """An error if no model could be trained."""
    if all(model.error for model in result.models):
        where: dict[str, object] = {model.workload: model.error for model in result.models}
        raise MachineError("no model could be trained", where=where)


def chosen(data: datasets.Dataset, models: str | None) -> list[str]:
    """The workloads to train, of those that can train on the data."""
    possible = able(data.kind)
    named = possible if models is None else [find(name.strip()).name for name in models.split(",") if name.strip()]
    unfit = [name for name in named if name not in possible]
    if unfit or not named:
        what = f"{', '.join(unfit)} cannot train on {data.name}, which is a dataset of {data.kind}"
        raise UsageError(what if unfit else "--models names no workload", where={"possible": ", ".join(possible)})
    return list(dict.fromkeys(named))


def trained(workload: str, data: datasets.Dataset, seeds: int, folder: Path) -> BenchModel:
    """Run `recperf run` in a process of its own: its memory is then the model's, and its end is no other model's."""
    command = [sys.executable, "-m", "recperf", "run", workload, "--data", data.name, "--json"]
    command += ["--run-dir", str(folder), "--seeds", str(seeds), "--no-peaks", "--quiet"]
    # All models rank the same users' items among all items.
    command += ["--ranking.users", str(USERS), "--ranking.negatives", "0"]
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
