"""The kinds of trouble that chaos.py makes. Each is a function that tries one thing and says how it ended."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chaos_process import SOFT, Failure, Process, exit_code_of, judge
from chaos_runs import CHECKPOINTS, QUIETLY, Kind, Subject, Try
from mutations import damage, files_in

from recperf import stop as points
from recperf.runs.evidence import is_evidence
from recperf.train.checkpoint import CheckpointStore

KINDS: dict[str, tuple[Kind, int]] = {}
"""The function of each kind, and how often it comes round."""
SIGNALS = (*SOFT, signal.SIGKILL, signal.SIGKILL)
"""Signals that a process gets at random; a kill leaves it no time."""
REFUSED = (3, 4)
"""Exit codes of a run that finds its files damaged or its disk full."""
OUTPUT = 8000
"""Bytes that a run may print: a limit on the size of files holds for its output too."""
READING = 30.0
"""Seconds for a command that only reads small files, where no run gives a measure."""


def kind(name: str, weight: int) -> object:
    def add(function: Kind) -> Kind:
        KINDS[name] = (function, weight)
        return function

    return add


def allowed_after(process: Process) -> list[int]:
    """The exit codes that the signals which were sent allow; 0 is a signal that came too late."""
    codes = [0]
    for number, listening in process.sent:
        codes.append(-signal.SIGKILL if number == signal.SIGKILL else exit_code_of(number))
        if not listening:
            # Python's own start, before the command has its handlers.
            codes.append(-number)
    return codes


def logged_steps(run: Path) -> int:
    """Steps in the log of a run."""
    path = run / "events.jsonl"
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


def require_saved(process: Process, run: Path, before: int) -> None:
    """A run that was asked once to stop has saved every step that it logged; `before` it began, the log had others."""
    if process.code not in (75, 130) or len(process.sent) != 1 or logged_steps(run) <= before:
        return
    notices: list[str] = []
    saved = CheckpointStore(folder=run / CHECKPOINTS, notice=notices.append).saved()
    step = int(saved[0].name.removeprefix("step-")) if saved else 0
    if logged_steps(run) > step:
        raise Failure("mismatch", f"{logged_steps(run)} steps logged, {step} saved\n{process.output}")


def send_some(one: Try, process: Process, span: float, numbers: tuple[int, ...]) -> None:
    """Send one to three signals, each at a random moment."""
    for _ in range(one.draw.choice([1, 1, 1, 2, 3])):
        number, delay = one.draw.choice(numbers), one.draw.uniform(0, span)
        if process.ended(delay):
            return
        process.send(number)
        one.done.append(f"{signal.Signals(number).name} after {delay:.2f} s")
        if number == signal.SIGKILL:
            return
        # Most follow soon: the process is saving then.
        span = one.draw.choice([0.01, 0.1, span])


def ended(one: Try, process: Process, limit: float, before: int = 0) -> int:
    process.wait(limit)
    code = judge(process, allowed=allowed_after(process))
    require_saved(process, one.run, before)
    return code


@kind("signals", 10)
def signals(one: Try) -> str:
    """Signals of all kinds at any moment of a run, and of the runs that resume it."""
    subject, stopped = one.subject(), 0
    if one.draw.random() < 0.9:
        subject.lay_profile(one.run)
    for _ in range(one.draw.choice([1, 2, 3, 5])):
        before, process = logged_steps(one.run), one.start(subject.go_on(one.run))
        span = subject.seconds * one.draw.choice([0.3, 1.0])
        send_some(one, process, span, SIGNALS)
        stopped += ended(one, process, subject.limit, before) != 0
        if (one.run / "seal.json").exists():
            break
    one.finish(subject)
    return "resumed" if stopped else "completed"


@kind("moments", 5)
def moments(one: Try) -> str:
    """A kill or a signal at a named moment of a save, an evaluation or a window, or inside a system call."""
    subject = one.subject()
    subject.lay_profile(one.run)
    for _ in range(one.draw.choice([1, 2, 3])):
        number, before = one.draw.choice([signal.SIGKILL, signal.SIGKILL, *SOFT]), logged_steps(one.run)
        if one.draw.random() < 0.5:
            options = {"point": one.draw.choice(list(points.POINTS)), "nth": one.draw.randrange(1, 6), "number": number}
            process = one.start(subject.go_on(one.run), troubles=[("signal_at", options)])
        else:
            options = {
                "function": one.draw.choice(["replace", "fsync", "write", "open", "ftruncate", "mkdir", "unlink"])
            }
            options |= {"nth": one.draw.randrange(1, 60), "number": number}
            process = one.start(subject.go_on(one.run), troubles=[("signal_in", options)])
        one.done.append(f"{signal.Signals(number).name} at {options}")
        process.sent.append((number, True))
        ended(one, process, subject.limit, before)
        if (one.run / "seal.json").exists():
            break
    one.finish(subject)
    return "resumed"


@kind("start", 3)
def start(one: Try) -> str:
    """Signals while Python, torch and the command start; a real process start."""
    subject = one.subject()
    subject.lay_profile(one.run)
    process = Process.start(subject.begin(one.run), one.log, home=one.home, OMP_NUM_THREADS="1")
    began = time.monotonic()
    while not process.listening and not process.ended(0.002):
        if time.monotonic() - began > subject.limit:
            raise Failure("hang", "no handler of signals")
    send_some(one, process, one.draw.choice([0.5, 4.0]), (*SOFT, *SOFT, signal.SIGKILL))
    code = ended(one, process, subject.limit + 4 * READING)
    one.finish(subject)
    return "resumed" if code else "completed"


@kind("damage: checkpoint", 6)
def damaged_checkpoint(one: Try) -> str:
    subject = one.subject()
    shutil.copytree(subject.interrupted, one.run)
    return resumed_after_damage(one, subject, files_in(one.run / "checkpoints"))


@kind("damage: run folder", 6)
def damaged_run(one: Try) -> str:
    """Config, log, baselines and the other files of an interrupted run."""
    subject = one.subject()
    shutil.copytree(subject.interrupted, one.run)
    return resumed_after_damage(one, subject, [path for path in one.run.iterdir() if path.is_file()])


def resumed_after_damage(one: Try, subject: Subject, files: list[Path], data: Path | None = None) -> str:
    """Damage a file of an interrupted run or of its data: a resume ends as without damage, or refuses."""
    damaged(one, files)
    code = one.call(subject.resume(one.run, data), subject.limit, allowed=(0, *REFUSED))
    if code:
        return "refused"
    if "profile.json" in one.done[-1] or "pair.json" in one.done[-1] or "machine.json" in one.done[-1]:
        # Measured figures are not part of the training; check sees that they are damaged.
        from chaos_runs import outcome, require_equal

        require_equal(outcome(one.run), subject.outcome)
        return "completed"
    one.require_equal(subject)
    return "completed"


def damaged(one: Try, files: list[Path], *, named: bool = False) -> None:
    """Damage one of the files; a link may lead to a file of the user, which nothing may change.

    A file that the user names may be a pipe or a device: they asked for it.
    """
    one.done.append(damage(sorted(files), one.draw, one.folder / "my.jsonl", devices=not named))


@kind("damage: data", 6)
def damaged_data(one: Try) -> str:
    """Event store, windows, ratings and imported clicks, under a resumed or a new run."""
    subject = one.subject("dlrm-v4", "dlrm-v4", "micro-dlrm", "dlrm-clicks", "dlrm-clicks")
    assert subject.data
    data = one.folder / "data"
    shutil.copytree(subject.data, data)
    files = files_in(data)
    if one.draw.random() < 0.5:
        shutil.copytree(subject.interrupted, one.run)
        return resumed_after_damage(one, subject, files, data)
    damaged(one, files)
    subject.lay_profile(one.run)
    code = one.call(subject.begin(one.run, data), subject.limit, allowed=(0, *REFUSED))
    # Without a digest that says what the ratings were, a new run of micro-dlrm trains on what there is.
    if code == 0 and subject.name != "micro-dlrm":
        one.require_equal(subject)
    return "refused" if code else "completed"


@kind("damage: finished run", 6)
def damaged_finished(one: Try) -> str:
    """Any file of a finished run: check notices it, and no command that reads the run fails without a clear line."""
    subject = one.subject()
    shutil.copytree(subject.straight, one.run)
    before = {path: path.read_bytes() for path in files_in(one.run)}
    damaged(one, list(before))
    changed = [path for path, content in before.items() if not _same(path, content)]
    failed, limit = False, subject.limit
    evidence = [path for path in changed if path.parent == one.run and is_evidence(path.name)]
    code = one.call(["check", str(one.run)], limit, allowed=(0, 3, 5))
    if code == 0 and evidence:
        raise Failure("mismatch", f"check accepts a run with a damaged {evidence[0].name}")
    commands = [
        ["report", str(one.run), "--out", str(one.folder / "page.html")],
        ["check", str(one.run), "--prune"],
        ["compare", str(one.run), str(subject.straight), "--gate", "5%"],
        ["run", "--resume", str(one.run), *QUIETLY],
    ]
    for arguments in one.draw.sample(commands, 2):
        one.done.append(" ".join(arguments[:2]))
        failed |= one.call(arguments, limit, allowed=(0, 3, 4, 5)) != 0
    return "refused" if failed or code else "completed"


def _same(path: Path, content: bytes) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes() == content


@kind("damage: compiled code", 3)
def damaged_kernels(one: Try) -> str:
    """The cache of compiled C code: the run compiles again or refuses, and computes the same bits."""
    subject = one.subject()
    damaged(one, files_in(one.own_home() / "native"))
    subject.lay_profile(one.run)
    code = one.call(subject.begin(one.run), subject.limit + READING, allowed=(0, 4), troubles=[("load_again", {})])
    if code == 0:
        require_same_operators(one, subject)
    return "refused" if code else "completed"


def require_same_operators(one: Try, subject: Subject) -> None:
    """A new run that cannot have its compiled operators says so, and its last bits are then others."""
    if "reference operators can be used" not in one.printed:
        one.require_equal(subject)


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A file system of that size; says whether one could be mounted."""
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = bool(mount) and subprocess.run([mount, *options], check=False, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


@kind("disk: run folder", 4)
def full_run_folder(one: Try) -> str:
    """A disk that fills up, fails or limits the size of files under the run folder; the run goes on elsewhere."""
    subject = one.subject()
    size = sum(path.stat().st_size for path in files_in(subject.straight))
    limits = one.draw.choice(["file system", "file size", "calls"])
    with small_disk(one.folder / "disk", 4096 + one.draw.randrange(size + 65536)) as mounted:
        place = one.folder / "disk" / "run"
        troubles = []
        if limits == "file size" or not mounted:
            troubles = [("at_most", {"file_bytes": one.draw.randrange(OUTPUT, max(2 * OUTPUT, size // 2))})]
        elif limits == "calls":
            number = one.draw.choice([errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
            names = one.draw.choice([["write"], ["fsync"], ["mkdir"], ["replace"], ["write", "mkdir", "replace"]])
            point = {"point": one.draw.choice(list(points.POINTS)), "nth": one.draw.randrange(1, 4)}
            troubles = [("refuse", {"functions": names, "number": number, **point})]
        if troubles:
            place = one.folder / "elsewhere" / "run"
        with suppress(OSError):
            subject.lay_profile(place)
        one.done.append(f"{limits} {troubles}")
        code = one.call(subject.begin(place), subject.limit, allowed=(0, 4), troubles=troubles)
        if place.exists():
            shutil.copytree(place, one.run)
    if not (one.run / "config.json").exists():
        shutil.rmtree(one.run, ignore_errors=True)
    subject.lay_profile(one.run)
    one.finish(subject)
    return "resumed" if code else "completed"


@kind("disk: cache folder", 2)
def full_home(one: Try) -> str:
    """A cache folder that is full, a file, or cannot be written."""
    subject = one.subject()
    way = one.draw.choice(["full", "file", "missing", "file size"])
    one.done.append(way)
    subject.lay_profile(one.run)
    with small_disk(one.folder / "disk", one.draw.choice([4096, 40_000, 100_000])) as mounted:
        one.home = one.folder / "disk"
        if way == "file":
            one.home = one.folder / "file"
            one.home.write_bytes(b"")
        elif way == "missing":
            one.home = Path("/proc/self/nothing")
        troubles: list[tuple[str, dict[str, object]]] = [("load_again", {})]
        if way == "file size" or not mounted:
            troubles.append(("at_most", {"file_bytes": one.draw.choice([OUTPUT, 2 * OUTPUT])}))
        limit = subject.limit + READING
        code = one.call(subject.begin(one.run), limit, allowed=(0, 4), troubles=troubles)
    one.home = one.lab.home
    if code:
        shutil.rmtree(one.run, ignore_errors=True)
        subject.lay_profile(one.run)
        one.finish(subject)
        return "refused"
    require_same_operators(one, subject)
    return "completed"


@kind("disk: output", 3)
def full_output(one: Try) -> str:
    """Standard output, standard error or both are a full disk: the run ends, and its result is there."""
    subject = one.subject()
    streams = one.draw.choice([["stdout"], ["stderr"], ["stdout", "stderr"]])
    target = one.draw.choice(["/dev/full", "/dev/full", "pipe"])
    options = dict.fromkeys(streams, target)
    one.done.append(f"{target} under {' and '.join(streams)}")
    subject.lay_profile(one.run)
    if target == "pipe":
        path = one.folder / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        options = {stream: str(path) for stream in streams}
        process = one.start(subject.begin(one.run), **options)
        time.sleep(one.draw.uniform(0, subject.seconds / 2))
        os.close(reader)
    else:
        process = one.start(subject.begin(one.run), **options)
    process.wait(subject.limit)
    # The result is complete; only its text could not be printed.
    judge(process, allowed=(0, 4), printed=False)
    one.require_equal(subject)
    return "completed"


@kind("tables folder", 3)
def tables_folder(one: Try) -> str:
    """Kills of runs whose tables lie in files of a folder that a user has files in; what they left may be damaged."""
    subject = one.subject("micro-dlrm-dram", "dlrm")
    subject.lay_profile(one.run)
    tables = one.folder / "tables"
    one.plant(tables)
    placed = ["--tables.placement", "file", "--tables.folder", str(tables)]
    for _ in range(one.draw.choice([1, 2])):
        before = logged_steps(one.run)
        process = one.lab.process([*subject.go_on(one.run), *placed], one.log, home=one.home)
        send_some(one, process, subject.seconds, SIGNALS)
        ended(one, process, subject.limit, before)
    ours = [path for path in files_in(tables) if "process-2024-results" not in path.parts]
    damages = bool(ours) and one.draw.random() < 0.5
    if damages:
        damaged(one, ours)
    process = one.lab.process([*subject.go_on(one.run), *placed], one.log, home=one.home)
    process.wait(subject.limit)
    judge(process, allowed=(0,))
    left = [path.name for path in tables.glob("process-*") if path.name != "process-2024-results"]
    # A fork ends without Python's own end, which removes the folder of a process.
    if not damages and len(left) > 1:
        raise Failure("mismatch", f"folders of tables are left: {left}")
    one.require_equal(subject)
    return "resumed"
