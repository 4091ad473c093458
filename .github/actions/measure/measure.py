"""Measures two checkouts of a repository in turns on this machine, and says whether the second is slower.

    python measure.py --base FOLDER --head FOLDER --arguments "micro-dlrm --data.source embedded" --output report

Both are profiled several times by `recperf profile ARGUMENTS`, in the order base, head, head, base, and so on: a
machine that becomes slower or faster does so for both. The figures of all rounds together are compared as
`recperf compare` compares two profiles. Exits with 5 if the step, or a part of at least 5 % of it, got slower by more
than the gate. With --comment the table is written to the pull request, over the comment of an earlier call.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recperf.errors import RecperfError
from recperf.measure.peaks.other_work import DISTURBED
from recperf.measure.profile import SCHEMA
from recperf.measure.records import Percentiles
from recperf.runs.compare import TimeChange, changed, parse_gate
from recperf.runs.report.formats import component, percent, printable, spread, time
from recperf.runs.sides import TimedPart

MARK = "<!-- recperf-measure -->"
"""First line of the comment, by which a later call finds it."""
FEWEST_ROUNDS = 4
"""With fewer undisturbed rounds nothing is judged: by chance alone, one of 20 orders of three and three is sorted."""
SHOWN = 8
TITLES = {
    "slower": "slower",
    "faster": "faster",
    "same": "no difference beyond noise",
    "not judged": "not judged",
}
Profile = dict[str, Any]


class NoProfile(Exception):
    """A checkout could not be profiled."""


@dataclass(frozen=True)
class Judgement:
    state: str
    """A key of TITLES."""
    reason: str
    changes: list[TimeChange] = field(default_factory=list)
    gates: dict[str, float] = field(default_factory=dict)
    """By part: what it may get slower."""
    rounds: int = 0


def pooled(rounds: list[dict[str, float]]) -> Percentiles:
    """One spread from several rounds of the same measurement: the median of the medians, and the whole range."""
    middle = statistics.median(ms["p50"] for ms in rounds)
    return Percentiles(p20=min(ms["p20"] for ms in rounds), p50=middle, p80=max(ms["p80"] for ms in rounds))


def variation(rounds: list[dict[str, float]]) -> float:
    """How far the medians of several rounds lie apart, as a share of their median."""
    medians = [ms["p50"] for ms in rounds]
    middle = statistics.median(medians)
    return (max(medians) - min(medians)) / middle if middle else 0.0


def measure(base: Path, head: Path, arguments: list[str], rounds: int, output: Path) -> list[tuple[Profile, Profile]]:
    """Profiles of both sides, round by round; disturbed rounds are repeated, at most as often as there are rounds."""
    pairs: list[tuple[Profile, Profile]] = []
    sides = {"base": base.resolve(), "head": head.resolve()}
    for number in range(2 * rounds):
        order = ("base", "head") if number % 2 == 0 else ("head", "base")
        profiles = {side: profile(sides[side], arguments, output / f"{side}-{number}") for side in order}
        pairs.append((profiles["base"], profiles["head"]))
        if number + 1 >= rounds and len(undisturbed(pairs)) >= rounds:
            break
        if number + 1 >= rounds and len(undisturbed(pairs)) + 2 * rounds - number - 1 < FEWEST_ROUNDS:
            break  # Enough undisturbed rounds are out of reach.
    return pairs


def profile(checkout: Path, arguments: list[str], folder: Path) -> Profile:
    """One profile of a checkout, by its own recperf where its sources hold one, otherwise by the installed one."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.resolve() / "run" / "profile.json"
    options = ["--no-report", "--quiet", "--run-dir", str(file.parent)]
    if "--script" in arguments:
        arguments = [*arguments[:2], *options, "--no-try", *arguments[2:]]
    else:
        arguments = [*arguments, "--no-confirm", "--no-peaks", *options]
    own = checkout / "src" / "recperf"
    paths = [str(checkout / "src")] if own.is_dir() else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    }
    command = [sys.executable, "-m", "recperf", "profile", *arguments]
    called = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if called.returncode or not file.is_file():
        raise NoProfile(f"exit code {called.returncode}: {printable(called.stderr.strip()[-400:])}")
    content: Profile = json.loads(file.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        raise NoProfile(f"its recperf writes profiles of schema {content.get('schema')!r}; this one compares {SCHEMA}")
    return content


def times(profile: Profile) -> dict[str, tuple[dict[str, float], float]]:
    """Time and share of the step and of its parts. Of a program's profile only the step has a spread."""
    figures = profile["workload"] or {"step_ms": profile["step_ms"], "components": []}
    parts = {part["name"]: (part["ms"], part["share"]) for part in figures["components"]}
    return {"step": (figures["step_ms"], 1.0), **parts}


def other_work(profile: Profile) -> float:
    return profile["other_work"] or 0.0


def undisturbed(pairs: list[tuple[Profile, Profile]]) -> list[tuple[Profile, Profile]]:
    return [pair for pair in pairs if max(map(other_work, pair)) <= DISTURBED]


def judge(pairs: list[tuple[Profile, Profile]], least_gate: float) -> Judgement:
    """Compare the undisturbed rounds. A part may get slower by the gate, or by what it varies between equal rounds."""
    quiet = undisturbed(pairs)
    if len(quiet) < FEWEST_ROUNDS:
        share = percent(max(max(map(other_work, pair)) for pair in pairs)) if pairs else "none"
        reason = (
            f"only {len(quiet)} of {len(pairs)} rounds were undisturbed: other work took up to {share} of the cores"
        )
        return Judgement("not judged", reason, rounds=len(quiet))
    sides = [[times(profile) for profile in side] for side in zip(*quiet)]
    changes, gates = [], {}
    for name in sides[0][0]:
        both = [[one[name] for one in side if name in one] for side in sides]
        if any(len(side) < len(quiet) for side in both):
            continue
        spreads = [[ms for ms, _ in side] for side in both]
        share = max(share for side in both for _, share in side)
        before, after = (TimedPart(ms=pooled(side), share=share) for side in spreads)
        changes.append(changed(name, before, after))
        gates[changes[-1].name] = max(least_gate, *(variation(side) for side in spreads))
    slower = [one for one in changes if one.exceeds(gates[one.name])]
    if slower:
        listed = ", ".join(f"{component(one.name)} {one.text}" for one in slower)
        return Judgement("slower", listed, changes, gates, len(quiet))
    step = changes[0]
    faster = step.says == "faster" and step.change is not None and -step.change > gates["step"]
    state, reason = ("faster", f"step {step.text}") if faster else ("same", "")
    return Judgement(state, reason, changes, gates, len(quiet))


def comment(judgement: Judgement, arguments: list[str], names: tuple[str, str]) -> str:
    """The Markdown of the comment."""
    title = TITLES[judgement.state] + (f": {judgement.reason}" if judgement.reason else "")
    what = shlex.join(arguments).replace("`", "'")
    lines = [MARK, f"**recperf: {title}**", ""]
    if judgement.changes:
        lines += [f"| | {names[0]} | {names[1]} | change | allowed | |", "|---|---|---|---|---|---|"]
        step, *parts = judgement.changes
        parts.sort(key=lambda part: -part.share)
        for part in (step, *parts[:SHOWN]):
            assert part.old_ms
            assert part.new_ms
            cells = [f"{time(ms.p50)} ({spread(ms)})" for ms in (part.old_ms, part.new_ms)]
            allowed = f"+{percent(judgement.gates[part.name], 1)}"
            row = [cell(component(part.name)), *cells, part.text, allowed, part.says]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    lines.append(
        f"`recperf profile {what}`, {judgement.rounds} undisturbed rounds in turns on one machine: the median of the "
        "medians, from the lowest p20 to the highest p80. A change counts if these ranges do not overlap and it is "
        "larger than allowed."
    )
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def publish(text: str, repository: str, number: int, token: str, api: str) -> str:
    """Write the comment of a pull request, over an earlier one of ours; returns what was done."""
    address = f"{api}/repos/{repository}/issues/{number}/comments"
    page = 1
    while True:
        comments = call("GET", f"{address}?per_page=100&page={page}", token)
        for one in comments:
            if one["body"].startswith(MARK):
                call("PATCH", f"{api}/repos/{repository}/issues/comments/{int(one['id'])}", token, {"body": text})
                return "updated"
        if len(comments) < 100:
            call("POST", address, token, {"body": text})
            return "created"
        page += 1


def call(method: str, address: str, token: str, body: dict[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    request = urllib.request.Request(address, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout of the commit to compare with")
    parser.add_argument("--head", type=Path, required=True, help="checkout of the commit to judge")
    parser.add_argument("--arguments", required=True, help="what follows `recperf profile`")
    parser.add_argument("--rounds", type=int, default=6, help=f"profiles of each side, at least {FEWEST_ROUNDS}")
    parser.add_argument("--gate", default="5%", help="a slowdown up to this is allowed; more, where rounds vary more")
    parser.add_argument("--output", type=Path, default=Path("recperf-measure"), help="folder of profiles and report")
    parser.add_argument("--comment", action="store_true", help="write to the pull request (GITHUB_* variables)")
    options = parser.parse_args(words)
    if options.rounds < FEWEST_ROUNDS:
        parser.error(f"--rounds is {options.rounds}; allowed: at least {FEWEST_ROUNDS}")
    try:
        gate = parse_gate(options.gate)
    except RecperfError as error:
        parser.error(error.what)
    arguments = shlex.split(options.arguments)
    try:
        judgement = judge(measure(options.base, options.head, arguments, options.rounds, options.output), gate)
    except NoProfile as error:
        judgement = Judgement("not judged", f"a commit could not be profiled: {error}")
    text = comment(judgement, arguments, ("base", "head"))
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(text)
    if options.comment:
        number = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text())["pull_request"]["number"]
        api = os.environ.get("GITHUB_API_URL", "https://api.github.com")
        try:
            print(
                "comment", publish(text, os.environ["GITHUB_REPOSITORY"], int(number), os.environ["GITHUB_TOKEN"], api)
            )
        except urllib.error.URLError as error:
            # A pull request from a fork may not write comments; the summary of the job has the table.
            print(f"no comment written: {error}", file=sys.stderr)
    return 5 if judgement.state == "slower" else 0


if __name__ == "__main__":
    sys.exit(main())
