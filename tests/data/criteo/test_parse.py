"""The block parser equals the line-by-line reader on valid lines and on every kind of malformed line."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from recperf.data.criteo import lines
from recperf.data.criteo.config import DENSE, SPARSE
from recperf.data.criteo.parse import Parser
from recperf.ops.hashing import rows_int

ROWS = tuple(range(2, 2 + SPARSE))
GOOD = b"1\t" + b"\t".join(b"%d" % n for n in range(DENSE)) + b"\t" + b"\t".join(b"%08x" % n for n in range(SPARSE))


def with_field(column: int, value: bytes) -> bytes:
    fields = GOOD.split(b"\t")
    fields[column] = value
    return b"\t".join(fields)


def random_line(draw: random.Random) -> bytes:
    integers = (
        b"",
        b"0",
        b"-1",
        b"-3",
        b"7",
        b"65535",
        b"65536",
        b"99999999",
        b"100000000",
        b"1234567890123456",
        b"007",
    )
    categories = (b"", b"0", b"f", b"68fd1e64", b"FFFFFFFF", b"AbC", b"00000000")
    fields = [draw.choice((b"0", b"1"))]
    fields += [draw.choice(integers) for _ in range(DENSE)] + [draw.choice(categories) for _ in range(SPARSE)]
    return b"\t".join(fields) + draw.choice((b"", b"", b"\r"))


def expected(line: lines.Line) -> tuple[list[float], list[int]]:
    dense = [np.float32(math.log1p(max(value or 0, 0))) for value in line.integers]
    ids = [
        0 if value is None else 1 + rows_int(value, 5 * 64 + feature, ROWS[feature] - 1)
        for feature, value in enumerate(line.categories)
    ]
    return dense, ids


def hold_against_the_reader(text: list[bytes]) -> tuple[int, int]:
    parsed = Parser(ROWS, 5).parse(b"".join(line + b"\n" for line in text))
    read = [lines.read(line) for line in text]
    good = [line for line in read if isinstance(line, lines.Line)]
    assert [number for number, _ in parsed.bad] == [n for n, line in enumerate(read) if isinstance(line, lines.Fault)]
    assert [line for _, line in parsed.bad] == [text[number] for number, _ in parsed.bad]
    assert parsed.lines == len(text)
    assert parsed.labels_N.tolist() == [line.label for line in good]
    expected_rows = [expected(line) for line in good]
    np.testing.assert_array_max_ulp(
        parsed.dense_ND, np.array([dense for dense, _ in expected_rows], dtype="f4").reshape(-1, DENSE), 1
    )
    assert parsed.ids_NF.tolist() == [ids for _, ids in expected_rows]
    ends = np.cumsum([len(line) + 1 for line in text])
    assert parsed.ends_N.tolist() == [ends[n] for n, line in enumerate(read) if isinstance(line, lines.Line)]
    return len(good), len(parsed.bad)


def test_a_line_by_hand() -> None:
    parsed = Parser((1_000_000,) * SPARSE, 0).parse(with_field(3, b"-2") + b"\n" + with_field(14, b"") + b"\n")
    assert parsed.labels_N.tolist() == [1, 1]
    assert parsed.dense_ND[0, :4].tolist() == pytest.approx([0.0, math.log(2), 0.0, math.log(4)])
    assert parsed.ids_NF[1, 0] == 0
    assert parsed.ids_NF[0, 25] == 1 + rows_int(25, 25, 999_999)
    assert parsed.ids_NF.min(axis=1).tolist() == [parsed.ids_NF[0].min(), 0]
    assert parsed.ids_NF[0].min() >= 1


def test_random_good_lines() -> None:
    draw = random.Random(1)
    assert hold_against_the_reader([random_line(draw) for _ in range(500)]) == (500, 0)


BAD = {
    b"": "columns",
    b"\t" * 38: "columns",
    GOOD + b"\t": "columns",
    GOOD.split(b"\t", 1)[1]: "columns",
    b"caf\xc3\xa9": "encoding",
    with_field(20, b"\xff"): "encoding",
    with_field(0, b""): "label",
    with_field(0, b"2"): "label",
    with_field(0, b"01"): "label",
    with_field(0, b"-1"): "label",
    with_field(1, b"-"): "integer",
    with_field(1, b"--1"): "integer",
    with_field(13, b"1.5"): "integer",
    with_field(5, b"a"): "integer",
    with_field(5, b" 1"): "integer",
    with_field(5, b"+1"): "integer",
    with_field(5, b"12345678901234567"): "integer",
    with_field(5, b"-12345678901234567"): "integer",
    with_field(5, b"1-234567890"): "integer",
    with_field(5, b"12345678a"): "integer",
    with_field(5, b"1\x00"): "integer",
    with_field(14, b"g"): "hexadecimal",
    with_field(39, b"0x1f"): "hexadecimal",
    with_field(39, b"123456789"): "hexadecimal",
    with_field(39, b"-1"): "hexadecimal",
    with_field(39, b"1\r\r"): "hexadecimal",
    with_field(30, b"x" * 5000): "length",
}  # fmt: skip


@pytest.mark.parametrize("line", list(BAD), ids=range(len(BAD)))
def test_bad_lines_are_found_and_named(line: bytes) -> None:
    fault = lines.read(line)
    assert isinstance(fault, lines.Fault)
    assert fault.kind == BAD[line]
    assert hold_against_the_reader([GOOD, line, GOOD]) == (2, 1)
    assert hold_against_the_reader([line]) == (0, 1)


def test_test_files_are_recognised() -> None:
    fault = lines.read(GOOD.split(b"\t", 1)[1])
    assert isinstance(fault, lines.Fault)
    assert "without labels" in fault.what


def test_damaged_bytes_anywhere() -> None:
    draw = random.Random(2)
    for _ in range(60):
        text = bytearray(b"\n".join(random_line(draw) for _ in range(12)))
        for _ in range(draw.randrange(1, 6)):
            text[draw.randrange(len(text))] = draw.choice(b"\t\n\r-0aAgG .\x00\x1f\x80\xff")
        hold_against_the_reader(bytes(text).split(b"\n"))


def test_a_value_has_the_same_bits_wherever_it_stands() -> None:
    draw = random.Random(3)
    text = [random_line(draw) for _ in range(40)]
    parser = Parser(ROWS, 5)
    whole = parser.parse(b"".join(line + b"\n" for line in text))
    for number, line in enumerate(text):
        alone = parser.parse(line + b"\n")
        assert alone.dense_ND.tobytes() == whole.dense_ND[number].tobytes()
        assert alone.ids_NF.tobytes() == whole.ids_NF[number].tobytes()


def test_features_and_seeds_hash_apart() -> None:
    same = b"\t".join([b"0"] + [b""] * DENSE + [b"68fd1e64"] * SPARSE) + b"\n"
    first = Parser((1 << 30,) * SPARSE, 0).parse(same).ids_NF[0]
    assert len(set(first.tolist())) == SPARSE
    assert not set(first.tolist()) & set(Parser((1 << 30,) * SPARSE, 1).parse(same).ids_NF[0].tolist())
