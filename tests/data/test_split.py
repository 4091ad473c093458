"""What decides a split, boundaries in time, and the file of a dataset's split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recperf.data.config import SplitOptions, moment_of
from recperf.data.split import record
from recperf.data.split.record import Counts, Split, boundaries, decided, latest
from recperf.data.split.rows import RowSplit
from recperf.errors import ConfigError, DataError, RecperfError

DAY = 86_400 * 10**6


def test_a_boundary_holds_out_at_least_the_share_and_never_divides_a_time() -> None:
    assert latest(np.array([5, 1, 4, 2, 3]), 0.4) == 4
    assert latest(np.array([1, 2, 3, 3, 3]), 0.2) == 3
    # Nearly all have the first time: only later ones can be held out.
    assert latest(np.array([1, 1, 1, 1, 9]), 0.5) == 9
    assert latest(np.array([7, 7, 7]), 0.5) is None
    assert latest(np.array([], np.int64), 0.5) is None
    times = np.repeat(np.arange(100), 3)
    validation, begin = boundaries(SplitOptions(split="time", holdout=0.2), times, unit=1, name="log")
    assert (validation, begin) == (72, 80)
    assert boundaries(SplitOptions(split="time", boundary="0.00005"), times, unit=1, name="log") == (45, 50)
    assert boundaries(SplitOptions(split="time", boundary="49.5"), times, unit=10**6, name="log") == (45, 50)
    for outside, side in (("0", "before"), ("0.0001", "at or after")):
        with pytest.raises(DataError, match=f"nothing of log is {side} {outside}"):
            boundaries(SplitOptions(split="time", boundary=outside), times, unit=1, name="log")


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [("1970-01-02", DAY), ("1970-01-01T00:00:01.5Z", 1_500_000), ("1970-01-01 01:00+01:00", 0), ("86400", DAY)],
)
def test_a_boundary_is_a_date_or_seconds(text: str, microseconds: int) -> None:
    assert moment_of(text) == microseconds
    with pytest.raises(ConfigError, match="a date such as"):
        moment_of("soon")


def test_options_decide_and_the_dataset_says_the_rest() -> None:
    asked: list[int] = []

    def dataset(**fields: object) -> Callable[[], SplitOptions]:
        def read() -> SplitOptions:
            asked.append(1)
            return SplitOptions(**fields)  # type: ignore[arg-type]

        return read

    dated = dataset(split="time", boundary="2026-01-01")
    assert decided(SplitOptions(), dated) == SplitOptions(split="time", boundary="2026-01-01")
    assert decided(SplitOptions(holdout=0.1), dated) == SplitOptions(split="time", holdout=0.1)
    assert decided(SplitOptions(split="random"), dated) == SplitOptions(split="random", holdout=0.2, split_seed=42)
    assert decided(SplitOptions(split="leave-one-out"), dated) == SplitOptions(split="leave-one-out")
    drawn = dataset(split="random", holdout=0.3, split_seed=7)
    assert decided(SplitOptions(), drawn) == SplitOptions(split="random", holdout=0.3, split_seed=7)
    assert decided(SplitOptions(split_seed=0), drawn) == SplitOptions(split="random", holdout=0.3, split_seed=0)
    assert decided(SplitOptions(split="cold"), drawn) == SplitOptions(split="cold", holdout=0.2, split_seed=42)
    assert decided(SplitOptions(boundary="2026-02-02"), drawn) == SplitOptions(split="time", boundary="2026-02-02")
    # What leaves nothing open asks no dataset: a run goes on whatever became of its dataset's split.
    asked.clear()
    for one in (
        SplitOptions(split="time", holdout=0.2),
        SplitOptions(split="leave-one-out"),
        SplitOptions(split="random", holdout=0.2, split_seed=1),
    ):
        assert decided(one, drawn) == one
    assert not asked
    with pytest.raises(ConfigError, match="leave-one-out holds out one event of each user"):
        decided(SplitOptions(holdout=0.1), dataset(split="leave-one-out"))


def rows(**options: object) -> RowSplit:
    return RowSplit(
        name="log",
        data="digest",
        rows=10,
        options=SplitOptions(**options),  # type: ignore[arg-type]
        users_N=np.array([1, 1, 1, 1, 2, 2, 2, 3, 3, 4]),
        items_N=np.array([1, 2, 3, 4, 1, 2, 3, 1, 5, 6]),
        times_N=np.array([0, 1, 2, 6, 1, 2, 6, 3, 7, 7]) * DAY,
    )


def test_counts_of_what_is_held_out_and_new() -> None:
    split = rows(split="time", holdout=0.4)
    assert np.flatnonzero(split.valid_N).tolist() == [3, 6, 8, 9]
    assert np.flatnonzero(split.chooses_N).tolist() == [7]
    assert split.record.held_out == Counts(4, 4, 4)
    # User 4, and items 4, 5 and 6.
    assert split.record.unseen == Counts(3, 1, 3)
    text = "time, 4 of 10 rows from 518,400 on, of 4 users; unseen in training: 1 user, 3 items"
    assert split.record.text == text
    last = rows(split="last", holdout=0.3)
    assert np.flatnonzero(last.valid_N).tolist() == [3, 6, 8]
    assert last.record.text == "last, 3 of 10 rows, of 3 users; unseen in training: 2 items"
    digests = {rows(**one).record.digest for one in (
        {"split": "time", "holdout": 0.4}, {"split": "time", "boundary": "518400"}, {"split": "last", "holdout": 0.3},
        {"split": "cold", "holdout": 0.3, "split_seed": 1}, {"split": "cold", "holdout": 0.3, "split_seed": 2},
    )}  # fmt: skip
    assert len(digests) == 4, "a share and a date that mean the same rows are the same split"


def test_the_file_of_a_split_is_sealed_and_of_one_dataset(tmp_path: Path) -> None:
    split = rows(split="random", holdout=0.3, split_seed=5).record
    assert record.read(tmp_path, "digest") is None
    record.write(tmp_path, split)
    assert record.read(tmp_path, "digest") == split
    assert record.of_dataset(tmp_path, "digest", SplitOptions) == split.options
    with pytest.raises(DataError, match=r"split.json is the split of other data"):
        record.read(tmp_path, "another")
    path = tmp_path / record.FILE
    whole = path.read_text()
    for changed in (whole.replace('"seed": 5', '"seed": 6'), whole.replace('"version": 1', '"version": 2'), whole[:40]):
        path.write_text(changed)
        with pytest.raises(RecperfError) as caught:
            record.read(tmp_path, "digest")
        assert caught.value.fix == "recperf data split NAME --split KIND writes it anew"


def test_leave_one_out_warns_where_there_are_times() -> None:
    split = rows(split="last", holdout=0.3).record
    for kind, has_times, warned in (
        ("leave-one-out", True, True),
        ("leave-one-out", False, False),
        ("time", True, False),
    ):
        values = {name: getattr(split, name) for name in Split.__struct_fields__}
        assert bool(Split(**{**values, "kind": kind, "has_times": has_times}).warning) is warned
