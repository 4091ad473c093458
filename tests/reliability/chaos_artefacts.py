"""Artefacts whose files are no files any more, outputs onto existing files, and logs with one user, item or time."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
from pathlib import Path

import example_profiles
from chaos_files import READ, SLOW, export, import_events, score
from chaos_kinds import READING, kind
from chaos_process import Failure
from chaos_runs import CLICKS, Try
from mutations import files_in

from recperf.files import write_json
from recperf.jsonfile import sealed

ONE_ROWS = 40_000
"""Rows of a log with one user, item or time."""
MEMORY_MIB, MARGIN_MIB = 256, 700
"""The limit that such an import is given, and what Python, pyarrow and DuckDB take beside it."""


def replaced(one: Try, path: Path) -> str:
    """Put a folder, a fifo or a link in the place of a file."""
    how = one.draw.choice(["folder", "fifo", "link", "link to itself", "link to a fifo"])
    content = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "link to itself":
        path.symlink_to(path)
    elif how == "link to a fifo":
        os.mkfifo(one.folder / "fifo")
        path.symlink_to(one.folder / "fifo")
    else:
        target = one.folder / "elsewhere.bin"
        target.write_bytes(content)
        path.symlink_to(target)
    one.done.append(f"{path.name}: {how}")
    return how


@kind("no file: artefacts", 6)
def no_files(one: Try) -> str:
    """Any file of a run, a store of events or clicks, an export or a profile is a folder, a fifo or a link."""
    what = one.draw.choice(["run", "events", "clicks", "checkpoint", "export", "profile"])
    one.done.append(what)
    commands: list[list[str]] = []
    place = one.folder / what
    if what in ("run", "checkpoint"):
        subject = one.subject("dlrm-clicks")
        shutil.copytree(subject.straight, place)
        rows = ["--input", str(one.lab.root / "clicks.csv"), "--output", str(one.folder / "s.csv"), "--device", "cpu"]
        commands = [
            ["check", str(place)], ["report", str(place), "--out", str(one.folder / "page.html")],
            ["compare", str(place), str(subject.straight), "--gate", "5%"], ["score", str(place), *rows],
        ]  # fmt: skip
        files = files_in(place / "checkpoints") if what == "checkpoint" else [p for p in place.iterdir() if p.is_file()]
    elif what == "events":
        one.call(import_events(one, place, 300), 3 * READING, allowed=(0,))
        files = files_in(place)
        commands = [
            ["data", "check", "yambda-like", "--path", str(place)],
            ["data", "info", "yambda-like", "--path", str(place)],
        ]
    elif what == "clicks":
        one.own_home()
        files = files_in(one.folder / CLICKS)
        commands = [["data", "check", "mine"], ["data", "info", "mine"], ["data", "list"]]
    elif what == "export":
        shutil.copytree(one.lab.root / "untroubled" / "exported", place)
        files = files_in(place)
        commands = [export(one.lab, one.folder / "another"), [*export(one.lab, one.folder)[:3], str(place)]]
    else:
        place.mkdir()
        (place / ".profile").touch()
        write_json(place / "profile.json", sealed(example_profiles.eager()))
        files = [place / "profile.json"]
        commands = [["compare", str(place), str(place)], ["report", str(place), "--out", str(one.folder / "p.html")]]
    names = ("process-2024-results", "notes.txt", "my.jsonl")
    replaced(one, one.draw.choice(sorted(path for path in files if not set(path.parts) & set(names))))
    failed = False
    for arguments in commands:
        failed |= one.call(arguments, SLOW, allowed=(*READ, 5)) != 0
    return "refused" if failed else "completed"


@kind("outputs: existing files", 4)
def existing_outputs(one: Try) -> str:
    """A command is to write where a file of the user, of a run or of a dataset is: it refuses, and nothing changes."""
    run = one.folder / "copied"
    shutil.copytree(one.subject("dlrm-clicks").straight, run)
    store = one.own_home() / "data" / "mine" / "clicks"
    theirs = {
        one.folder / "data.csv": b"user,item\n1,2\n",
        one.folder / "page.html": b"<html>mine</html>",
        one.folder / "picture.svg": b"<svg/>",
    }
    for path, content in theirs.items():
        path.write_bytes(content)
    (one.folder / "link.html").symlink_to(one.folder / "page.html")
    (one.folder / "link.csv").symlink_to(one.folder / "data.csv")
    own = [path for path in (*files_in(run), *files_in(store)) if path.name != ".lock"]
    target = one.draw.choice([*theirs, one.folder / "link.html", one.folder / "link.csv", *own])
    one.done.append(str(target.relative_to(one.folder)))
    before = {path: path.read_bytes() for path in (*theirs, *own)}
    commands = [
        ["report", str(run), "--out", str(target)],
        ["plan", "dlrm", "--out", str(target)],
        [*score(one.lab, one.folder)[:4], "--output", str(target), "--device", "cpu"],
    ]
    force = ["--force"] if target in own and one.draw.random() < 0.5 else []
    one.call([*one.draw.choice(commands), *force], SLOW, allowed=(2, 3))
    changed = [path for path, content in before.items() if not path.is_file() or path.read_bytes() != content]
    if changed:
        raise Failure("touched", f"{changed[0]} was changed by an output")
    return "refused"


@kind("one user, item or time", 3)
def degenerate_log(one: Try) -> str:
    """A log whose rows have one user, one item or one time is imported within its memory, or refused with one line."""
    same = {name for name in ("user", "item", "time") if one.draw.random() < 0.6} or {"user"}
    one.done.append(" and ".join(sorted(same)))
    log, store = one.folder / "log.csv.gz", one.folder / "store"
    with gzip.open(log, "wt", compresslevel=1) as file:
        file.write("u,i,t\n")
        for row in range(ONE_ROWS):
            user, item, moment = row % 977, row % 331, row * 7919 % 10**6
            file.write(f"{1 if 'user' in same else user},{1 if 'item' in same else item},"
                       f"{1 if 'time' in same else moment}\n")  # fmt: skip
    columns = ["--user", "u", "--item", "i", "--time", "t", "--memory-mib", str(MEMORY_MIB)]
    command = ["data", "import", str(log), *columns, "--name", "one", "--store", str(store)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    code = one.call(command, SLOW, allowed=(0, 3))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if peak > before and peak >> 10 > MEMORY_MIB + MARGIN_MIB:
        raise Failure("mismatch", f"an import with {MEMORY_MIB} MiB took {peak >> 10} MiB")
    if code == 0:
        one.call(["data", "check", "yambda-like", "--path", str(store)], SLOW, allowed=(0,))
    return "refused" if code else "completed"
