"""Tiny trainings of every workload, prepared once: an uninterrupted run of each, whose outcome every troubled one must
have, and an interrupted one."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_v4
from chaos_foreign import Planted, require_none_alive
from chaos_process import Failure, Process, judge
from movielens_files import write_files

from recperf.data.known.yambda import synthesize
from recperf.train.checkpoint import CheckpointStore

PATIENCE = 30
"""A command that takes this many times an uninterrupted run hangs."""
QUIETLY = ["--no-peaks", "--no-report"]
CPU = ["--train.device", "cpu", "--train.threads", "1", "--train.keep-last", "2"]
TIERS = ["--tables.resident", "2MiB"]
"""Memory for rows where tables lie in files."""
CHECKPOINTS = Path("checkpoints") / "seed-42"

WORKLOADS: dict[str, list[str]] = {
    "micro-dlrm": [
        "micro-dlrm", "--train.epochs", "2", "--train.batch-size", "200", "--train.checkpoint-steps", "7",
        "--target.beat", "none", *CPU,
    ],
    "micro-dlrm-dram": [
        "micro-dlrm-dram", "--model.rows", "2000", "--data.batches", "12", "--data.held-out-batches", "2",
        "--train.batch-size", "64", "--target.beat", "none", "--train.checkpoint-steps", "5", *CPU, *TIERS,
    ],
    "dlrm": [
        "dlrm", "--model.bottom", "8", "16", "4", "--model.dim", "4", "--model.top", "8", "1", "--data.batches", "20",
        "--data.held-out-batches", "2", "--train.batch-size", "64", "--train.checkpoint-steps", "6", *CPU, *TIERS,
    ],
    "dlrm-clicks": [
        "dlrm", "--target.beat", "none", "--model.dim", "4", "--model.bottom", "8", "4", "--model.top", "8", "1",
        "--train.batch-size", "200", "--train.epochs", "3", "--train.checkpoint-steps", "4", *CPU,
    ],
    "dlrm-v4": [
        "dlrm-v4", "--data.holdout-windows", "1", *tiny_v4.STREAM, *tiny_v4.MODEL, *tiny_v4.SAVING,
        "--tables.resident", "64KiB",
    ],
}  # fmt: skip
CLICKS = "home/data/mine/clicks"
"""The folder of the clicks that are imported from clicks.csv."""
DATA = {"micro-dlrm": "ratings", "dlrm-clicks": CLICKS, "dlrm-v4": "events"}
"""The folder of the data of a workload that reads files."""


@dataclass
class Subject:
    """A workload, and how a run of it ends that nothing troubles."""

    name: str
    data: Path | None
    straight: Path
    interrupted: Path
    seconds: float = 10.0
    """Time of a whole run on this machine."""
    outcome: dict[str, Any] = field(default_factory=dict)
    failed_claims: frozenset[str] = frozenset()
    """Claims that fail without any trouble, such as those that need the ceilings of the machine."""
    exact: bool = True
    """Whether two runs that nothing troubles end with the same bits."""

    @property
    def limit(self) -> float:
        return PATIENCE * self.seconds

    def begin(self, folder: Path, data: Path | None = None) -> list[str]:
        where = data or self.data
        # Only --data chooses the tables by what was imported.
        at = ["--data" if self.name == "dlrm-clicks" else "--data.path", str(where)] if where else []
        return ["run", *WORKLOADS[self.name], *at, "--run-dir", str(folder), *QUIETLY]

    def resume(self, folder: Path, data: Path | None = None) -> list[str]:
        return ["run", "--resume", str(folder), *(["--data.path", str(data)] if data else []), *QUIETLY]

    def go_on(self, folder: Path, data: Path | None = None) -> list[str]:
        """Resume a run, or start it where it has no config yet, as a user would."""
        return (self.resume if (folder / "config.json").exists() else self.begin)(folder, data)

    def lay_profile(self, folder: Path) -> None:
        """Measured steps take most of a tiny run; a profile that exists is not measured again."""
        tiny_v4.own(folder)
        for name in ("profile.json", "pair.json"):
            if (self.straight / name).exists():
                shutil.copyfile(self.straight / name, folder / name)


class Lab:
    """What all tries share. It is not changed after its preparation."""

    def __init__(self, root: Path, gpus: str | None = None) -> None:
        self.root, self.home = root, root / "home"
        self.gpus = gpus
        """The GPUs for ranks that talk by NCCL; no other process sees them."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.subjects: dict[str, Subject] = {}
        self.ranks: dict[str, Subject] = {}
        """Runs of two ranks."""
        self.planted: list[Planted] = []

    def prepare(self, names: Iterable[str] = WORKLOADS) -> None:
        write_files(self.root / "ratings")
        synthesize.write_store(tiny_v4.EVENTS, self.root / "events")
        write_clicks(self.root / "clicks.csv")
        self.call(["data", "import", str(self.root / "clicks.csv"), "--clicks", "--name", "mine", "--time", "ts"])
        for name in names:
            self._prepare(name)

    def plant(self) -> None:
        """Put a user's files into every folder of the cache; tries use it, or copies of it."""
        folders = [self.home, *(path for path in self.home.rglob("*") if path.is_dir())]
        self.planted = [Planted(folder) for folder in folders]

    def _prepare(self, name: str) -> None:
        data = self.root / DATA[name] if name in DATA else None
        subject = Subject(name, data, self.root / f"straight-{name}", self.root / f"interrupted-{name}")
        first = self.root / f"measured-{name}"
        self.call(subject.begin(first))
        tiny_v4.own(subject.straight)
        for profile in ("profile.json", "pair.json"):
            if (first / profile).exists():
                shutil.copyfile(first / profile, subject.straight / profile)
        began = time.monotonic()
        self.call(subject.begin(subject.straight))
        subject.seconds = time.monotonic() - began
        subject.outcome = outcome(subject.straight)
        assert subject.outcome == outcome(first), f"{name}: two uninterrupted runs differ"
        subject.failed_claims = self.failed_claims(subject.straight, subject.limit)
        subject.lay_profile(subject.interrupted)
        dying = ("kill_at", {"point": "save: indexed", "nth": 3, "mark": str(self.root / "mark")})
        process = self.process(subject.begin(subject.interrupted), self.root / "log.txt", troubles=[dying])
        assert process.wait(subject.limit) == -9, process.output
        self.subjects[name] = subject

    def process(self, arguments: list[str], log: Path, **options: Any) -> Process:
        return Process.fork(arguments, log, home=options.pop("home", self.home), **options)

    def call(self, arguments: list[str]) -> None:
        process = self.process(arguments, self.root / "log.txt")
        assert process.wait(600) == 0, process.output

    def failed_claims(self, folder: Path, limit: float, log: Path | None = None) -> frozenset[str]:
        """The claims that `recperf check` finds false."""
        answer = self.root / f"check-{folder.name}-{time.monotonic_ns()}"
        process = self.process(["check", str(folder), "--json"], log or self.root / "log.txt", stdout=str(answer))
        process.wait(limit)
        # Exit code 3: an older checkpoint that nothing read may be damaged still.
        judge(process, allowed=[0, 3, 5])
        runs = json.loads(answer.read_bytes())["runs"]
        answer.unlink()
        return frozenset(row["name"] for run in runs for row in run["claims"] if row["holds"] is False)


