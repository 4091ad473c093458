"""Records the evidence of planted cases, or of a program, on this machine, before any rule judges it.

    export PYTHONPATH=src
    python tests/evidence/record.py [--device cuda] [--only TEXT ...] [--missing] [--busy]
    python tests/evidence/record.py --script FILE --right LIMIT,LIMIT [--function NAME] [--advice RULE] -- ARGUMENTS
    python tests/evidence/record.py --accept

Every case runs in a process of its own. One beside which other processes were busy cannot be recorded: it is tried
again, then listed and left out. Wrong answers are recorded as they are, and listed. --accept measures nothing: it
writes the answers of the rules as they are now beside the evidence, after it has shown what changes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.extend(str(Path(__file__).parents[2] / folder) for folder in ("tests/measure/planted", "benchmarks"))

import torch
from evidence_files import (
    HERE,
    PEAKS,
    Answered,
    Case,
    Recorded,
    Right,
    answered,
    changes,
    portable,
    read,
    read_answers,
    read_cases,
    slug,
    table,
    write,
    write_answers,
    write_peaks,
)
from planted_cases import Machine, Planted
from recommender_cases import CASES

import recperf
from _followed_advice import FOLLOWED, Followed
from recperf.execution.script import Program, profile_program
from recperf.machine import cpu_model, usable_cores
from recperf.measure import advice_rules
from recperf.measure import peaks as machine_peaks
from recperf.measure.ceilings import measured_beside
from recperf.measure.limits import NOT_JUDGED
from recperf.measure.peaks.other_work import DISTURBED
from recperf.measure.peaks.records import Peaks
from recperf.measure.program_records import ProgramFacts
from recperf.measure.records import Experiment, Observed

Evidence = tuple[Observed, ProgramFacts, list[Experiment]]
LONGEST = 300
"""Seconds that a case may take, with its ceilings."""
BESIDE = ", beside other work"


class NotRecorded(Exception):
    """Why a case left no evidence; another try may."""


@contextmanager
def listening() -> Iterator[list[Evidence]]:
    """Keep what is given to the rules meanwhile."""
    heard: list[Evidence] = []

    def explain(observed: Any, ceilings: Any, facts: Any, experiments: Any = None) -> Any:
        heard.append((observed, facts, experiments or []))
        return rules(observed, ceilings, facts, experiments)

    rules = advice_rules.explain
    with patch.object(advice_rules, "explain", explain):
        yield heard


def right_of(case: Planted | Followed, device: str, *, busy: bool = False) -> Right:
    """The right answer as the case declares it."""
    if isinstance(case, Followed):
        right = Right([], advice=case.advice)
    elif device == "cpu":
        right = Right(list(case.expected), case.function, case.advice, list(case.never))
    else:
        right = Right(list(case.on_gpu), case.function, case.advice_on_gpu, list(case.never))
    return Right([*right.limits, NOT_JUDGED] if right.limits else [], confident=False) if busy else right


def observe(case: Planted | Followed, device: str) -> Evidence:
    """Profile a case on this machine."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        machine = Machine.here(case.threads, device, folder)
        try:
            step, batches = case.build(machine, False) if isinstance(case, Followed) else case.built(machine)
            with listening() as heard:
                recperf.profile(step, batches, quiet=True)
        finally:
            machine.close()
    return heard[0]


def observe_program(program: Program) -> Evidence:
    with listening() as heard:
        outcome = profile_program(program)
    if outcome.missing is not None:
        raise NotRecorded(outcome.missing.what)
    return heard[0]


def recorded(name: str, evidence: Evidence, right: Right, folder: Path, *, planted: bool) -> Case:
    """The record of what was observed, beside the ceilings that it was counted with; refused where other work or its
    traces in the ceilings would be what the rules judge."""
    observed, facts, experiments = evidence
    peaks = machine_peaks.require(observed.threads, lambda text: None)
    beside = measured_beside(peaks, observed.device, observed.threads) or 0.0
    if right.confident and beside > DISTURBED:
        raise NotRecorded(f"other work took {beside:.0%} of the cores while the ceilings were measured")
    machine = observed.device if observed.device != "cpu" else f"{cpu_model()}, {usable_cores()} cores"
    observed = portable(observed, planted=planted)
    case = Recorded(name, machine, str(torch.__version__), planted, "", observed, facts, experiments)
    if right.confident and answered(case, peaks, right).answer.limit == NOT_JUDGED:
        raise NotRecorded(f"other work took {observed.other_work or 0.0:.0%} of the cores")
    case.peaks = write_peaks(folder, peaks)
    path = folder / f"{slug(name)}.json.gz"
    write(path, case)
    # The answer to the digits that were kept.
    case, peaks = read(path), read(folder / case.peaks, Peaks)
    answer = answered(case, peaks, right)
    write_answers(folder, {**read_answers(folder), path.name: answer})
    return Case(path, case, peaks, answer)


