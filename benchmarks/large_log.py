"""A large log from a made-up file to recommendations: the time and the peak memory of each phase.

    python benchmarks/large_log.py make import train evaluate recommend export baselines --log ml-20m

Logs: ml-20m (138,000 users, 27,000 items, 20,000,000 events) and shop (5,000,000 users, 1,000,000 items, 100,000,000
events); --scale 0.02 makes a smaller one. Each phase is a process of its own, and what it leaves is in the folder, so
that phases may be called one by one where a command has a time limit; a machine without DuckDB, tyro and msgspec gets
their wheels unpacked on PYTHONPATH. For calls of 9 minutes on a GPU machine: `make import` in one; `train --epochs 5
--minutes 7` (training stops at the limit: seconds of all epochs are then extrapolated from the steps that were taken),
for the shop `train --epochs 0.2 --minutes 7`; `evaluate recommend export`; then `baselines --minutes 7`, or a few of
them by name as in `baselines --only popularity item_to_item`. A phase that was stopped leaves what earlier ones wrote.
`run` is the user's command from training to its page in one process, for logs where that fits into a call.

Rows: seconds; of host memory the largest resident set, mapped files of the log included; of the device the largest
memory that torch held. `train` has a model with the settings for the data, and with its counts, whose counting comes
before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from _large_log import LOGS, LogSize, write
from _rows import record, row, show

SEED = 1
SETTLED = 20
"""Steps before which a training is not timed: kernels are compiled, a graph is captured, memory is taken."""
USERS = 10_000
GOAL_BYTES = 16 << 30
Measured = dict[str, tuple[float, str]]


class Log:
    """The files of a log, and what later phases build of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder.expanduser() / f"{options.log}-{options.scale:g}"
        self.file, self.weights = self.folder / f"log.{options.format}", self.folder / "weights.pt"
        self.name = f"large-{options.log}"
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ["RECPERF_HOME"] = str(self.folder / "home")

    @property
    def size(self) -> LogSize:
        return LOGS[self.options.log].scaled(self.options.scale) if self.options.scale != 1 else LOGS[self.options.log]

    def config(self) -> Any:
        """What a user gets who names the dataset alone."""
        from recperf.data.datasets import find
        from recperf.workloads.choice import choose, resolved, with_fields

        choice = choose("next-item", data=find(self.name))
        fields = {"data": {"split": "leave-one-out"}, "train": {"device": self.options.device}}
        return resolved(choice, with_fields(choice.config, fields))

    def opened(self, *, counted: bool) -> Any:
        """The sequences and a trial; not `counted`: its counts are those of the weights that training left."""
        import torch

        from recperf.models.next_item.counting import Counting
        from recperf.workloads.next_item.build import PreparedSequences

        config = self.config()
        prepared = PreparedSequences(config if counted else replace(config, model=replace(config.model, counts="off")))
        torch.manual_seed(SEED)
        trial = prepared.trial(SEED)
        if not counted:
            if config.model.counts == "on":
                timed, kept = prepared.sequences.data.times_E is not None, prepared.sequences.seen == "kept"
                trial.model.counting = Counting(recent=timed, own=kept, started=False).to(prepared.settings.device)
            trial.model.load_state_dict(torch.load(self.weights, weights_only=True))
            trial.model.train(False)
        return prepared, trial

    def served(self) -> Any:
        import torch

        from recperf.execution.serving import TrainedModel
        from recperf.workloads.next_item.serve import ServedSequences

        served = ServedSequences(self.config())
        served.model.load_state_dict(torch.load(self.weights, weights_only=True))
        served.model.eval()
        return TrainedModel(served=served, checkpoint=self.folder / "step-0", seed=SEED, run=self.folder)


def make(log: Log) -> Measured:
    began = perf_counter()
    facts = write(log.file, log.size, SEED)
    return {"time": (perf_counter() - began, "s"), **{name: (float(value), name) for name, value in facts.items()}}


def imported(log: Log) -> Measured:
    from recperf.cli import main

    began, words = perf_counter(), ["--name", log.name, "--negatives", "0", "--quiet", "--replace"]
    if code := main(["data", "import", str(log.file), *words]):
        sys.exit(code)
    return {"time": (perf_counter() - began, "s")}


