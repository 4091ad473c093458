"""Changes formulas one at a time and runs the tests that reach them: a change that no test notices is a gap.

    python tests/mutants.py --seed 1 --count 300
    python tests/mutants.py --seed 1 --count 40 --files runs/compare.py runs/derive.py

A mutant is one file with one changed comparison, number, sign, operator, condition or returned value. The tests of the
file's room run once under a tracer, which tells the lines that each test reaches. A mutant is then imported in a fork
of a process that holds torch but nothing of recperf, from a copy of src/; the tests that reach its line come first, and
the first failure or a timeout kills it. Exits with 5 if fewer than 90 % are killed or more than 5 % are excused.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from mutation_sites import Site, Sites

ROOT = Path(__file__).parents[1]
FILES = (
    *(f"runs/{name}.py" for name in ("derive", "compare", "contract", "evidence")),
    "planning/*.py",
    *(f"measure/{name}.py" for name in ("limits", "attribution", "evidence", "advice", "advice_rules", "experiments")),
    *(f"train/{name}.py" for name in ("metrics", "ranking", "next_item", "baselines")),
)
"""The files that hold formulas, below the package."""
ELSEWHERE = {
    "runs": ["tests/train/test_metrics.py"],
    "planning": ["tests/cli/test_plan.py"],
    "measure": ["tests/evidence"],
}
"""Tests of a room's formulas outside the tests of the room; what does not exist is left out."""
PRELOADED = ("pandas", "sklearn.ensemble", "sklearn.metrics", "pyarrow", "duckdb", "jinja2")
EXCUSED = "tests/mutants_excused.toml"
KILLED_SHARE, EXCUSED_SHARE = 0.9, 0.05
SURVIVED, NO_TESTS = 0, 5
"""Exit codes of pytest."""


@dataclass(kw_only=True)
class Test:
    name: str
    file: str
    seconds: float = 0.0
    failed: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Lines of the mutated files that it reaches."""


class Tracer:
    """A pytest plugin that notes the lines of the watched files that each test reaches."""

    def __init__(self, watched: dict[str, str], file: str) -> None:
        self.watched, self.file = watched, file
        self.tests: dict[str, Test] = {}
        self.hits: set[tuple[str, int]] = set()

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename in self.watched else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self.hits.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.hits = set()
        self.tests[nodeid] = Test(name=nodeid, file=self.file)
        # A test that traces by itself leaves no tracer.
        self.start()

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests[report.nodeid]
        test.seconds += report.duration
        # A skipped test notices nothing.
        test.failed |= report.outcome != "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        lines = defaultdict(list)
        for file, line in sorted(self.hits):
            lines[self.watched[file]].append(line)
        self.tests[nodeid].lines = lines


class Chosen:
    """A pytest plugin that runs some tests, in their order, and notes the one that fails."""

    def __init__(self, tests: list[Test], note: Path) -> None:
        self.order = {test.name: place for place, test in enumerate(tests)}
        self.note = note

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.note.write_text(report.nodeid)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a fork does in a folder of its own, with an exit code, and for how long at most."""

    key: Any
    body: Callable[[Path], int]
    seconds: float


