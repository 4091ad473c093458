"""Public programs: every gain that `recperf profile --script` printed, followed in fresh processes and timed by another
clock. Used by followed_programs.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from threading import Lock, Thread
from typing import Any

from _rows import row
from recperf.execution.program_edits import LINES, edited
from recperf.execution.source_rules import EDITS, sources_of
from recperf.execution.trial_search import interval

CLOCK = Path(__file__).parent / "_step_clock.py"
ROUNDS, FEWEST_ROUNDS = 5, 3
TRIALS, PROFILE = 0.35, 0.65
"""Parts of a program's time limit: its trials, and all of its profile."""
CORES = 2
"""Each program is pinned to so many cores."""
MOST_STEPS = 400


class Failed(Exception):
    """Why a program has no rows; the others go on."""


@dataclass(frozen=True)
class Options:
    folder: Path
    """Holds the programs and programs.json."""
    rows: Path
    """The file to which rows are appended; what has rows there is not run again."""
    only: str = ""
    seconds: float = 2.0
    workers: int = 1
    limits: dict[str, float] = field(default_factory=lambda: {"cpu": 300.0, "gpu": 110.0})
    """Seconds for a program by device."""
    until: float = math.inf
    """time.monotonic() after which nothing runs any more."""
    most: int = 4
    """Advices of a program that are followed, in the order in which they were printed."""


