"""Leaks that rows show: an import names them, and finds none in rows without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch
from planted_logs import Log, rows, sequences
from planted_quality import made

import recperf
from recperf.data.tables import MemoryRows, Rows
from recperf.learn.leaks import area, at_most
from recperf.train.metrics import auc


def answered(draw: np.random.Generator, size: float) -> Log:
    """Clicks with two times in milliseconds: of an earlier event, and of an answer after half of them."""
    log = rows(draw, size, count=2000, steady=True)
    time, half = log.columns["time"], draw.random(len(log.columns["time"])) < 0.5
    delay = draw.integers(600, 86_400, len(time))
    columns = {**log.columns, "before": 1000 * (time - delay), "answer": 1000 * np.where(half, time + delay, time - 9)}
    return replace(log, columns=columns, options={**log.options, "numeric": "x0,x1,before,answer"})


def of_sessions(draw: np.random.Generator, size: float) -> Log:
    """Clicks of 100 people, four fifths of whose sessions train."""
    log = rows(draw, size, count=2000)
    session = draw.integers(0, 400, len(log.columns["label"]))
    columns = {**log.columns, "visit": session, "customer_id": session % 100}
    return replace(log, columns=columns, options={**log.options, "categorical": "site,page,customer_id", **BY_VISIT})


BY_VISIT = {"user": "visit", "split": "cold"}


def twice_spelled(draw: np.random.Generator, size: float) -> Log:
    """Each of 100 users has an id with a capital letter and one with a small one."""
    log = rows(draw, size, count=2000)
    visit = [f"{'Aa'[one % 2]}{one // 2}" for one in draw.integers(0, 200, len(log.columns["label"]))]
    return replace(log, columns={**log.columns, "visit": np.array(visit)}, options={**log.options, **BY_VISIT})


def replaced(log: Callable[..., Log], **options: str) -> Callable[..., Log]:
    def drawn(draw: np.random.Generator, size: float) -> Log:
        made = log(draw, size)
        return replace(made, options={**made.options, **options})

    return drawn


def notes(log: Log, name: str) -> str:
    with catch_warnings(record=True) as caught:
        simplefilter("always")
        label = {"label": "label"} if "label" in log.columns else {}
        recperf.dataset(log.columns, name=name, **label, **log.options)
    return " ".join(str(one.message) for one in caught)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (made(rows, leak=0.99, count=2000), "status alone predicts held-out labels"),
        (made(rows, repeated=4, count=2000), "are training rows too, 100% of them with the same label"),
        (made(sequences, twice=True, users=100), "repeat the item of the event before"),
        (answered, "rows later than the row's own: it may not be known"),
        (of_sessions, "never train, but by customer_id"),
        (twice_spelled, "never train, but by visit in another spelling"),
        (replaced(of_sessions, split="random"), ""),
        (made(rows, count=2000), ""),
        (made(sequences, users=100), ""),
    ],
)
def test_an_import_says_what_leaks(log: object, said: str) -> None:
    assert callable(log)
    text = notes(log(np.random.default_rng(1), 1.0), "leaky")
    assert said in text
    if not said:
        assert "predicts" not in text
        assert "training rows too" not in text
        assert "repeat the item" not in text
        assert "never train" not in text
    assert "before is a time" not in text
    assert ("answer is a time, in 5" in text) == (log is answered)


def test_its_area_is_that_of_the_metrics() -> None:
    draw = np.random.default_rng(3)
    scores, labels = draw.integers(0, 9, 500).astype(np.float32), draw.random(500) < 0.3
    assert area(scores, labels) == pytest.approx(auc(torch.from_numpy(scores), torch.from_numpy(labels)), abs=1e-12)


def test_no_order_of_equal_rows_exceeds_what_is_possible() -> None:
    draw = np.random.default_rng(4)
    context, labels = draw.integers(0, 4, 60), (draw.random(60) < 0.4).astype(np.uint8)
    rows = Rows(np.zeros((60, 1), np.float32), context[:, None].astype(np.int32), labels)
    best = max(area(np.array(scores, np.float32)[context], labels) for scores in permutations(range(4)))
    assert at_most(MemoryRows(("site",), (1,), rows)) == pytest.approx(best, abs=1e-12)
    assert 0.5 < best < 1
    alone = Rows(draw.random((60, 1), np.float32), rows.ids_NS, labels)
    assert at_most(MemoryRows(("site",), (1,), alone)) is None