class Forks:
    """Runs tasks in forks of this process, each beside a copy of src/."""

    def __init__(self, root: Path, work: Path, jobs: int) -> None:
        self.root = root
        self.free = [work / f"job-{number}" for number in range(jobs)]
        shutil.copytree(root / "src", work / "src")
        compileall.compile_dir(work / "src", quiet=2)
        for folder in self.free:
            shutil.copytree(work / "src", folder / "src")
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        # So the fixture `compiled` keeps its folder beside the temporary one of pytest: C is compiled once a copy.
        os.environ["PYTEST_XDIST_WORKER"] = "gw0"
        os.chdir(root)
        if (root / "tests" / "conftest.py").exists():
            runpy.run_path("tests/conftest.py")
            for name in PRELOADED:
                importlib.import_module(name)
        importlib.import_module("pytest")

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, int | None, Path, float]]:
        """Each task with its exit code, None for a timeout, with its folder and its seconds, as they end."""
        waiting, running = list(tasks)[::-1], {}
        try:
            while waiting or running:
                while waiting and self.free:
                    task, folder = waiting.pop(), self.free.pop()
                    running[self._start(task, folder)] = task, folder, time.monotonic()
                time.sleep(0.02)
                for pid, (task, folder, start) in list(running.items()):
                    seconds = time.monotonic() - start
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if not ended and seconds < task.seconds:
                        continue
                    _kill(pid)
                    if not ended:
                        os.waitpid(pid, 0)
                    del running[pid]
                    yield task, os.waitstatus_to_exitcode(status) if ended else None, folder, seconds
                    self.free.append(folder)
        finally:
            for pid in running:
                _kill(pid)

    def _start(self, task: Task, folder: Path) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.path.insert(0, str(folder / "src"))
            os.environ["PYTHONPATH"] = str(folder / "src")
            code = task.body(folder)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _kill(pid: int) -> None:
    """Ends a fork and what it left running."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def run_pytest(folder: Path, plugin: object, files: Iterable[str], *more: str) -> int:
    import pytest

    quiet = ["-q", "--no-header", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = [*quiet, "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'tmp'}", *more]
    return int(pytest.main([*options, *files], plugins=[plugin]))


def traced(forks: Forks, sources: list[str], paths: list[str]) -> list[Test]:
    """The tests below the paths, with the lines of the sources that they reach; kept for as long as nothing changes."""
    root = forks.root
    files = sorted({str(file.relative_to(root)) for path in paths for file in _test_files(root / path)})
    shared = [file for file in (root / "tests").rglob("*.py") if not file.name.startswith("test_")]
    common = _digest(*sorted([*(root / "src").rglob("*.py"), *shared, root / "pyproject.toml"]))
    cache = root / ".pytest_cache" / "mutants"
    cache.mkdir(parents=True, exist_ok=True)
    kept = {file: cache / f"{_digest(root / file, common, sources)}.json" for file in files}

    def trace(folder: Path, file: str) -> int:
        tracer = Tracer({str(folder / source): source for source in sources}, file)
        tracer.start()
        run_pytest(folder, tracer, [file])
        sys.settrace(None)
        draft = folder / "traced.json"
        draft.write_text(json.dumps([vars(test) for test in tracer.tests.values()]))
        shutil.move(draft, kept[file])
        return 0

    missing = [file for file in files if not kept[file].exists()]
    tasks = [Task(key=file, body=lambda folder, file=file: trace(folder, file), seconds=900.0) for file in missing]
    for task, code, folder, seconds in forks.run(tasks):
        print(f"traced {task.key} in {seconds:.0f} s", flush=True)
        if code != 0:
            raise SystemExit(f"cannot trace {task.key}:\n{(folder / 'log').read_text()}")
    tests = [Test(**row) for file in files for row in json.loads(kept[file].read_text())]
    for test in tests:
        if test.failed:
            print(f"left out, for it fails or skips without any change: {test.name}")
    return [test for test in tests if not test.failed]


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("test_*.py") if file.is_file()]


def _digest(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else repr(part).encode())
    return digest.hexdigest()[:32]


def reaching(site: Site, tests: list[Test], lines: list[str]) -> list[Test]:
    """The tests that can notice a change: those that reach it, then the others of their files, which may read what a
    fixture or a cache made there. A file's tests stay together, and the fastest come first."""
    if site.function:
        first, last = site.statement
        spots = set(range(first, last + 1))
    else:
        spots = {number for number, line in enumerate(lines, 1) if site.name and site.name in line}
    direct = {test.name for test in tests if spots.intersection(test.lines.get(site.file, ()))}
    if site.function:
        files = {test.file for test in tests if test.name in direct}
    else:
        files = {test.file for test in tests if test.lines.get(site.file)}
    cost: Counter[tuple[bool, str]] = Counter()
    for test in tests:
        cost[test.name not in direct, test.file] += test.seconds
    return sorted(
        (test for test in tests if test.file in files),
        key=lambda test: (test.name not in direct, cost[test.name not in direct, test.file], test.file, test.seconds),
    )


@dataclass(kw_only=True)
class Mutant:
    site: Site
    change: str
    source: str
    tests: list[Test]
    killed: bool = False
    why: str = "no test runs this line"
    excuse: str = ""

    def run(self, folder: Path) -> int:
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        file, note = folder / self.site.file, folder / "failed"
        note.unlink(missing_ok=True)
        file.write_text(self.source)
        return run_pytest(
            folder, Chosen(self.tests, note), dict.fromkeys(test.file for test in self.tests), "-x", "--tb=short"
        )

    def judge(self, code: int | None, folder: Path, root: Path) -> None:
        """Takes the outcome of its fork, in whose folder the original comes back."""
        file, note = self.site.file, folder / "failed"
        shutil.copy2(root / file, folder / file)
        if code == NO_TESTS:
            raise SystemExit(f"no test was collected:\n{(folder / 'log').read_text()}")
        self.killed = code != SURVIVED
        if self.killed:
            self.why = "timeout" if code is None else note.read_text() if note.exists() else f"pytest ended with {code}"
        else:
            self.why = f"{len(self.tests)} tests pass"

    @property
    def text(self) -> str:
        site = self.site
        return f"{site.file}:{site.line} {site.function or site.name or 'module'}: {' '.join(self.change.split())}"