@dataclass
class Case:
    """A program on a device, in a copy of its folder."""

    name: str
    spec: dict[str, Any]
    device: str
    cores: list[int]
    options: Options
    began: float = field(default_factory=time.monotonic)

    def left(self, part: float = 1.0) -> float:
        limit = min(self.began + self.options.limits[self.device] * part, self.options.until)
        return limit - time.monotonic()

    def run(self, folder: Path, command: list[str], environment: dict[str, str], part: float = 1.0) -> str:
        """What a command prints to stdout and stderr in this copy; all of its processes end with it."""
        place = folder / self.spec["in"]
        paths = [
            str(self.options.folder.resolve() / "stand_ins"),
            *(str(place / one) for one in self.spec.get("path", [])),
        ]
        env = {**os.environ, **environment}
        own = [os.path.abspath(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        env["PYTHONPATH"] = os.pathsep.join([*paths, *own])
        if self.device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        pinned = ["taskset", "-c", ",".join(map(str, self.cores)), *command]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                pinned,
                cwd=place,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(1.0, self.left(part)))
            except subprocess.TimeoutExpired:
                code = None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            text = output.read()
        if code:
            raise Failed("; ".join(text.strip().splitlines()[-2:]) or f"exit code {code}")
        if code is None:
            raise Failed(f"no end within the limit of {self.options.limits[self.device]:.0f} s")
        return text

    @property
    def program(self) -> list[str]:
        return [self.spec["script"], *self.spec.get("arguments", []), *self.spec[self.device]]


def follow_all(options: Options) -> list[dict[str, Any]]:
    """Follow all programs, some on cores beside each other and one after another on the GPU."""
    import torch

    programs = json.loads((options.folder / "programs.json").read_text())
    done = set()
    if options.rows.exists():
        entries = map(json.loads, options.rows.read_text().splitlines())
        done = {(one["conditions"]["program"], one["conditions"]["device"]) for one in entries}
    queues: dict[str, SimpleQueue[str]] = {"cpu": SimpleQueue(), "gpu": SimpleQueue()}
    for name, spec in programs.items():
        for device, queue in queues.items():
            if device in spec and options.only in name and (name, device) not in done:
                queue.put(name)
    allowed = sorted(os.sched_getaffinity(0))
    lanes = ["cpu"] * options.workers + ["gpu"] * torch.cuda.is_available()
    if CORES * len(lanes) > len(allowed):
        sys.exit(f"{len(lanes)} programs beside each other need {CORES * len(lanes)} cores, here are {len(allowed)}")
    lock, written = Lock(), []

    def write(entry: dict[str, Any]) -> None:
        with lock:
            written.append(entry)
            with options.rows.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            print(shown(entry), flush=True)

    def lane(device: str, cores: list[int]) -> None:
        while time.monotonic() < options.until:
            try:
                name = queues[device].get_nowait()
            except Empty:
                return
            case = Case(name, programs[name], device, cores, options)
            try:
                for entry in followed(case):
                    write(entry)
            except Exception as error:  # One program's failure is a row of its own.
                # What the end of the time cut off runs again in the next command.
                if time.monotonic() < options.until:
                    write(entry_of(case, None, [], {"problem": str(error)}))

    threads = [
        Thread(target=lane, args=(device, allowed[CORES * number : CORES * (number + 1)]))
        for number, device in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return written


def followed(case: Case) -> Iterator[dict[str, Any]]:
    """The rows of a program: one of each advice whose gain was printed, or a row without advice."""
    with tempfile.TemporaryDirectory(prefix="followed-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        profiled = copied(case, root / "profiled")
        command = [sys.executable, "-m", "recperf", "profile", "--no-report", "--quiet"]
        command += ["--run-dir", str(root / "profile"), "--try-fixes", "--try-for", str(round(case.left(TRIALS)))]
        script, *arguments = case.program
        case.run(profiled, [*command, "--script", script, "--", *arguments], {}, PROFILE)
        report = json.loads((root / "profile" / "profile.json").read_text())
        advice = report["advice"]
        seconds = time.monotonic() - case.began
        facts = {"limit": report["verdict"]["limit"], "confidence": report["verdict"]["confidence"],
                 "step_ms": report["step_ms"]["p50"], "profile_s": round(seconds, 1), "commit": commit_of(case),
                 "not_tried": [f"{one['name']}: {one['note']}" for one in advice if one["status"] == "not tried"],
                 "no_gain": [one["name"] for one in advice if one["status"] == "no gain"]}  # fmt: skip
        gaining = [one for one in advice if one["status"] == "tried" and one["measured_gain"]]
        if not gaining:
            yield entry_of(case, None, [], {**facts, "problem": None})
            return
        changes = [Change(case, root, number, one, report) for number, one in enumerate(gaining[: case.options.most])]
        for change, gains in timed(case, copied(case, root / "unchanged"), changes):
            yield entry_of(case, change, gains, facts)


class Change:
    """An advice as a user follows it: an edited copy of the program, variables of the environment, or a setting that
    has no place in the source."""

    def __init__(self, case: Case, root: Path, number: int, advice: dict[str, Any], report: dict[str, Any]) -> None:
        self.advice, self.folder = advice, copied(case, root / f"changed{number}")
        self.problem = ""
        settings = advice["settings"]
        for path, text in sources_of(settings).items():
            (self.folder / Path(path).relative_to((root / "profiled").resolve())).write_text(text)
        self.environment: dict[str, str] = settings.get("keep_memory", {})
        rest = {name: value for name, value in settings.items() if not name.startswith(EDITS) and name != "keep_memory"}
        script = (self.folder / case.spec["in"] / case.spec["script"]).resolve()
        made: set[str] = set()
        for file in sorted(self.folder.rglob("*.py")):
            possible = {name: one for name, one in rest.items() if name not in LINES or file.resolve() == script}
            before = file.read_text(errors="replace")
            after, names = edited(before, possible)
            if after != before:
                file.write_text(after)
                made |= names
        self.rest = {name: value for name, value in rest.items() if name not in made}
        loader = (report.get("program_facts") or {}).get("loader") or {}
        size = rest.get("batch_size")
        self.larger = size / loader["batch_size"] if size and loader.get("batch_size") else 1.0


def timed(case: Case, unchanged: Path, changes: list[Change]) -> list[tuple[Change, list[float]]]:
    """The gains of changes over the rounds, of as many as the time allows: unchanged and changed programs run one after
    another, in turned order, and count the same steps."""
    request: dict[str, Any] = {"seconds": case.options.seconds, "most": case.spec.get("steps", MOST_STEPS)}
    began = time.monotonic()
    first = clocked(case, unchanged, request, {})
    longest = time.monotonic() - began
    request = {**request, "warm": first["warm"], "steps": first["steps"]}
    changes = changes[: max(1, int(case.left() / longest / FEWEST_ROUNDS) - 1)]
    gains: list[tuple[Change, list[float]]] = [(change, []) for change in changes]
    for number in range(ROUNDS):
        began = time.monotonic()
        if number and case.left() < longest:
            break
        # The first run of all is the unchanged program of the first round.
        before = first["seconds"] if number == 0 else None
        if number % 2 == 0 and before is None:
            before = clocked(case, unchanged, request, {})["seconds"]
        times: list[tuple[Change, list[float], float]] = []
        for change, own in gains:
            try:
                asked = {**request, "settings": change.rest}
                if not change.problem:
                    times.append((change, own, clocked(case, change.folder, asked, change.environment)["seconds"]))
            except Failed as error:
                change.problem = str(error)
        before = before or clocked(case, unchanged, request, {})["seconds"]
        for change, own, after in times:
            own.append(before / after * change.larger)
        longest = time.monotonic() - began
    return gains


def clocked(case: Case, folder: Path, request: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    text = case.run(folder, [sys.executable, str(CLOCK), json.dumps(request), *case.program], environment)
    result: dict[str, Any] = next(
        json.loads(line) for line in reversed(text.splitlines()) if line.startswith('{"seconds"')
    )
    if result["seconds"] is None:
        raise Failed(f"the program ends after {result['warm']} steps")
    return result


def copied(case: Case, to: Path) -> Path:
    """A copy of the program's folder, which keeps its path in the bundle."""
    first = Path(case.spec["in"]).parts[0]
    shutil.copytree(case.options.folder / first, to / first)
    return to.resolve()


def commit_of(case: Case) -> str:
    file = case.options.folder / Path(case.spec["in"]).parts[0] / "COMMIT"
    return f"{case.spec['from']}@{file.read_text().strip()[:12]}" if file.exists() else str(case.spec["from"])


def entry_of(case: Case, change: Change | None, gains: list[float], facts: dict[str, Any]) -> dict[str, Any]:
    conditions = {"program": case.name, "device": case.device, "arguments": case.program, **facts}
    conditions["cores"] = CORES
    if change is not None:
        one = change.advice
        enough = len(gains) >= FEWEST_ROUNDS
        ends = interval([math.log(gain) for gain in gains]) if enough else None
        gain = math.exp(fmean(map(math.log, gains))) if enough else None
        conditions |= {
            "advice": one["name"], "change": one["change"][:300], "printed_gain": one["measured_gain"],
            "printed_range": one["measured_range"], "losses": one["note"],
            "followed_gain": gain, "followed_range": ends and [math.exp(end) for end in ends], "rounds": len(gains),
            "off": gain and one["measured_gain"] / gain - 1, "as_setting": sorted(change.rest),
            "problem": change.problem or (None if enough else "too few rounds in the time"),
        }  # fmt: skip
    variant = f"{case.name}, {case.device}" + (f", {change.advice['name']}" if change else "")
    return row("followed_programs", variant, "followed gain", "x", gains or [1.0], conditions)


def shown(entry: dict[str, Any]) -> str:
    facts = entry["conditions"]
    name = f"{facts['program']:24} {facts['device']:4}"
    if "advice" not in facts:
        return f"{name} {facts['problem'] or 'no advice gained'}"
    gain = facts["followed_gain"]
    text = f"followed {gain:5.2f}, off by {facts['off']:+.0%}" if gain else facts["problem"]
    return f"{name} {facts['advice']:24} printed {facts['printed_gain']:5.2f}  {text}"
