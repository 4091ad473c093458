"""Trouble around a training: clicks that were imported, scoring, exports, and the folder of tables in files."""

from __future__ import annotations

import json
from pathlib import Path

from chaos_kinds import READING, REFUSED, damaged, disturbed, kind
from chaos_process import Failure, judge
from chaos_runs import CLICKS, Lab, Try
from mutations import files_in

SLOW = 6 * READING
"""Seconds for a command that starts another Python."""


def prepare(lab: Lab) -> None:
    """The scores and the export of a run of imported clicks."""
    if "dlrm-clicks" not in lab.subjects:
        return
    place = lab.root / "door"
    lab.call(score(lab, place / "scores.csv"))
    lab.call(export(lab, place / "exported"))


def score(lab: Lab, output: Path) -> list[str]:
    output.parent.mkdir(exist_ok=True)
    run = str(lab.subjects["dlrm-clicks"].straight)
    return ["score", run, "--input", str(lab.root / "clicks.csv"), "--output", str(output), "--device", "cpu"]


def export(lab: Lab, folder: Path) -> list[str]:
    return ["export", str(lab.subjects["dlrm-clicks"].straight), "--output", str(folder), "--device", "cpu"]


@kind("damage: imported clicks", 4)
def damaged_clicks(one: Try) -> str:
    """The description, the vocabularies and the arrays of imported clicks, under commands that only read them."""
    one.own_home()
    store = one.folder / CLICKS
    damaged(one, files_in(store) if one.draw.random() < 0.5 else [store / "clicks.json"])
    commands = [["data", "check", "mine"], ["data", "info", "mine"], ["data", "list"]]
    # Without its description there is no dataset of that name.
    code = one.call(commands[0], READING, allowed=(0, 2, *REFUSED))
    if code == 0 and not same_files(store, one.lab.root / CLICKS):
        raise Failure("mismatch", "data check accepts damaged clicks")
    for arguments in commands[1:]:
        one.call(arguments, READING, allowed=(0, 2, *REFUSED))
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


@kind("signals: score", 3)
def stopped_scoring(one: Try) -> str:
    """Signals while a file is scored: the same command gives the same scores, and no draft is left."""
    output = one.folder / "scores.csv"
    arguments, stopped = score(one.lab, output), 0
    for _ in range(one.draw.choice([1, 2, 3])):
        stopped += disturbed(one, one.start(arguments), 1.5, SLOW) != 0
    one.call(arguments, SLOW, allowed=(0,))
    if output.read_bytes() != (one.lab.root / "door" / "scores.csv").read_bytes():
        raise Failure("mismatch", "other scores")
    if left := [path.name for path in one.folder.glob(".scores.csv.*")]:
        raise Failure("mismatch", f"drafts are left: {left}")
    return "resumed" if stopped else "completed"


@kind("signals: export", 2)
def stopped_export(one: Try) -> str:
    """Signals while a model is exported: no draft is left after the command is repeated."""
    folder, done = one.folder / "exported", False
    arguments = export(one.lab, folder)
    for _ in range(one.draw.choice([1, 2])):
        span = one.draw.choice([0.5, 8.0])
        # A signal that came too late: the folder is there, and is not written again.
        done = disturbed(one, one.start(arguments), span, SLOW, *[3] * done) == 0 or done
    one.call(arguments, SLOW, allowed=(3,) if folder.is_dir() else (0,))
    expected = one.lab.root / "door" / "exported"
    for path in files_in(expected):
        # The program is an archive with times.
        if path.suffix != ".pt2" and (folder / path.relative_to(expected)).read_bytes() != path.read_bytes():
            raise Failure("mismatch", f"another {path.name}")
    left = [path.name for path in one.folder.glob(".exported.*") if path.name != ".exported.0a1b2c3d"]
    if left:
        raise Failure("mismatch", f"drafts are left: {left}")
    return "completed" if done else "resumed"


@kind("tables folder", 3)
def tables_folder(one: Try) -> str:
    """Kills of runs whose tables lie in files of a folder that a user has files in; what they left may be damaged."""
    subject = one.subject("micro-dlrm-dram", "dlrm")
    subject.lay_profile(one.run)
    tables = one.folder / "tables"
    one.plant(tables)
    placed = ["--tables.placement", "file", "--tables.folder", str(tables)]
    for _ in range(one.draw.choice([1, 2])):
        process = one.lab.process([*subject.go_on(one.run), *placed], one.log, home=one.home)
        disturbed(one, process, subject.seconds, subject.limit)
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


@kind("foreign folders", 3)
def foreign_folders(one: Try) -> str:
    """A user's folder where a command wants to write: it is refused, or used without touching what is there."""
    subject = one.subject()
    place = one.folder / one.draw.choice(["run", "exported", "mine", "store"])
    one.plant(place)
    log = place / "events.jsonl"
    log.write_bytes(b'{"kind": "step"}\nlast line without an end')
    commands = {
        "run": subject.begin(place),
        "exported": export(one.lab, place),
        "mine": ["data", "import", str(one.lab.root / "clicks.csv"), "--clicks", "--name", "mine"],
        "store": ["data", "make", "yambda-like", "--path", str(place), "--events", "5000"],
    }
    if place.name == "mine":
        one.home = one.folder / "home"
        one.plant(one.home / "data" / "mine")
        one.plant(one.home / "data" / "mine" / "clicks")
    one.done.append(place.name)
    code = one.call(commands[place.name], max(SLOW, subject.limit), allowed=(0, 2, *REFUSED))
    if log.read_bytes() != b'{"kind": "step"}\nlast line without an end':
        raise Failure("touched", f"a user's file was changed: {log}")
    return "refused" if code else "completed"
