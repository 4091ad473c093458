"""The rules on recorded evidence: no clock, no step is run. Which answers a changed rule changes, and which are wrong.

    python tests/evidence/record.py --accept

writes the answers of changed rules into the files, after it has shown them.
"""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import record
import torch
from evidence_files import (
    HERE,
    Answer,
    Recorded,
    Right,
    answer_of,
    changes,
    explained,
    mistakes,
    read,
    recorded_files,
    table,
)

import recperf
from recperf.execution.script import Program
from recperf.measure import attribution, observing
from recperf.measure.peaks.records import Peaks
from recperf.measure.records import Place, PlaceShare

RIGHT = 0.95
"""Share of the limits, of the places and of the advice of a machine that must be right."""
LARGEST = 2 << 20
HEADS = ("machine", "case", "what", "recorded", "now", "right")

ceilings_in = lru_cache(lambda path: read(path, Peaks))


@pytest.fixture(scope="module")
def cases() -> dict[Path, Recorded]:
    return {path: read(path) for path in recorded_files(HERE)}


def answers(cases: dict[Path, Recorded]) -> dict[Path, Answer]:
    return {path: answer_of(case, ceilings_in(path.parent / case.peaks)) for path, case in cases.items()}


def changed(cases: dict[Path, Recorded]) -> list[tuple[str, ...]]:
    """A row for everything that the rules of today say otherwise than those of the recording."""
    return [
        (path.parent.name, cases[path].name, *change, "; ".join(mistakes(answer, cases[path].right)) or "yes")
        for path, answer in answers(cases).items()
        for change in changes(cases[path].answer, answer)
    ]


def test_the_rules_answer_as_recorded(cases: dict[Path, Recorded]) -> None:
    assert cases, "no evidence is recorded"
    if rows := changed(cases):
        pytest.fail(f"the rules answer otherwise:\n\n{table(rows, HEADS)}\n", pytrace=False)


def test_a_changed_rule_shows_the_answers_that_it_changes(
    cases: dict[Path, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "EXPLAINED", 1.0)
    rows = changed(cases)
    assert any(what == "share of operator" and float(now) > float(before) for _, _, what, before, now, _ in rows)
    assert all(name in table(rows, HEADS) for _, name, *_ in rows)
    assert len(rows) < len(cases) * len(attribution.LIMITS)


def test_answers_are_right(cases: dict[Path, Recorded]) -> None:
    stated: defaultdict[tuple[str, str], int] = defaultdict(int)
    wrong: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, answer in answers(cases).items():
        case, machine = cases[path], path.parent.name
        right = case.right
        stated[machine, "limit"] += bool(right.limits)
        stated[machine, "place"] += right.function is not None and answer.limit in right.limits
        stated[machine, "advice"] += right.advice is not None or bool(right.never)
        for mistake in mistakes(answer, right):
            wrong[machine, mistake.partition(":")[0]].append(f"{machine}, {case.name}: {mistake}")
            assert not (mistake.startswith("limit") and answer.confidence == "high"), (machine, case.name, mistake)
    for key, listed in wrong.items():
        assert len(listed) <= (1 - RIGHT) * stated[key], "\n".join(listed)


def test_shares_sum_to_one_and_places_are_parts_of_them(cases: dict[Path, Recorded]) -> None:
    for path, case in cases.items():
        result = explained(case, ceilings_in(path.parent / case.peaks))
        assert sum(result.shares.values()) == pytest.approx(1.0), path
        assert sum(row.share for row in result.places) <= 1.001, path
        for advice in result.advice:
            low, high = advice.predicted_range or (0.0, 0.0)
            assert low <= (advice.predicted_gain or 0.0) <= high, (path, advice)


def test_right_answers_are_those_that_the_cases_declare(cases: dict[Path, Recorded]) -> None:
    known = {case.name: case for case in (*record.CASES, *record.FOLLOWED)}
    for path, case in cases.items():
        source = known.get(case.name.removesuffix(record.BESIDE))
        if case.planted and source is not None:
            device = "cpu" if case.observed.device == "cpu" else "cuda"
            assert case.right == record.right_of(source, device, busy=case.name.endswith(record.BESIDE)), path


def test_files_are_small_and_hold_no_folders_or_foreign_lines(cases: dict[Path, Recorded]) -> None:
    files = list(HERE.glob("*/*"))
    assert sum(path.stat().st_size for path in files) < LARGEST
    assert set(files) == {*cases, *(path.parent / case.peaks for path, case in cases.items())}
    for path, case in cases.items():
        places = [
            *(row.place for row in case.observed.operators if row.place),
            *(row.place for row in case.observed.places),
        ]
        assert all("/" not in place.file for place in places), path
        assert case.planted or not any(row.source for row in case.observed.places), path


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (Answer("input", "high", {}, "a.py:1 in f", 0.5, [("workers", 2.0)]), Right(["input"], "f", "workers"), []),
        (Answer("input", "high", {}), Right(["blocked"]), ["limit"]),
        (Answer("input", "high", {}, "a.py:1 in g"), Right(["input"], "f"), ["place"]),
        (Answer("input", "high", {}), Right(["input"], "f"), ["place"]),
        (Answer("input", "high", {}, "a.py:1 in f"), Right(["blocked"], "g"), ["limit"]),
        (Answer("input", "high", {}), Right(["input"], advice="workers"), ["advice"]),
        (Answer("input", "low", {}, advice=[("a", 2.0), ("b", 1.5)]), Right([], advice="b"), ["advice"]),
        (Answer("input", "low", {}, advice=[("a", 2.0)]), Right([], advice=""), ["advice"]),
        (Answer("input", "low", {}, advice=[("a", 2.0), ("b", 1.5)]), Right([], never=["b"]), ["advice"]),
        (Answer("input", "high", {}), Right([], confident=False), ["confidence"]),
    ],
)
def test_mistakes(answer: Answer, right: Right, wrong: list[str]) -> None:
    assert [mistake.partition(":")[0] for mistake in mistakes(answer, right)] == wrong