def drawn(sites: list[Site], seed: int, count: int) -> list[tuple[Site, str, Callable[[], str]]]:
    draw = random.Random(seed)
    return [(site, *draw.choice(site.changes)) for site in draw.sample(sites, min(count, len(sites)))]


def excuses(root: Path) -> dict[tuple[str, ...], str]:
    """Reasons by file, function, source line and change."""
    path = root / EXCUSED
    rows = tomllib.loads(path.read_text()).get("excused", []) if path.exists() else []
    return {(row["file"], row["function"], row["line"], row["change"]): row["reason"] for row in rows}


def tests_of(file: str, chosen: list[str]) -> tuple[str, ...]:
    room = Path(file).parts[2]
    return tuple(chosen or [f"tests/{room}", *ELSEWHERE.get(room, ())])


def report(mutants: list[Mutant]) -> int:
    """Prints the survivors and a table; the exit code."""
    survivors = [mutant for mutant in mutants if not mutant.killed]
    excused = [mutant for mutant in survivors if mutant.excuse]
    print("\nsurvivors:" if survivors else "\nno survivors")
    for mutant in sorted(survivors, key=lambda mutant: (mutant.site.file, mutant.site.line)):
        why = f"excused: {mutant.excuse}" if mutant.excuse else mutant.why
        print(f"  {mutant.text}\n      {mutant.site.text}\n      {why}")
    print(f"\n{'file':40} drawn killed excused")
    for file in sorted({mutant.site.file for mutant in mutants}):
        own = [mutant for mutant in mutants if mutant.site.file == file]
        killed, forgiven = sum(mutant.killed for mutant in own), sum(mutant in excused for mutant in own)
        print(f"{file:40} {len(own):5} {killed:6} {forgiven:7}")
    total = len(mutants)
    share, forgiven_share = (total - len(survivors)) / total, len(excused) / total
    print(f"{total - len(survivors)} of {total} killed ({share:.1%}), {len(excused)} excused ({forgiven_share:.1%})")
    return 0 if share >= KILLED_SHARE and forgiven_share <= EXCUSED_SHARE else 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="decides which mutants are drawn")
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument("--files", nargs="+", default=FILES, help="files or patterns below the package")
    parser.add_argument("--tests", nargs="+", default=[], help="test files or folders instead of those of the room")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    return parser.parse_args()


def main() -> int:
    options, start = arguments(), time.monotonic()
    # An exception ends the forks and removes their folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = options.root.resolve()
    files = sorted({str(f.relative_to(root)) for name in options.files for f in root.glob(f"src/*/{name}")})
    sites = [site for file in files for site in Sites(root, file).found]
    if not sites:
        raise SystemExit(f"nothing to change in {', '.join(options.files)}")
    choice, reasons = drawn(sites, options.seed, options.count), excuses(root)
    print(f"{len(choice)} of {len(sites)} sites in {len(files)} files, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        forks = Forks(root, Path(work), options.jobs)
        rooms = {tests_of(site.file, options.tests): site.file for site, _, _ in choice}
        known = {paths: traced(forks, files, list(paths)) for paths in rooms}
        lines = {file: (root / file).read_text().splitlines() for file in files}
        mutants = []
        for site, change, source in choice:
            tests = reaching(site, known[tests_of(site.file, options.tests)], lines[site.file])
            excuse = reasons.get((site.file, site.function, site.text, change), "")
            mutants.append(Mutant(site=site, change=change, source=source(), tests=tests, excuse=excuse))
        tasks = [
            Task(key=mutant, body=mutant.run, seconds=30 + 4 * sum(test.seconds for test in mutant.tests))
            for mutant in mutants
            if mutant.tests
        ]
        for number, (task, code, folder, seconds) in enumerate(forks.run(tasks), 1):
            task.key.judge(code, folder, root)
            outcome = "killed" if task.key.killed else "SURVIVED"
            print(f"{number:4} {outcome:8} {seconds:5.1f} s  {task.key.text}  ({task.key.why})", flush=True)
    code = report(mutants)
    print(f"{time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
