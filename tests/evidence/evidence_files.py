"""Recorded evidence: what was observed, counted and measured of a step, and beside it the right answer and the rules'
own.

A folder holds what one machine recorded: a file for each case, which no rule has touched, the ceilings that they share,
and answers.json with a line for each case: what is right, what the rules say, and what is wrong about that.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from recperf.measure.advice_rules import explain
from recperf.measure.ceilings import ceilings_of
from recperf.measure.peaks.records import Peaks
from recperf.measure.places import place_text
from recperf.measure.program_records import ProgramFacts
from recperf.measure.records import Experiment, Explanation, Observed, Place

HERE = Path(__file__).parent
PEAKS, ANSWERS = "peaks-", "answers.json"
"""The first begins the names of files with ceilings."""
DIGITS = 6
"""Significant digits of what is recorded."""
NEAR = 1e-3
"""Shares and gains that differ by less are the same answer."""


class Right(Struct):
    """What is true of a step, whatever the rules say."""

    limits: list[str]
    """Limits that are right; empty: not stated."""
    function: str | None = None
    """The function that must be the first place of the limit; None: not stated."""
    advice: str | None = None
    """The rule whose advice must come first, "" where every advice is wrong; None: not stated."""
    never: list[str] = []
    """Rules whose advice is wrong."""
    confident: bool = True
    """Whether a high confidence can be right; beside other work it cannot."""


class Answer(Struct):
    """What the rules say about a step."""

    limit: str
    confidence: str
    shares: dict[str, float]
    """Without those of less than a thousandth."""
    place: str = ""
    """The first one of the limit."""
    place_share: float = 0.0
    advice: list[tuple[str, float | None]] = []
    """Rules with the gains that they predict, in their order."""
    doubts: int = 0
    """What lowers the confidence."""


class Recorded(Struct):
    """The evidence of one step."""

    name: str
    machine: str
    torch: str
    planted: bool
    """Whether it is one of the planted cases, not a program of somebody else."""
    peaks: str
    """The file with the ceilings, beside this one."""
    observed: Observed
    facts: ProgramFacts
    experiments: list[Experiment]


class Answered(Struct):
    """A line of answers.json."""

    right: Right
    answer: Answer
    wrong: list[str] = []


class Case(NamedTuple):
    path: Path
    recorded: Recorded
    peaks: Peaks
    answered: Answered

    @property
    def machine(self) -> str:
        return self.path.parent.name


def read_cases(folder: Path) -> Iterator[Case]:
    """The cases in a folder and in those inside it."""
    for answers in sorted(folder.rglob(ANSWERS)):
        at, peaks = answers.parent, dict[str, Peaks]()
        for name, answered in read_answers(at).items():
            recorded = read(at / name)
            if recorded.peaks not in peaks:
                peaks[recorded.peaks] = read(at / recorded.peaks, Peaks)
            yield Case(at / name, recorded, peaks[recorded.peaks], answered)


def read_answers(folder: Path) -> dict[str, Answered]:
    """What answers.json says, by the names of the files."""
    path = folder / ANSWERS
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Answered]) if path.exists() else {}


def write_answers(folder: Path, answers: dict[str, Answered]) -> None:
    lines = (f"{json.dumps(name)}: {_content(answers[name]).decode()}" for name in sorted(answers))
    (folder / ANSWERS).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def answered(recorded: Recorded, peaks: Peaks, right: Right) -> Answered:
    """What the rules of today say, and what is wrong about it."""
    answer = answer_of(recorded, peaks)
    return Answered(right, answer, list(mistakes(answer, right)))


def read(path: Path, kind: type[Any] = Recorded) -> Any:
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=kind)


def write(path: Path, record: Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(_content(record), mtime=0))


def _content(record: Struct) -> bytes:
    return msgspec.json.encode(_rounded(to_builtins(record)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def write_peaks(folder: Path, peaks: Peaks) -> str:
    """Store ceilings once, whoever uses them, and return the name of their file."""
    name = f"{PEAKS}{hashlib.sha256(_content(peaks)).hexdigest()[:8]}.json.gz"
    write(folder / name, peaks)
    return name


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def portable(observed: Observed, *, planted: bool) -> Observed:
    """What is observed, without the picture of a step and the folders of this machine; a program that is not ours also
    keeps its lines for itself."""

    def place(one: Place) -> Place:
        return replace(one, file=Path(one.file).name)

    operators = [replace(row, place=place(row.place) if row.place else None) for row in observed.operators]
    places = [replace(row, place=place(row.place), source=row.source if planted else "") for row in observed.places]
    return replace(observed, timeline=None, operators=operators, places=places)


def explained(case: Recorded, peaks: Peaks) -> Explanation:
    """What the rules of today make of recorded evidence."""
    ceilings = ceilings_of(peaks, device=case.observed.device, threads=case.observed.threads)
    return explain(case.observed, ceilings, case.facts, case.experiments)


def answer_of(case: Recorded, peaks: Peaks) -> Answer:
    result = explained(case, peaks)
    verdict = result.verdict
    first = next((row for row in result.places if row.limit == verdict.limit), None)
    return Answer(
        verdict.limit,
        verdict.confidence,
        {limit: round(share, 4) for limit, share in result.shares.items() if share >= NEAR},
        place_text(first),
        round(first.share, 4) if first else 0.0,
        [(one.name, one.predicted_gain and round(one.predicted_gain, 4)) for one in result.advice],
        len(verdict.doubts),
    )


def mistakes(answer: Answer, right: Right) -> Iterator[str]:
    """What is wrong about an answer: limit, confidence, place or advice, with what would be right."""
    if right.limits and answer.limit not in right.limits:
        yield f"limit: {answer.limit} ({answer.confidence}), right is {' or '.join(right.limits)}"
    if not right.confident and answer.confidence == "high":
        yield "confidence: high beside other work"
    if (
        right.function is not None
        and answer.limit in right.limits
        and answer.place.rpartition(" in ")[2] != right.function
    ):
        yield f"place: {answer.place or 'none'}, right is {right.function}"
    rules = [name for name, _ in answer.advice]
    if right.advice is not None and "".join(rules[:1]) != right.advice:
        yield f"advice: {', '.join(rules) or 'none'}, right is {right.advice or 'none'}"
    if wrong := [name for name in rules if name in right.never]:
        yield f"advice: {', '.join(wrong)} is wrong"


def changes(before: Answer, after: Answer) -> Iterator[tuple[str, str, str]]:
    """What differs between two answers: its name, the value before and the one after."""
    for name in ("limit", "confidence", "place"):
        if getattr(before, name) != getattr(after, name):
            yield name, getattr(before, name) or "none", getattr(after, name) or "none"
    if before.doubts != after.doubts:
        yield "doubts", str(before.doubts), str(after.doubts)
    for limit in sorted({*before.shares, *after.shares}):
        first, second = before.shares.get(limit, 0.0), after.shares.get(limit, 0.0)
        if abs(first - second) > NEAR:
            yield f"share of {limit}", f"{first:.3f}", f"{second:.3f}"
    if abs(before.place_share - after.place_share) > NEAR:
        yield "share of the place", f"{before.place_share:.3f}", f"{after.place_share:.3f}"
    if [name for name, _ in before.advice] != [name for name, _ in after.advice]:
        yield "advice", *(", ".join(name for name, _ in one.advice) or "none" for one in (before, after))
        return
    for (name, first), (_, second) in zip(before.advice, after.advice):
        if (first is None) != (second is None) or abs((first or 0.0) - (second or 0.0)) > NEAR * (first or 1.0):
            yield f"gain of {name}", *("none" if gain is None else f"{gain:.3f}" for gain in (first, second))


def table(rows: list[tuple[str, ...]], heads: tuple[str, ...]) -> str:
    """Rows as text, in columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in (heads, *rows)
    )