def test_changes() -> None:
    before = Answer(
        "input", "high", {"input": 0.8, "python": 0.2}, "a.py:1 in f", 0.5, [("workers", 2.0), ("pinned", None)]
    )
    assert list(changes(before, before)) == []
    after = Answer("input", "low", {"input": 0.8004, "blocked": 0.2}, "", 0.0, [("workers", 2.1), ("pinned", 1.1)])
    assert list(changes(before, after)) == [
        ("confidence", "high", "low"),
        ("place", "a.py:1 in f", "none"),
        ("share of blocked", "0.000", "0.200"),
        ("share of python", "0.200", "0.000"),
        ("share of the place", "0.500", "0.000"),
        ("gain of workers", "2.000", "2.100"),
        ("gain of pinned", "none", "1.100"),
    ]
    assert list(changes(before, Answer("input", "high", before.shares, before.place, 0.5))) == [
        ("advice", "workers, pinned", "none")
    ]


@pytest.fixture
def ready(cases: dict[Path, Recorded], monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """Few steps, and the ceilings of a recorded machine."""
    path, case = next((path, case) for path, case in cases.items() if case.observed.device == "cpu")
    peaks = ceilings_in(path.parent / case.peaks)
    monkeypatch.setattr(observing, "PLAIN_SECONDS", 0.05)
    monkeypatch.setattr("recperf.measure.peaks.require", lambda threads, say: peaks)
    monkeypatch.setattr(record, "measured_beside", lambda *figures: 0.0)


def test_a_step_is_recorded(ready: None, tmp_path: Path) -> None:
    x = torch.rand(64, 64)
    with record.listening() as heard:
        report = recperf.profile(lambda: x @ x, quiet=True, confirm=False)
    case = record.recorded("a, product!", heard[0], Right(["compute"]), tmp_path, planted=True)
    kept = read(tmp_path / "a-product.json.gz")
    assert kept == case
    assert answer_of(kept, read(tmp_path / kept.peaks, Peaks)) == kept.answer
    assert kept.answer.shares == pytest.approx(
        {name: one for name, one in report.shares.items() if one >= 1e-3}, abs=1e-3
    )
    assert [row.name for row in kept.observed.operators] == [row.name for row in report.operators]


PROGRAM = """
import torch

weight = torch.nn.Parameter(torch.ones(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(24):
    weight.sum().backward()  # only for its author
    optimizer.step()
"""


def test_a_program_keeps_its_lines_and_folders(ready: None, tmp_path: Path) -> None:
    script = tmp_path / "private folder" / "train.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    observed, *others = record.observe_program(Program(script))
    # Whether short steps are met by a sample is chance.
    observed.places = [PlaceShare("python", 1.0, Place("<module>", str(script), 7), PROGRAM.splitlines()[6])]
    case = record.recorded("train", (observed, *others), Right([]), tmp_path, planted=False)
    text = gzip.decompress((tmp_path / "train.json.gz").read_bytes()).decode()
    assert [row.place.file for row in case.observed.places] == ["train.py"]
    assert {row.place.file for row in case.observed.operators if row.place} == {"train.py"}
    assert not any(word in text for word in ("private", "author", "sum().backward", str(tmp_path)))


@pytest.fixture
def busy(ready: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Other work takes this share of the cores."""
    return lambda share: monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: share)


def test_a_busy_machine_is_not_recorded(busy: Callable[[float], None], tmp_path: Path) -> None:
    busy(0.5)
    x = torch.rand(64, 64)
    with record.listening() as heard:
        recperf.profile(lambda: x @ x, quiet=True, confirm=False)
    heard[0][0].threads, heard[0][0].preempted = 2, None
    with pytest.raises(record.NotRecorded, match="50% of the cores"):
        record.recorded("x", heard[0], Right(["compute"]), tmp_path, planted=True)
    assert not list(tmp_path.iterdir())