def train(log: Log) -> Measured:
    """Train for some epochs or a part of one, or until the time is over."""
    import torch

    from recperf.train.device import applied
    from recperf.train.loop import take_step

    began = perf_counter()
    prepared, trial = log.opened(counted=True)
    recipe, ready = trial.recipe, perf_counter() - began
    steps = max(SETTLED + 1, round(log.options.epochs * len(recipe.order)))
    sync: Callable[[], None] = prepared.settings.sync or (lambda: None)
    # Losses are read at times, so that the host does not wait for each step.
    done, settled, since, loss = 0, 0, began, torch.tensor(float("nan"))
    with applied(prepared.settings):
        recipe.model.train()
        while done < steps and perf_counter() - began < 60 * log.options.minutes:
            epoch, place = divmod(done, len(recipe.order))
            if not place:
                batches = recipe.order.batches(epoch)
            loss, _ = take_step(recipe, batches, done)
            done += 1
            if done % 100 == 0 or done == steps:
                print(f"step {done:,} of {steps:,}  loss {float(loss):.4f}", file=sys.stderr, flush=True)
            if done == SETTLED:
                sync()
                settled, since = done, perf_counter()
        sync()
    # Of few steps the first ones count too.
    seconds = (perf_counter() - (since if done > settled else began + ready)) / max(1, done - settled or done)
    # An evaluation has the averages of the weights.
    trial.model.train(False)
    torch.save(trial.model.state_dict(), log.weights)
    epoch_s = seconds * len(recipe.order)
    print(f"{prepared.config.model}\n{prepared.config.train}\n{prepared.settings.reasons}", file=sys.stderr)
    return {
        "time": (perf_counter() - began, "s"), "until_first_step": (ready, "s"), "step": (1e3 * seconds, "ms"),
        "epoch": (epoch_s, "s"), "all_epochs": (epoch_s * log.options.of_epochs, "s"), "steps": (done, "steps"),
        "epochs_done": (done / len(recipe.order), "epochs"), "loss": (float(loss), "nats"),
    }  # fmt: skip


def evaluate(log: Log) -> Measured:
    """Fit the weights of the counts on validation targets, and rank those of the test."""
    from recperf.train.device import applied

    began = perf_counter()
    prepared, trial = log.opened(counted=False)
    ready = perf_counter()
    with applied(prepared.settings):
        trial.fit_counting()
        fitted = perf_counter()
        ranked = trial.ranked(prepared.sequences.test)
    known = {f"validation_{name}": (value, "NDCG@10") for name, value in trial.known.items()}
    metrics = {name: (value, "metric") for name, value in ranked.metrics().items()}
    return {
        "time": (perf_counter() - began, "s"), "until_ready": (ready - began, "s"), "fit": (fitted - ready, "s"),
        "rank": (perf_counter() - fitted, "s"), "targets": (float(len(ranked.ranks_N)), "users"), **metrics, **known,
    }  # fmt: skip


def baselines(log: Log) -> Measured:
    """Each rule: its settings chosen, and the test targets ranked."""
    from recperf.workloads.next_item.build import PreparedSequences

    began = perf_counter()
    rules = PreparedSequences(log.config()).ranking().baseline_ranks
    ready = perf_counter()
    measured: Measured = {"until_ready": (ready - began, "s")}
    for name in log.options.only or rules:
        if perf_counter() - began > 60 * log.options.minutes:
            break
        since = perf_counter()
        try:
            ranks_N = rules[name]
        except LookupError as error:
            print(f"{name}: not fitted: {error}", file=sys.stderr)
            continue
        gain = np.where(ranks_N.numpy() <= 10, 1 / np.log2(1 + ranks_N.numpy()), 0.0).mean()
        measured |= {name: (perf_counter() - since, "s"), f"{name}_ndcg_10": (float(gain), "metric")}
        print(f"{name}: {measured[name][0]:.1f} s, NDCG@10 {gain:.4f}", file=sys.stderr, flush=True)
    return {**measured, "time": (perf_counter() - began, "s")}