def write_clicks(path: Path, rows: int = 1500) -> None:
    """A user's own file, with what programs write in different ways: true and false, postal codes, several values."""
    draw, lines = random.Random(7), ["user,item,zip,member,price,tags,clicked,ts"]
    for row in range(rows):
        user, item = draw.randrange(40), draw.randrange(60)
        code, tags = ("00501", "10001", "02139")[user % 3], ("a|b", "c", "")[item % 3]
        price, clicked = round(20 * draw.random(), 2), int(draw.random() < 0.2 + 0.5 * ((user + item) % 3 == 0))
        lines.append(f"u{user},i{item},{code},{user % 2 == 0},{price},{tags},{clicked},{1_600_000_000 + 60 * row}")
    path.write_text("\n".join(lines) + "\n")


class Try:
    """One try: its own folder, its own random numbers, and what was done so far."""

    def __init__(self, lab: Lab, kind: str, seed: int, folder: Path) -> None:
        self.lab, self.kind, self.seed, self.folder = lab, kind, seed, folder
        self.draw = random.Random(f"{kind} {seed}")
        self.home = lab.home
        self.log, self.run = folder / "log", folder / "run"
        self.done: list[str] = []
        self.attempts = 0
        """How often ranks were started."""
        self.planted = [Planted(folder)]

    def plant(self, folder: Path) -> None:
        """Put a user's files into a folder; nothing that the try does may change them."""
        if folder not in (planted.folder for planted in self.planted):
            self.planted.append(Planted(folder))

    def require_clean(self) -> None:
        """A user's files are untouched, and no process of the try is left."""
        for planted in self.planted:
            planted.require_untouched()
        require_none_alive(self.folder)

    def subject(self, *names: str) -> Subject:
        subject = self.lab.subjects[self.draw.choice(names or list(self.lab.subjects))]
        self.done.append(subject.name)
        return subject

    def start(self, arguments: list[str], **options: Any) -> Process:
        if arguments[:2] == ["run", "--resume"]:
            self.plant(self.run)
        if arguments[0] == "run" and TIERS[0] in WORKLOADS.get(next(iter(self.done), ""), []):
            # Where rows lie may change whenever a run is resumed.
            arguments = [*arguments, "--tables.placement", self.draw.choice(["device", "file"])]
        return self.lab.process(arguments, self.log, home=self.home, **options)

    def call(self, arguments: list[str], limit: float, *, allowed: tuple[int, ...], **options: Any) -> int:
        """The exit code of a command that nobody disturbs."""
        process = self.start(arguments, **options)
        process.wait(limit)
        return judge(process, allowed=allowed, printed="stderr" not in options)

    @property
    def printed(self) -> str:
        """What all processes of this try printed."""
        logs = [self.log, *sorted(self.folder.glob("rank-*.log"))]
        return "".join(log.read_bytes().decode(errors="replace") for log in logs if log.exists())

    def own_home(self) -> Path:
        """A copy of the cache folder for this try alone."""
        self.home = self.folder / "home"
        shutil.copytree(self.lab.home, self.home)
        self.planted += [Planted(self.home / one.folder.relative_to(self.lab.home)) for one in self.lab.planted]
        return self.home

    def finish(self, subject: Subject, data: Path | None = None) -> None:
        """Let the run end without further trouble; it must be as one that nothing troubled."""
        self.call(subject.go_on(self.run, data), subject.limit, allowed=(0,))
        self.require_equal(subject)

    def require_equal(self, subject: Subject) -> None:
        require_equal(outcome(self.run), subject.outcome)
        failed = self.lab.failed_claims(self.run, subject.limit, self.log) - subject.failed_claims
        if failed:
            raise Failure("mismatch", f"recperf check refuses the run: {', '.join(sorted(failed))}")


