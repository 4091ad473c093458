"""Public programs: whether `recperf profile --script --learning` names a planted bug of learning, with the module or
the line, and says nothing at high of programs without one.

    python benchmarks/watched_programs.py PROGRAMS [--only TEXT] [--dry]

PROGRAMS is a folder with checkouts or git directories of the repositories, each named owner+name. One row for the
planted bugs and one for the sound programs. Exit 5 where a bug is not named, or a sound program gets a finding at high.
A program that does not run, as where a package is missing, is counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _rows import record, row
from _watched_programs import BUGS, SOUND, Program


def checked_out(program: Program, programs: Path, into: Path) -> str:
    """Writes the files of a repository; returns its commit."""
    folder = programs / program.repository.replace("/", "+")
    places = (folder / "repo" / ".git", folder / "repo", folder / ".git", folder)
    git = next((place for place in places if (place / "HEAD").exists()), None)
    if git is None:
        raise FileNotFoundError(f"no repository in {folder}")
    command = ["git", f"--git-dir={git}", f"--work-tree={into}"]
    # Large files may be missing: then a made-up one takes their place.
    subprocess.run([*command, "checkout", "-f", "HEAD", "--", "."], capture_output=True, check=False)
    head = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return head.stdout.strip()


def changed(program: Program, root: Path) -> None:
    for file, edits in program.edits.items():
        content = (root / file).read_text()
        for old, new in edits:
            if old not in content:
                raise ValueError(f"{program.name}: {old!r} is not in {file}")
            content = content.replace(old, new)
        (root / file).write_text(content)


def watched(program: Program, programs: Path) -> dict[str, Any]:
    """What is found in a program."""
    facts: dict[str, Any] = {"program": program.name, "repository": program.repository, "planted": program.finding}
    with tempfile.TemporaryDirectory() as name:
        root, output = Path(name, "program"), Path(name, "output")
        root.mkdir()
        facts["commit"] = checked_out(program, programs, root)
        changed(program, root)
        if program.data:
            program.data(root)
        environment = {**os.environ, **program.environment}
        paths = [str(root)] if "PYTHONPATH" in program.environment else []
        environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "recperf", "profile", "--script", program.script, "--learning", "--json"]
        command += ["--no-report", "--no-peaks", "--no-try", "--run-dir", str(output), "--", *program.arguments]
        done = subprocess.run(
            command,
            cwd=root / program.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    try:
        learning = json.loads(done.stdout)["learning"]
    except (ValueError, KeyError):
        # Without a step there is no profile, only what was found.
        if program.finding == "no-step" and "No optimizer stepped" in done.stderr:
            return {**facts, "outcome": "named", "steps": 0}
        return {**facts, "outcome": "did not run", "error": done.stderr[-600:]}
    findings = learning["findings"]
    named = [one for one in findings if one["name"] == program.finding and program.where in one["where"]]
    high = [one for one in findings if one["confidence"] == "high"]
    outcome = ("named" if named else "not named") if program.finding else ("high" if high else "nothing at high")
    said = [{key: one[key] for key in ("name", "where", "confidence", "sentence")} for one in findings]
    return {**facts, "outcome": outcome, "steps": learning["steps"], "findings": said}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path)
    parser.add_argument("--only", default="", help="programs whose name contains this text")
    parser.add_argument("--dry", action="store_true", help="store no rows")
    options = parser.parse_args()
    rows, good, of = [], 0, 0
    for variant, cases, right in (("planted bugs", BUGS, "named"), ("nothing wrong", SOUND, "nothing at high")):
        outcomes = []
        for program in (one for one in cases if options.only in one.name):
            outcomes.append(facts := watched(program, options.programs.resolve()))
            print(f"{program.name:60} {facts['outcome']}", flush=True)
            for one in facts.get("findings", []):
                print(f"    {one['confidence']:6} {one['name']:14} {one['sentence']}", flush=True)
            if "error" in facts:
                print(facts["error"], flush=True)
        ran = [one for one in outcomes if one["outcome"] != "did not run"]
        counts = {
            name: sum(one["outcome"] == name for one in outcomes) for name in {one["outcome"] for one in outcomes}
        }
        good, of = good + counts.get(right, 0), of + len(ran)
        print(f"{variant}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
        if ran:
            values = [float(one["outcome"] == right) for one in ran]
            rows.append(row("watched_programs", variant, right, "program", values, {**counts, "programs": outcomes}))
    if rows and not options.dry:
        print(f"rows in {record(rows)}")
    return 0 if good == of else 5


if __name__ == "__main__":
    sys.exit(main())