def recommend(log: Log) -> Measured:
    """Lists of 10 items for some users, and then for one user at a time, in a process that has answered before."""
    import torch

    from recperf.execution.recommending import Requests, recommend
    from recperf.train.device import applied

    began = perf_counter()
    model = log.served()
    ready = perf_counter()
    users = model.served.users.values
    chosen = np.random.default_rng(SEED).permutation(len(users))[:USERS]

    def lists(part: Any) -> int:
        requests = Requests.of_users(model, users.take(np.sort(part)))
        return sum(len(table) for table in recommend(model, requests, 10))

    with applied(model.served.settings), torch.no_grad():
        lists(chosen[:1])
        first = perf_counter()
        listed, many, singles = lists(chosen), perf_counter(), []
        for user in chosen[:50]:
            since = perf_counter()
            lists(np.array([user]))
            singles.append(1e3 * (perf_counter() - since))
    return {
        "time": (perf_counter() - began, "s"), "until_ready": (ready - began, "s"), "first_user": (first - ready, "s"),
        "users": (float(len(chosen)), "users"), "lists": (many - first, "s"), "rows": (float(listed), "rows"),
        "one_user": (float(np.median(singles)), "ms"),
    }  # fmt: skip


def export(log: Log) -> Measured:
    from shutil import rmtree

    from recperf.execution.exporting import export

    began = perf_counter()
    model, folder = log.served(), log.folder / "exported"
    ready = perf_counter()
    rmtree(folder, ignore_errors=True)
    export(model, folder, {"workload": "next-item", "run": "run"}, lambda text: print(text, file=sys.stderr))
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    done = perf_counter()
    return {"time": (done - began, "s"), "until_ready": (ready - began, "s"), "bytes": (float(size), "bytes")}


def run(log: Log) -> Measured:
    from shutil import rmtree

    from recperf.cli import main

    began, folder = perf_counter(), log.folder / "run"
    rmtree(folder, ignore_errors=True)
    words = ["--train.epochs", f"{max(1, round(log.options.epochs))}", "--train.device", log.options.device, "--quiet"]
    code = main(["run", "next-item", "--data", log.name, "--run-dir", str(folder), "--no-peaks", *words])
    if code not in (0, 5):
        sys.exit(code)
    waited = json.loads((folder / "progress.json").read_text()).get("waited", {})
    return {"time": (perf_counter() - began, "s"), **{name: (value, "s") for name, value in waited.items()}}


PHASES: dict[str, Callable[[Log], Measured]] = {
    "make": make, "import": imported, "train": train, "evaluate": evaluate, "recommend": recommend, "export": export,
    "baselines": baselines, "run": run,
}  # fmt: skip


def with_peaks(measured: Measured) -> Measured:
    """With the largest memory of this process, or of one that it started."""
    peak = max(resource.getrusage(who).ru_maxrss << 10 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    measured = {**measured, "peak_host": (float(peak), "bytes")}
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        measured["peak_device"] = (float(torch.cuda.max_memory_reserved()), "bytes")
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="+", choices=PHASES)
    parser.add_argument("--log", choices=LOGS, default="ml-20m")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/large-log"), help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the users and events")
    parser.add_argument("--format", choices=["parquet", "csv"], default="parquet")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--epochs", type=float, default=5.0, help="to train, or a part of one; default: %(default)s")
    parser.add_argument("--of-epochs", type=float, default=5.0, help="for which the time is extrapolated")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no step or baseline begins")
    parser.add_argument("--only", nargs="+", help="baselines")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        options.child.write_text(json.dumps(with_peaks(PHASES[options.phases[0]](Log(options)))))
        return 0
    log, rows = Log(options), []
    conditions = {"device": options.device, "scale": options.scale, "format": options.format, **vars(log.size)}
    words = [word for word in sys.argv[1:] if word not in PHASES or word == options.log]
    for phase in options.phases:
        answer = log.folder / f"{phase}.json"
        answer.unlink(missing_ok=True)
        code = subprocess.run([sys.executable, __file__, phase, *words, "--child", str(answer)]).returncode
        if not answer.exists():
            print(f"{phase} ended with code {code}")
            return 1
        for metric, (value, unit) in json.loads(answer.read_text()).items():
            rows.append(row("large_log", f"{options.log} {phase}", metric, unit, [value], conditions))
            print(show(rows[-1]), flush=True)
    if not options.no_record:
        print(f"rows appended to {record(rows).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
