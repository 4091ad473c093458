"""Triton's kernels compiled for a GPU, against torch, on memory that holds NaN before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recperf.errors import ArgumentError
from recperf.ops import bag, dot, lookup, mlp
from recperf.ops.arguments import raise_if_any
from recperf.ops.bag import sort
from recperf.ops.table_rules import RULES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "samples", "most"), [(1, 3000, 20), (3, 500, 9), (5000, 700, 6), (40, 1, 1)])
@pytest.mark.parametrize("dim", [1, 7, 64, 128, 600])
@pytest.mark.usefixtures("poisoned")
def test_the_bag_kernels_agree_with_torch(dim: int, rows: int, samples: int, most: int, rule: Any) -> None:
    draw = torch.Generator("cuda").manual_seed(dim + rows)
    of: dict[str, Any] = {"device": "cuda", "generator": draw}
    tables, bags = 3, 3 * samples
    lengths = torch.randint(0, most + 1, (bags,), **of)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    used = int(offsets[-1])
    ids, starts = torch.randint(0, rows, (used + 5,), **of), torch.arange(0, 3 * rows, rows, device="cuda")
    table, gradient = torch.randn(tables * rows, dim, **of), torch.randn(bags, dim, **of)
    actual = []
    for name in ("reference", "triton"):
        body, _ = bag.choose(name, table)  # type: ignore[arg-type]
        mine = ids if name == "triton" else ids[:used]
        shape = RULES[rule].state_shape(*table.shape)
        weights, seen = table.clone(), None if shape is None else torch.full(shape, 0.5, device="cuda")
        grouped = body.Grouped(mine, offsets, tables * rows, starts)
        for count, rate in enumerate((0.1, torch.full((1,), 0.05, device="cuda")), 1):
            body.update(
                weights, seen, grouped, gradient, rule=rule, rate=rate, eps=1e-3, decay=0.1, scale=0.5,
                count=torch.tensor(float(count), device="cuda"),
            )  # fmt: skip
        assert grouped.unique == torch.unique(ids[:used] + starts.repeat_interleave(lengths.view(3, -1).sum(1))).numel()
        actual.append((body.bag_sum(table, mine, offsets, starts), weights, seen))
    # Thousands of gradients of one row: what their order does to the sum grows with them, and squared once more.
    crowd = max(1.0, (samples * most / rows) ** 0.5)
    tolerance = {"rtol": 1e-5 * max(10.0, crowd), "atol": 1e-4 * crowd}
    for expected, got in zip(*actual):
        torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("rows", [1, 9, 300, 70_000, 1 << 24, (1 << 31) - 1])
@pytest.mark.parametrize(("slots", "used"), [(1, 1), (1, 0), (4096, 4096), (4097, 4000), (3_000_000, 2_500_000)])
@pytest.mark.usefixtures("poisoned")
def test_rows_are_sorted_as_torch_sorts_them(slots: int, used: int, rows: int) -> None:
    """Also where one row has most of the ids, as a row number after the last one may."""
    assert sort.serves(slots, rows, torch.device("cuda"))
    draw = torch.Generator("cuda").manual_seed(rows)
    keys = torch.randint(0, rows + 1, (slots,), device="cuda", generator=draw).int()
    keys[slots // 3 : slots // 2] = rows
    bags = torch.arange(slots, device="cuda", dtype=torch.int32)
    count = torch.tensor([used], device="cuda")
    expected, order = torch.sort(keys[:used], stable=True)
    got, places = sort.sort_rows(keys, bags, count, rows)
    assert torch.equal(got[:used], expected)
    assert torch.equal(places[:used].long(), order)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("samples", "inputs"), [(1, 1), (63, 65), (2048, 1024), (50, 4096)])
@pytest.mark.parametrize("loss", ["bce", "mse"])
@pytest.mark.usefixtures("poisoned")
def test_the_last_layer_agrees_with_torch(loss: str, samples: int, inputs: int, kind: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(5)
    layer_input = torch.randn(samples, inputs, device="cuda", generator=draw).clamp(min=0).to(kind)
    weight = (torch.randn(1, inputs, device="cuda", generator=draw) / inputs**0.5).to(kind)
    bias, labels = weight[0, :1].clone(), (torch.rand(samples, device="cuda", generator=draw) < 0.5).float()
    actual = []
    for name in ("reference", "triton"):
        body, _ = mlp.choose(name, layer_input.device)  # type: ignore[arg-type]
        end = body.forward_backward(layer_input, weight, bias, labels, loss, (0.5, 2.0))
        sums = (end.to_input_bias_SN.sum(0), end.to_weight_SN.sum(0), end.to_bias_S.sum(), end.loss_S.sum())
        actual.append((end.logits_B, end.to_input_BN.float(), *sums))
    tolerance = 1e-4 if kind == torch.float32 else 1e-2
    for expected, got in zip(*actual):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize(("features", "dim"), [(1, 4), (3, 64), (8, 128), (26, 16), (26, 128), (31, 33)])
@pytest.mark.usefixtures("poisoned")
def test_the_dot_kernels_agree_with_torch(features: int, dim: int, diagonal: bool, kind: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(features)
    dense = torch.randn(65, dim, device="cuda", generator=draw).to(kind)
    sparse = torch.randn(features, 65, dim, device="cuda", generator=draw)
    actual = []
    for name in ("reference", "triton"):
        body, _ = dot.choose(name, dense.device)  # type: ignore[arg-type]
        met, saved = body.forward(dense, sparse, diagonal=diagonal, width=768)
        gradient = torch.randn(met.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(kind)
        actual.append((met, *body.backward(saved, gradient, diagonal=diagonal)))
    tolerance = 1e-4 if kind == torch.float32 else 2e-2
    for expected, got in zip(*actual):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * dim**0.5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (63, 65), (64, 64), (2048, 1024), (777, 3)])
@pytest.mark.usefixtures("poisoned")
def test_the_relu_kernel_agrees_with_torch(shape: tuple[int, int], kind: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(3)
    gradient, activation = (torch.randn(shape, device="cuda", generator=draw).to(kind) for _ in range(2))
    activation = activation.clamp(min=0)
    actual = [
        mlp.choose(name, gradient.device)[0].backward(gradient, activation)  # type: ignore[arg-type]
        for name in ("reference", "triton")
    ]
    assert torch.equal(actual[1][0], actual[0][0])
    assert actual[1][1].dtype == torch.float32
    torch.testing.assert_close(actual[1][1].sum(0), actual[0][1].sum(0), rtol=1e-5, atol=1e-3)
    outer = [
        mlp.choose(name, gradient.device)[0].outer_backward(gradient[:, :1], gradient[:1], activation)  # type: ignore[arg-type]
        for name in ("reference", "triton")
    ]
    assert torch.equal(outer[1][0], outer[0][0])
    torch.testing.assert_close(outer[1][1].sum(0), outer[0][1].sum(0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 1), (63, 65, 130), (2048, 1024, 1024), (300, 8, 4096)])
@pytest.mark.usefixtures("poisoned", "exact_products")
def test_a_product_with_its_relu_agrees_with_torch(shape: tuple[int, int, int], kind: torch.dtype) -> None:
    (samples, above, outputs), draw = shape, torch.Generator("cuda").manual_seed(9)
    gradient, weight, activation = (
        torch.randn(*size, device="cuda", generator=draw).to(kind)
        for size in ((samples, above), (above, outputs), (samples, outputs))
    )
    right, kernels = (mlp.choose(name, gradient.device)[0] for name in ("reference", "triton"))
    exact = right.product_backward(gradient.double(), weight.double(), activation.double())[0]
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[kind]
    results = [kernels.product_backward(gradient, weight, activation) for _ in range(2)]
    for mine, stripes in results:
        assert float((mine.double() - exact).norm()) <= tolerance * float(exact.norm())
        torch.testing.assert_close(stripes.sum(0), mine.float().sum(0), rtol=1e-4, atol=1e-3 * above**0.5)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("strange", [-1, 4, 1 << 40])
def test_an_id_outside_its_table_is_skipped_and_reported_at_the_next_check(strange: int, short: bool) -> None:
    """Tables of 4 and 6 rows follow one another."""
    device = torch.device("cuda", torch.cuda.current_device())
    body, _ = bag.choose("triton", table := torch.ones(10, 3, device=device))
    ids = torch.tensor([0, strange, 1, 5] if short else [0, strange, 1] * 20, device=device)
    offsets = torch.tensor([0, 2, 4] if short else [0, 60, 60], device=device)
    starts = torch.tensor([0, 4], device=device)
    for call in (
        lambda: body.bag_sum(table, ids, offsets, starts),
        lambda: body.Grouped(ids, offsets, 10, starts),
        lambda: lookup.gather(table[:4], ids[:3], impl="triton"),
    ):
        call()
        with pytest.raises(ArgumentError, match=f"is {strange}; allowed: 0 to 3"):
            raise_if_any(device)
    raise_if_any(device)
