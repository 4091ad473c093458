"""Troubles recperf at random for some minutes: signals, damaged files, full disks, ranks that die.

    python tests/reliability/chaos.py --minutes 30 --jobs 2
    python tests/reliability/chaos.py --only "damage: data" --seed 1234 --tries 1     repeats one try

Every try has a number, from which all that it does follows. A run that was troubled must end, after a resume, bit for
bit like one that was not, or refuse with one clear line and a documented exit code. Prints a table; exits with 1 if a
try failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos_runs import Lab

LAB: Lab
"""What all tries share; forks inherit it."""
HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src"
OUTCOMES = ("completed", "refused", "resumed")
HEADS = ("completed", "refused with one line", "stopped and resumed")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.5, help="how long to go on")
    parser.add_argument("--tries", type=int, default=0, help="stop after this many tries; 0: only the time counts")
    parser.add_argument("--seed", type=int, default=1, help="number of the first try")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tries at the same time")
    parser.add_argument("--only", action="append", help="a kind of trouble, such as signals; can be repeated")
    parser.add_argument("--table", type=Path, help="write the table to this file, too")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    root = Path(tempfile.mkdtemp(prefix="recperf-chaos-"))
    # Before torch is imported: it starts threads, which a fork would lose.
    os.environ.update(OMP_NUM_THREADS="1", RECPERF_HOME=str(root / "home"))
    others = [HERE.parent / "distributed", HERE.parent / "browser", HERE.parent / "measure" / "trace", SOURCES]
    sys.path[:0] = [str(HERE), *map(str, others)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    seen = gpus()
    # A process that has used CUDA cannot be forked.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import chaos_artefacts  # noqa: F401
    import chaos_files
    import chaos_ranks
    import killable_warm  # noqa: F401
    from chaos_kinds import KINDS
    from chaos_runs import WORKLOADS, Lab

    names = [name for name in WORKLOADS if name not in chaos_ranks.NAMES]
    chaos_ranks.add_kinds(seen)
    for name in options.only or ():
        if name not in KINDS:
            sys.exit(f"--only {name}: one of {', '.join(KINDS)}")
    for name in [name for name in KINDS if options.only and name not in options.only]:
        del KINDS[name]
    try:
        lab = Lab(root, seen)
        print("preparing: an uninterrupted run of every workload", flush=True)
        lab.prepare(names if any(not name.startswith("ranks") for name in KINDS) else ())
        chaos_files.prepare(lab)
        chaos_ranks.prepare(lab)
        subjects = {**lab.subjects, **lab.ranks}
        lab.plant()
        print("a run takes: " + ", ".join(f"{name} {one.seconds:.2f} s" for name, one in subjects.items()), flush=True)
        results = trouble(lab, options)
        for planted in lab.planted:
            planted.require_untouched()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = report(results, options)
    print(text)
    if options.table:
        options.table.write_text(text + "\n")
    return 1 if any("sort" in result for result in results) else 0


def gpus() -> str | None:
    """The GPUs that torch sees, asked in a process of its own."""
    if not Path("/dev/nvidiactl").exists():
        return None
    ask = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    there = subprocess.run(ask, check=False).returncode == 0
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") if there else None


def schedule() -> list[str]:
    """Kinds in the order in which they come round, the frequent ones spread out."""
    from chaos_kinds import KINDS

    places = [((place + 0.5) / weight, name) for name, (_, weight) in KINDS.items() for place in range(weight)]
    return [name for _, name in sorted(places)]


def trouble(lab: Lab, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let workers, which are forks of this process, try until the time is over."""
    end, results = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    kinds, running = schedule(), set[Future[dict[str, Any]]]()
    global LAB
    LAB = lab
    # A signal ends the workers with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own = {"initializer": signal.signal, "initargs": (signal.SIGTERM, signal.SIG_DFL)}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork"), **own) as pool:
        for seed in islice(count(options.seed), options.tries or None):
            if time.monotonic() > end:
                break
            running.add(pool.submit(attempt, kinds[seed % len(kinds)], seed))
            while len(running) >= options.jobs:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                results += [show(one.result()) for one in ended]
        results += [show(one.result()) for one in as_completed(running)]
    return results


def show(result: dict[str, Any]) -> dict[str, Any]:
    done = "; ".join(result["done"])
    print(f"{result['seed']} {result['kind']}: {result.get('sort') or result['outcome']} ({done})", flush=True)
    if "sort" in result:
        print(f"FAILED, repeat with: {repeat(result)}\n{result['text']}", flush=True)
    return result


def repeat(result: dict[str, Any]) -> str:
    return f'python tests/reliability/chaos.py --only "{result["kind"]}" --seed {result["seed"]} --tries 1'


def attempt(kind: str, seed: int) -> dict[str, Any]:
    """Make one try of a kind, in a worker."""
    from chaos_kinds import KINDS
    from chaos_process import TAIL, Failure
    from chaos_runs import Try

    folder = LAB.root / f"try-{seed}"
    folder.mkdir()
    os.chdir(folder)
    one, began = Try(LAB, kind, seed, folder), time.monotonic()
    result: dict[str, Any] = {"kind": kind, "seed": seed, "done": one.done}
    try:
        result["outcome"] = KINDS[kind][0](one)
        one.require_clean()
    except Failure as failure:
        result |= {"sort": failure.sort, "text": f"{failure.text}\n{one.printed[-TAIL:]}"}
    except Exception:
        # The comparison itself could not be made, as when a state that should be there is not.
        result |= {"sort": "mismatch", "text": traceback.format_exc()}
    os.chdir(LAB.root)
    shutil.rmtree(folder, ignore_errors=True)
    return {**result, "seconds": time.monotonic() - began}


def report(results: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table of all tries in Markdown, and how to repeat each failure."""
    from chaos_kinds import KINDS
    from chaos_process import Failure

    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for name in (result["kind"], "all"):
            counts[name][result.get("sort") or result["outcome"]] += 1
    # Sorts of failures that did not happen are named below the table.
    happened = [sort for sort in Failure.SORTS if counts["all"][sort]]
    rows = [["trouble", "tries", *HEADS, *happened]]
    rows += [
        [name, str(counts[name].total()), *(str(counts[name][column]) for column in (*OUTCOMES, *happened))]
        for name in (*KINDS, "all")
        if name in counts
    ]
    rows.insert(1, ["---"] * len(rows[0]))
    minutes = sum(result["seconds"] for result in results) / options.jobs / 60
    failed = [f"* {repeat(result)}: {result['sort']}" for result in results if "sort" in result]
    facts = (
        f"{machine()}; commit {commit()}; tries from {options.seed}; {minutes:.0f} minutes, {options.jobs} at a time"
    )
    table = ["| " + " | ".join(row) + " |" for row in rows]
    none = [sort for sort in Failure.SORTS if sort not in happened]
    return "\n".join([facts, "", *table, "", f"Not once: {', '.join(none) or 'nothing'}.", *failed])


def machine() -> str:
    from recperf.machine import machine_facts

    facts = machine_facts()
    return f"{facts['cpu']}, {facts['cores']} cores, Python {platform.python_version()}, torch {facts['torch']}"


def commit() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        call = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
