"""The rules on recorded evidence: no clock, no step is run. Which answers a changed rule changes, and which are wrong.

    python tests/evidence/record.py --accept

writes the answers of changed rules into the files, after it has shown them.
"""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import record
import torch
from evidence_files import (
    ANSWERS,
    HERE,
    Answer,
    Case,
    Right,
    answered,
    changes,
    explained,
    mistakes,
    read_cases,
    table,
)

import recperf
from recperf.execution.script import Program
from recperf.measure import attribution, schedule
from recperf.measure.records import Place, PlaceShare

RIGHT = {"limit": 0.95, "confidence": 1.0, "place": 0.8, "advice": 0.8}
"""Share of the answers of a machine that must be right; all that are wrong stand in its answers.json."""
LARGEST = 2 << 20
HEADS = ("machine", "case", "what", "recorded", "now", "right")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(read_cases(HERE))


def changed(cases: list[Case]) -> list[tuple[str, ...]]:
    """A row for everything that the rules of today say otherwise than those of the recording."""
    rows = []
    for case in cases:
        now = answered(case.recorded, case.peaks, case.answered.right)
        right = "; ".join(now.wrong) or "yes"
        for change in changes(case.answered.answer, now.answer):
            rows.append((case.machine, case.recorded.name, *change, right))
    return rows


def test_the_rules_answer_as_recorded(cases: list[Case]) -> None:
    assert cases, "no evidence is recorded"
    if rows := changed(cases):
        pytest.fail(f"the rules answer otherwise:\n\n{table(rows, HEADS)}\n", pytrace=False)


def test_a_changed_rule_shows_the_answers_that_it_changes(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "EXPLAINED", 1.0)
    rows = changed(cases)
    assert any(what == "share of operator" and float(now) > float(before) for _, _, what, before, now, _ in rows)
    assert all(name in table(rows, HEADS) for _, name, *_ in rows)
    # What waits alone limits stays as it is.
    assert {name for _, name, *_ in rows} < {case.recorded.name for case in cases}


def test_answers_are_right(cases: list[Case]) -> None:
    stated: Counter[tuple[str, str]] = Counter()
    wrong: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for case in cases:
        right, answer = case.answered.right, case.answered.answer
        stated[case.machine, "limit"] += bool(right.limits)
        stated[case.machine, "place"] += right.function is not None and answer.limit in right.limits
        stated[case.machine, "advice"] += right.advice is not None or bool(right.never)
        for mistake in mistakes(answer, right):
            what = mistake.partition(":")[0]
            wrong[case.machine, what].append(f"{case.machine}, {case.recorded.name}: {mistake}")
            assert (what, answer.confidence) != ("limit", "high"), wrong[case.machine, what][-1]
        assert case.answered.wrong == list(mistakes(answer, right)), case.path
    for (machine, what), listed in wrong.items():
        assert len(listed) <= (1 - RIGHT[what]) * stated[machine, what], "\n".join(listed)


def test_shares_sum_to_one_and_gains_lie_in_their_ranges(cases: list[Case]) -> None:
    for case in cases:
        result = explained(case.recorded, case.peaks)
        assert sum(result.shares.values()) == pytest.approx(1.0), case.path
        assert sum(row.share for row in result.places) <= 1.001, case.path
        for advice in result.advice:
            low, high = advice.predicted_range or (0.0, 0.0)
            assert low <= (advice.predicted_gain or 0.0) <= high, (case.path, advice)


def test_right_answers_are_those_that_the_cases_declare(cases: list[Case]) -> None:
    for case in cases:
        assert case.answered.right == record.declared(case), case.path


def test_files_are_small_and_hold_no_folders_or_foreign_lines(cases: list[Case]) -> None:
    files = set(HERE.glob("*/*")) - set(HERE.glob("__pycache__/*"))
    assert sum(path.stat().st_size for path in files) < LARGEST
    expected = {(case.path, case.path.parent / case.recorded.peaks, case.path.parent / ANSWERS) for case in cases}
    assert files == {path for paths in expected for path in paths}
    for case in cases:
        observed = case.recorded.observed
        operators = (row.place for row in observed.operators if row.place)
        assert not any("/" in place.file for place in (*operators, *(row.place for row in observed.places))), case.path
        assert case.recorded.planted or not any(row.source for row in observed.places), case.path


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
    after = Answer("input", "low", {"input": 0.8004, "blocked": 0.2}, "", 0.0, [("workers", 2.1), ("pinned", 1.1)], 2)
    assert list(changes(before, after)) == [
        ("confidence", "high", "low"),
        ("place", "a.py:1 in f", "none"),
        ("doubts", "0", "2"),
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
def ready(cases: list[Case], monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """Few steps, and the ceilings of a recorded machine."""
    peaks = next(case.peaks for case in cases if case.recorded.observed.device == "cpu")
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.05)
    monkeypatch.setattr("recperf.measure.peaks.require", lambda threads, say: peaks)
    monkeypatch.setattr(record, "measured_beside", lambda *figures: 0.0)


def test_a_step_is_recorded(ready: None, tmp_path: Path) -> None:
    x = torch.rand(64, 64)
    with record.listening() as heard:
        report = recperf.profile(lambda: x @ x, quiet=True, confirm=False)
    case = record.recorded("a, product!", heard[0], Right(["compute"]), tmp_path, planted=True)
    assert list(read_cases(tmp_path)) == [case]
    assert case.path.name == "a-product.json.gz"
    kept, answer = case.recorded, case.answered.answer
    assert answer.shares == pytest.approx({name: one for name, one in report.shares.items() if one >= 1e-3}, abs=1e-3)
    assert [row.name for row in kept.observed.operators] == [row.name for row in report.operators]


PROGRAM = """
import torch

weight = torch.ones(8, requires_grad=True)

def step():
    weight.sum().backward()  # only for its author

for _ in range(24):
    step()
"""


def test_a_program_keeps_its_lines_and_folders(ready: None, tmp_path: Path) -> None:
    script = tmp_path / "private folder" / "train.py"
    script.parent.mkdir()
    script.write_text(PROGRAM)
    observed, *others = record.observe_program(Program(script, (), "__main__:step"))
    # Whether short steps are met by a sample is chance.
    observed.places = [PlaceShare("python", 1.0, Place("step", str(script), 7), PROGRAM.splitlines()[6])]
    case = record.recorded("train", (observed, *others), Right([]), tmp_path, planted=False)
    text = gzip.decompress((tmp_path / "train.json.gz").read_bytes()).decode()
    assert [row.place.file for row in case.recorded.observed.places] == ["train.py"]
    assert {row.place.file for row in case.recorded.observed.operators if row.place} == {"train.py"}
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