Kind = Callable[[Try], str]
"""Tries one thing; returns completed, refused or resumed, or raises a Failure."""


def outcome(folder: Path) -> dict[str, Any]:
    """What troubles must not change: every bit of the last state, the log and the result, except times."""
    checkpoints = CheckpointStore(folder=folder / CHECKPOINTS, notice=lambda text: None)
    best, state = checkpoints.best(), checkpoints.load()
    result = json.loads((folder / "result.json").read_bytes())
    return {
        "state": tiny_v4.state_of(state) if state else None,
        "best": best.name if best else None,
        "events": tiny_v4.logged(folder),
        "mlperf": tiny_v4.mlperf(folder) if (folder / "mlperf.log").exists() else None,
        "quality": result["quality"],
        "data": result["data"],
    }


def require_equal(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    differing = [name for name, value in expected.items() if ours[name] != value]
    if differing:
        shown = {name: _difference(ours[name], expected[name]) for name in differing}
        raise Failure("mismatch", f"the run ended with other {', '.join(differing)}: {shown}")


def _difference(ours: Any, expected: Any) -> Any:
    """The part of two values that differs, shortened."""
    if isinstance(ours, dict) and isinstance(expected, dict):
        return {
            key: _difference(ours.get(key), expected.get(key))
            for key in {*ours, *expected}
            if ours.get(key) != expected.get(key)
        }
    return f"{str(ours)[:60]}, not {str(expected)[:60]}"
