"""Numbers as people read them."""

from __future__ import annotations

import pytest

from recperf import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1024, "1 KiB"),
        (84_768, "82.8 KiB"),
        (1010 << 10, "1.0 MiB"),
        (288 << 30, "288 GiB"),
        (5e17, "444 PiB"),
        (5e19, "44,409 PiB"),
    ],
)
def test_sizes_have_at_most_three_digits(count: float, text: str) -> None:
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0"), (5e-7, "0.500 ns"), (0.9996, "1,000 µs"), (99.96, "100 ms"), (1234.0, "1.23 s"), (9e6, "2.50 h")],
)
def test_times_have_three_digits(ms: float, text: str) -> None:
    assert units.time(ms) == text


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5TB", 1500 * 10**9), ("40gib", 40 << 30), ("100", 100),
     ("3kB", 3000), ("", None), ("many", None), ("-1GiB", None), ("nan", None)],
)  # fmt: skip
def test_sizes_are_read(text: str, bytes_: int | None) -> None:
    assert units.byte_count(text) == bytes_
