"""Trouble with files outside a training: imports, traces, ceilings, scores, exports, and a user's own folders."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import example_runs
import example_traces
from chaos_foreign import FOREIGN
from chaos_kinds import READING, REFUSED, SIGNALS, allowed_after, damaged, kind, send_some
from chaos_process import Failure, judge
from chaos_runs import CLICKS, Lab, Try
from mutations import files_in

from recperf.files import write_json
from recperf.jsonfile import sealed
from recperf.machine import machine_facts

SLOW = 6 * READING
"""Seconds for a command that starts another Python."""
READ = (0, 2, *REFUSED)
"""Exit codes of a command that reads what may be damaged, or writes where a user has files."""


def prepare(lab: Lab) -> None:
    """The scores and the export of a run of imported clicks."""
    if "dlrm-clicks" in lab.subjects:
        (lab.root / "untroubled").mkdir()
        lab.call(score(lab, lab.root / "untroubled"))
        lab.call(export(lab, lab.root / "untroubled"))


def score(lab: Lab, folder: Path) -> list[str]:
    run, rows, output = lab.subjects["dlrm-clicks"].straight, lab.root / "clicks.csv", folder / "scores.csv"
    return ["score", str(run), "--input", str(rows), "--output", str(output), "--device", "cpu"]


def export(lab: Lab, folder: Path) -> list[str]:
    run = lab.subjects["dlrm-clicks"].straight
    return ["export", str(run), "--output", str(folder / "exported"), "--device", "cpu"]


def import_clicks(lab: Lab) -> list[str]:
    return ["data", "import", str(lab.root / "clicks.csv"), "--clicks", "--name", "mine", "--time", "ts"]


def import_events(one: Try, store: Path, rows: int) -> list[str]:
    """The command that imports a log of so many rows, which is written here."""
    log, lines = (
        one.folder / "log.csv",
        (f"{row % 97},i{row % 331},{row * 977 % 10**6},{row % 6}" for row in range(rows)),
    )
    log.write_text("\n".join(["u,i,t,r", *lines]) + "\n")
    columns = ["--user", "u", "--item", "i", "--time", "t", "--rating", "r"]
    return ["data", "import", "--events", str(log), *columns, "--name", "mine", "--store", str(store)]


def make_events(store: Path, events: int) -> list[str]:
    return ["data", "make", "yambda-like", "--path", str(store), "--events", str(events)]


def disturbed(one: Try, arguments: list[str], span: float, *more: int) -> int:
    """The exit code of a command that gets signals of all kinds; `more` codes are allowed, too."""
    process = one.start(arguments)
    send_some(one, process, span, SIGNALS)
    process.wait(SLOW)
    return judge(process, allowed=[*allowed_after(process), *more])


def require_no_drafts(folder: Path, name: str) -> None:
    if left := [path.name for path in folder.glob(f".{name}.*") if not any(path.name in own for own in FOREIGN)]:
        raise Failure("mismatch", f"drafts are left: {left}")


@kind("damage: ceilings", 2)
def damaged_ceilings(one: Try) -> str:
    """The stored ceilings of the machine, under the page of a run and under commands that use them."""
    subject, facts = one.subject(), machine_facts()
    shutil.copytree(subject.straight, one.run)
    path = one.own_home() / "machines" / f"{facts['fingerprint']}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, sealed({**example_runs.peaks(), "machine": facts}))
    damaged(one, [path])
    page = ["report", str(one.run), "--out", str(one.folder / "page.html")]
    command = one.draw.choice([page, ["show", "micro-dlrm-dram"], ["plan", "dlrm"]])
    return "refused" if one.call(command, max(READING, subject.limit), allowed=READ) else "completed"


@kind("damage: trace", 2)
def damaged_trace(one: Try) -> str:
    path = one.folder / one.draw.choice(["trace.json", "trace.json.gz"])
    steps = [event for step in range(3) for event in example_traces.gpu_step(step, 1000.0 * step, 10 + step)]
    example_traces.write(path, steps)
    damaged(one, [path], named=True)
    return "refused" if one.call(["profile", "--trace", str(path)], READING, allowed=(0, 3)) else "completed"


@kind("damage: import", 3)
def damaged_import(one: Try) -> str:
    """A file that is imported: what is stored is intact, or nothing is."""
    store = one.folder / "store"
    command = import_events(one, store, 300)
    damaged(one, [one.folder / "log.csv"], named=True)
    if one.call(command, 3 * READING, allowed=READ):
        return "refused"
    one.call(["data", "check", "yambda-like", "--path", str(store)], READING, allowed=(0,))
    return "completed"


@kind("damage: imported clicks", 4)
def damaged_clicks(one: Try) -> str:
    """The description, the vocabularies and the arrays of imported clicks, under commands that only read them."""
    one.own_home()
    store = one.folder / CLICKS
    damaged(one, files_in(store) if one.draw.random() < 0.5 else [store / "clicks.json"])
    # Without its description there is no dataset of that name.
    code = one.call(["data", "check", "mine"], READING, allowed=READ)
    if code == 0 and not same_files(store, one.lab.root / CLICKS):
        raise Failure("mismatch", "data check accepts damaged clicks")
    for arguments in (["data", "info", "mine"], ["data", "list"]):
        one.call(arguments, READING, allowed=READ)
    return "refused" if code else "completed"


def same_files(ours: Path, theirs: Path) -> bool:
    """Whether two folders have the same files; JSON may be written in another way."""

    def content(path: Path) -> object:
        if not path.is_file():
            return None
        return json.loads(path.read_bytes()) if path.suffix == ".json" else path.read_bytes()

    names = [path.relative_to(theirs) for path in files_in(theirs)]
    try:
        return all(content(ours / name) == content(theirs / name) for name in names)
    except (ValueError, RecursionError):
        return False


@kind("signals: data", 3)
def stopped_data(one: Try) -> str:
    """Signals while events or clicks are imported, or events generated; repeated, it leaves the same, and no draft."""
    name = one.draw.choice(["import", "clicks", "make"])
    one.done.append(name)

    def command(place: str) -> list[str]:
        one.home = one.folder / place
        store = one.home / "store"
        commands = {
            "import": import_events(one, store, 20_000),
            "clicks": import_clicks(one.lab),
            "make": make_events(store, 20_000),
        }
        return [*commands[name], "--json"]

    def digest(arguments: list[str]) -> str:
        answer = one.folder / "answer"
        answer.unlink(missing_ok=True)
        one.call(arguments, SLOW, allowed=(0,), stdout=str(answer))
        return str(json.loads(answer.read_bytes())["digest"])

    began = time.monotonic()
    expected = digest(command("untroubled"))
    seconds, arguments = time.monotonic() - began, command("troubled")
    for _ in range(one.draw.choice([1, 2, 3])):
        disturbed(one, arguments, seconds)
    if digest(arguments) != expected:
        raise Failure("mismatch", f"{name} leaves other data")
    if name == "clicks" and (left := [path.name for path in (one.home / "data" / "mine").iterdir()]) != ["clicks"]:
        raise Failure("mismatch", f"drafts are left: {left}")
    return "resumed"


@kind("signals: score", 3)
def stopped_scoring(one: Try) -> str:
    """Signals while a file is scored: the scores are complete or not there, and a repeated command leaves no draft."""
    output, expected = one.folder / "scores.csv", (one.lab.root / "untroubled" / "scores.csv").read_bytes()
    arguments, stopped = score(one.lab, one.folder), 0
    for last in [False] * one.draw.choice([1, 2, 3]) + [True]:
        stopped += (one.call(arguments, SLOW, allowed=(0,)) if last else disturbed(one, arguments, 1.5)) != 0
        if (last or output.exists()) and output.read_bytes() != expected:
            raise Failure("mismatch", "other scores")
    require_no_drafts(one.folder, output.name)
    return "resumed" if stopped else "completed"


@kind("signals: export", 2)
def stopped_export(one: Try) -> str:
    """Signals while a model is exported: the folder is complete or not there; repeated, it leaves no draft."""
    folder, expected = one.folder / "exported", one.lab.root / "untroubled" / "exported"
    arguments, done = export(one.lab, one.folder), False
    for _ in range(one.draw.choice([1, 2])):
        # A signal that came too late: the folder is there, and is not written again.
        done = disturbed(one, arguments, one.draw.choice([0.5, 8.0]), *[3] * done) == 0 or done
    one.call(arguments, SLOW, allowed=(3,) if folder.is_dir() else (0,))
    for path in files_in(expected):
        # The program is an archive with times.
        if path.suffix != ".pt2" and (folder / path.relative_to(expected)).read_bytes() != path.read_bytes():
            raise Failure("mismatch", f"another {path.name}")
    require_no_drafts(one.folder, folder.name)
    return "completed" if done else "resumed"


@kind("foreign folders", 3)
def foreign_folders(one: Try) -> str:
    """A user's folder where a command wants to write: it is refused, or used without touching what is there."""
    subject, place = one.subject(), one.folder / one.draw.choice(["run", "exported", "mine", "store"])
    one.done.append(place.name)
    if place.name == "mine":
        one.home = one.folder / "home"
        place = one.home / "data" / "mine"
        one.plant(place / "clicks")
    one.plant(place)
    log = place / "events.jsonl"
    log.write_bytes(b'{"kind": "step"}\nlast line without an end')
    commands = {
        "run": subject.begin(place),
        "exported": export(one.lab, one.folder),
        "mine": import_clicks(one.lab),
        "store": make_events(place, 5000),
    }
    code = one.call(commands[place.name], max(SLOW, subject.limit), allowed=READ)
    if log.read_bytes() != b'{"kind": "step"}\nlast line without an end':
        raise Failure("touched", f"a user's file was changed: {log}")
    return "refused" if code else "completed"