def apart(work: Callable[[], Case]) -> tuple[Case | None, str]:
    """What some work recorded in a process of its own, or why it did not: a case leaves settings, threads and compiled
    code behind."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, there))
    process.start()
    there.close()
    try:
        result = here.recv() if here.poll(LONGEST) else (None, f"it took over {LONGEST} s")
    except EOFError:
        result = None, "its process ended early"
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    return result


def _child(work: Callable[[], Case], there: Connection) -> None:
    try:
        there.send((work(), ""))
    except NotRecorded as error:
        there.send((None, str(error)))
    except BaseException as error:
        traceback.print_exc()
        there.send((None, f"{type(error).__name__}: {error}"))


def tried(name: str, work: Callable[[], Case], tries: int, wait: float) -> str:
    """Record with repeats and print the outcome; returns why nothing was recorded, or what is wrong."""
    why = ""
    for turn in range(tries):
        time.sleep(wait if turn else 0.0)
        case, why = apart(work)
        if case is not None:
            wrong, answer = "; ".join(case.answered.wrong), case.answered.answer
            mark = f" WRONG {wrong}" if wrong else ""
            print(f"{name:58} {answer.limit:14} {answer.confidence:7}{mark}", flush=True)
            return wrong
    print(f"{name:58} not recorded: {why}", flush=True)
    return why


def record_cases(options: argparse.Namespace, folder: Path) -> int:
    """Record the planted cases that were asked for."""
    on_cpu = options.device == "cpu"
    cases = [case for case in (*CASES, *FOLLOWED) if (case.on_cpu if on_cpu else case.on_gpu)]
    cases = [case for case in cases if any(text in case.name for text in options.only or [""])]
    missed = 0
    # Where others are busy already, no more is needed.
    loops = usable_cores() if options.busy and machine_peaks.quiet_now() else 0
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        for case in cases:
            name = case.name + (BESIDE if options.busy else "")
            if options.missing and (folder / f"{slug(name)}.json.gz").exists():
                continue
            right = right_of(case, options.device, busy=options.busy)

            def work(case: Any = case, name: str = name, right: Right = right) -> Case:
                return recorded(name, observe(case, options.device), right, folder, planted=True)

            missed += bool(tried(name, work, options.tries, options.wait))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{len(cases)} cases, {missed} wrong or not recorded")
    return 5 if missed else 0


def record_program(options: argparse.Namespace, folder: Path) -> int:
    program = Program(options.script, tuple(options.arguments), options.step_function)
    right = Right(options.right.split(",") if options.right else [], options.function, options.advice)
    name = options.name or options.script.stem

    def work() -> Case:
        return recorded(name, observe_program(program), right, folder, planted=False)

    return 5 if tried(name, work, options.tries, options.wait) else 0


def remove_unused(folder: Path) -> None:
    """Remove ceilings that no case uses any more."""
    used = {case.recorded.peaks for case in read_cases(folder)}
    for path in folder.glob(f"{PEAKS}*"):
        if path.name not in used:
            path.unlink()


def declared(case: Case) -> Right:
    """The right answer as the case that was planted declares it today; of others, as it was recorded."""
    name, device = case.recorded.name, "cpu" if case.recorded.observed.device == "cpu" else "cuda"
    sources = [one for one in (*CASES, *FOLLOWED) if case.recorded.planted and one.name == name.removesuffix(BESIDE)]
    return right_of(sources[0], device, busy=name.endswith(BESIDE)) if sources else case.answered.right


def accept() -> int:
    """Write the answers of today's rules, and today's declarations of right ones, beside all evidence."""
    rows, answers = [], defaultdict[Path, dict[str, Answered]](dict)
    for case in read_cases(HERE):
        now = answered(case.recorded, case.peaks, declared(case))
        rows += [(case.machine, case.recorded.name, *change) for change in changes(case.answered.answer, now.answer)]
        answers[case.path.parent][case.path.name] = now
    for folder, lines in answers.items():
        write_answers(folder, lines)
    print(table(rows, ("machine", "case", "what", "recorded", "now")) if rows else "no answer changes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder; by default tests/evidence/MACHINE")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="+", help="cases whose names contain one of these texts")
    parser.add_argument("--missing", action="store_true", help="only cases that are not recorded yet")
    parser.add_argument(
        "--busy", action="store_true", help="beside other work, of which a busy loop on every core is the least"
    )
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--wait", type=float, default=20.0, help="seconds before another try")
    parser.add_argument("--script", type=Path, help="a program that is not ours; its arguments follow --")
    parser.add_argument("--name", help="of the program; by default that of its file")
    parser.add_argument("--step-function", help="as in recperf profile --script")
    parser.add_argument("--right", help="the limits that are right, with commas between")
    parser.add_argument("--function", help="the function that must be the first place")
    parser.add_argument("--advice", help="the rule whose advice must come first")
    parser.add_argument("--accept", action="store_true", help="write the answers of today's rules")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    options.arguments = sys.argv[cut + 1 :]
    if options.accept:
        return accept()
    if options.device == "cuda" and not options.out:
        # A process that has started CUDA cannot be forked.
        parser.error("--device cuda needs --out, as tests/evidence/nvidia-h200")
    folder = options.out or HERE / slug(cpu_model())
    code = record_program(options, folder) if options.script else record_cases(options, folder)
    remove_unused(folder)
    return code


if __name__ == "__main__":
    sys.exit(main())
