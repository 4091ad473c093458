"""Position and time: golden numbers, and every body against the rule written out token by token."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recperf.ops.position_time import backward, buckets, forward, position_time

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    # Whether Triton's interpreter runs a kernel is settled where it is defined. Other tests must not see the wish.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("recperf.ops.position_time.triton")

needs_triton = pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
ALL = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        # The interpreter takes a program after the other: as few as leave several blocks and groups of rows.
        monkeypatch.setattr("recperf.ops.position_time.triton.PROGRAMS", 8)


LENGTHS = {
    "odd": [5, 0, 1, 20, 0],
    "63": [63],
    "all empty": [0, 0],
    "no rows": [],
    "one of one": [1],
    "equal": [9] * 6,
}
POSITIONS, AGES = 30, 12


def rule(lengths: list[int], times: list[int], context: int) -> tuple[list[int], list[int]]:
    """Position and age of every token, one by one."""
    positions, ages, start = [], [], 0
    for length in lengths:
        for place in range(length):
            behind = length - 1 - place
            positions.append(min(place if place < context else behind + context, POSITIONS - 1))
            gone = max(np.float32(times[start + length - 1] - times[start + place]), np.float32(1e-6))
            ages.append(min(int(np.sqrt(gone / np.float32(60))), AGES - 1))
        start += length
    return positions, ages


def tokens(lengths: list[int], dim: int, kind: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(dim + len(lengths))
    times = torch.randint(0, 12_000, (sum(lengths),), generator=draw) // 5 * 5
    return {
        "x": torch.randn(sum(lengths), dim, generator=draw).to(kind),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "times": times,
        "position": torch.randn(POSITIONS, dim, generator=draw),
        "time": torch.randn(AGES, dim, generator=draw),
    }


def run(impl: Any, of: dict[str, Tensor], context: int, longest: int) -> tuple[Tensor, ...]:
    leaves = {name: of[name].clone().requires_grad_() for name in ("x", "position", "time")}
    out = position_time(
        leaves["x"], of["offsets"], of["times"], leaves["position"], leaves["time"],
        scale=5.0, context=context, longest=longest, impl=impl,
    )  # fmt: skip
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    return out.detach(), *(leaf.grad for leaf in leaves.values())  # type: ignore[return-value]


def plain(of: dict[str, Tensor], lengths: list[int], context: int) -> tuple[Tensor, ...]:
    """The same by autograd, in float64, with the rule's own buckets."""
    position, age = rule(lengths, of["times"].tolist(), context)
    leaves = {name: of[name].double().requires_grad_() for name in ("x", "position", "time")}
    out = leaves["x"] * 5 + leaves["position"][position] + leaves["time"][age]
    weight = torch.linspace(-1, 1, out.numel(), dtype=of["x"].dtype).view(out.shape).double()
    (out * weight).sum().backward()
    return out.detach(), *(leaf.grad for leaf in leaves.values())  # type: ignore[return-value]


@pytest.mark.parametrize("context", [0, 6])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("impl", ALL)
def test_values_and_every_gradient(impl: Any, lengths: list[int], context: int) -> None:
    of = tokens(lengths, 20)
    longest = max(lengths, default=0) + 2
    found, expected = run(impl, of, context, longest), plain(of, lengths, context)
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ALL)
def test_a_repeat_gives_the_same_bits(impl: Any) -> None:
    of = tokens([12, 1, 30], 20)
    assert all(torch.equal(got, again) for got, again in zip(run(impl, of, 4, 30), run(impl, of, 4, 30)))


@pytest.mark.parametrize(("kind", "close"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("impl", ALL)
def test_half_tokens_have_whole_parameter_gradients(impl: Any, kind: torch.dtype, close: float) -> None:
    of = tokens([12, 1, 30], 33, kind)
    found, expected = run(impl, of, 4, 30), plain(of, [12, 1, 30], 4)
    assert [part.dtype for part in found] == [kind, kind, torch.float32, torch.float32]
    for got, wanted in zip(found[:2], expected):
        torch.testing.assert_close(got.double(), wanted, rtol=close, atol=close)
    for got, wanted in zip(found[2:], expected[2:]):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@needs_triton
def test_few_positions_take_all_that_lies_behind_them() -> None:
    """A table that ends within, at and after the longest row, and rows in several groups."""
    lengths = [20, 3, 11, 20, 20, 9, 20, 20, 20, 20]
    of = tokens(lengths, 4)
    for positions in (1, 19, 21):
        found = [
            backward(
                of["x"], of["offsets"], of["times"], positions=positions, ages=7, scale=2.0, context=0, longest=20,
                impl=impl,
            )
            for impl in ("reference", "triton")
        ]  # fmt: skip
        for expected, got in zip(*found):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", ALL)
def test_the_edges_of_ages(impl: Any) -> None:
    """A second before, at and after every square of minutes, and times that run backwards."""
    edges = [60 * root * root + more for root in (0, 1, 2, 17, 657, 2047, 2048) for more in (-5, -1, 0, 1, 5)]
    times = torch.tensor([30_000_000_000 - edge for edge in edges] + [30_000_000_000])
    ages = torch.arange(2100.0).unsqueeze(1)
    out = forward(
        torch.zeros(len(times), 1), torch.tensor([0, len(times)]), times, torch.zeros(64, 1), ages,
        scale=1.0, context=0, longest=64, impl=impl,
    )  # fmt: skip
    expected = [float(np.sqrt(max(np.float32(edge), np.float32(1e-6)) / np.float32(60)) // 1) for edge in [*edges, 0]]
    assert out.squeeze(1).tolist() == expected


def test_buckets_are_the_rule() -> None:
    lengths = LENGTHS["odd"]
    of = tokens(lengths, 1)
    position, age = buckets(of["offsets"], of["times"], positions=POSITIONS, ages=AGES, context=3)
    assert (position.tolist(), age.tolist()) == rule(lengths, of["times"].tolist(), 3)


@pytest.mark.parametrize("impl", ALL)
def test_golden_numbers(impl: Any, golden: Path) -> None:
    files = sorted((golden / "dlrm_v4").glob("*.npz"))
    assert files
    for file in files:
        sizes, saved = json.loads(file.with_suffix(".json").read_text()), np.load(file)
        part = {name: torch.from_numpy(saved[f"mid/preprocessor/{name}"]) for name in "456"}
        tables = [
            torch.from_numpy(saved[f"param/_hstu_transducer._positional_encoder._{name}_embeddings_weight"])
            for name in ("position", "timestamp")
        ]
        out = forward(
            part["6"], part["4"], part["5"], *tables,
            scale=sizes["model_dim"] ** 0.5, context=len(sizes["contextual"]), longest=sizes["max_seq_len"], impl=impl,
        )  # fmt: skip
        expected = torch.from_numpy(saved["mid/positional/0"])
        torch.testing.assert_close(out, expected, rtol=2e-4, atol=1e-5 * float(expected.abs().max()))


def test_context_must_leave_a_position() -> None:
    of = tokens([3], 2)
    with pytest.raises(ValueError, match="one must be left"):
        forward(of["x"], of["offsets"], of["times"], of["position"], of["time"], scale=1.0, context=30, longest=3)
