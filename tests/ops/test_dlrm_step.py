"""The training step in C: every tensor it changes against autograd in float64, odd sizes, NaN, wrong ids, repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.errors import ArgumentError
from recperf.measure.counting import Counter
from recperf.measure.native_calls import hear_calls
from recperf.ops.dlrm_step import Network, TrainingRows, native, reference

pytestmark = pytest.mark.skipif(isinstance(native.library(), str), reason=f"no C: {native.library()}")
SIZES = {
    "micro": ((16, 8, 8), (32, 16, 1), (94, 168, 22), 8, False, False),
    "odd": ((3, 7, 5), (19, 1), (4, 1), 9, False, False),
    "deep": ((1, 2), (33, 17, 31, 1), (50,), 35, False, False),
    "dot": ((5, 4), (6, 1), (9, 8, 7), 4, True, False),
    "diagonal": ((16, 13), (3, 2, 1), (11, 5), 13, True, True),
}


def network(size: str, dtype: torch.dtype = torch.float32) -> Network:
    bottom, top, rows, dim, dot, diagonal = SIZES[size]
    vectors = len(rows) + 1
    joined = dim + vectors * (vectors - 1) // 2 + diagonal * vectors if dot else bottom[-1] + len(rows) * dim
    draw = torch.Generator().manual_seed(3)

    def mlp(widths: tuple[int, ...]) -> list[Tensor]:
        shapes = [shape for i, o in zip(widths, widths[1:]) for shape in ((o, i), (o,))]
        return [(torch.randn(shape, generator=draw) / shape[-1] ** 0.5).to(dtype) for shape in shapes]

    tensors: dict[str, Any] = {"bottom": mlp(bottom), "top": mlp((joined, *top))}
    tensors["table_RD"] = torch.randn(sum(rows), dim, generator=draw).to(dtype)
    parameters = [*tensors["bottom"], *tensors["top"], tensors["table_RD"]]
    states = {name: [torch.zeros_like(one) for one in parameters] for name in ("means", "squares")}
    return Network(
        **tensors, **states, rows=rows, steps=torch.zeros(()), dot=dot, diagonal=diagonal, decays=(0.01, 0.5)
    )


def samples(size: str, count: int) -> TrainingRows:
    draw = torch.Generator().manual_seed(5)
    ids = [torch.randint(rows, (count,), generator=draw) for rows in SIZES[size][2]]
    return TrainingRows(
        dense_ND=torch.randn(count, SIZES[size][0][0], generator=draw),
        ids_FN=torch.stack(ids, dim=1).t(),
        labels_N=torch.randint(2, (count,), generator=draw).float(),
    )


def double(rows: TrainingRows) -> TrainingRows:
    return replace(rows, dense_ND=rows.dense_ND.double(), labels_N=rows.labels_N.double())


def changed(net: Network) -> list[Tensor]:
    return [*net.parameters, *net.means, *net.squares, net.steps]


@pytest.mark.parametrize("count", [1, 63, 65, 257])
@pytest.mark.parametrize("size", list(SIZES))
def test_a_step_changes_every_tensor_as_autograd_in_float64_does(size: str, count: int) -> None:
    """The means after the first step are a tenth of the gradient; the second step begins with moments."""
    rows, order_N = samples(size, count + 2), torch.arange(count + 2).flip(0)
    ours, exact = network(size), network(size, torch.float64)
    step, expected = native.Step(ours, rows, order_N), reference.Step(exact, double(rows), order_N)
    for _ in range(2):
        (loss, norm), (exact_loss, exact_norm) = (one(1, count + 1, rate=1e-3, norm=True) for one in (step, expected))
        assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6, abs=1e-7)
        assert norm is not None
        assert exact_norm is not None
        assert float(norm) == pytest.approx(float(exact_norm), rel=1e-6)
        for name in ("parameters", "means", "squares"):
            wholes = [torch.cat([one.double().reshape(-1) for one in getattr(net, name)]) for net in (ours, exact)]
            assert float((wholes[0] - wholes[1]).norm()) <= 1e-6 * float(wholes[1].norm()), name
            for mine, theirs in zip(getattr(ours, name), getattr(exact, name), strict=True):
                # A gradient whose terms cancel has the error of its terms.
                torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


def test_repeats_are_equal_to_the_bit_and_clocks_and_norms_change_nothing() -> None:
    rows, order_N = samples("micro", 300), torch.arange(300)
    results = []
    for kind in ("plain", "clocked", "normed"):
        net, times = network("micro"), {} if kind == "clocked" else None
        step = native.Step(net, rows, order_N)
        losses = [
            float(step(first, min(300, first + 128), rate=1e-3, norm=kind == "normed", times=times)[0])
            for first in (0, 128, 256)
        ]
        results.append((losses, [tensor.clone() for tensor in changed(net)]))
        if times is not None:
            assert list(times) == list(native.PARTS)
            assert sum(times.values()) > 0  # A coarse clock may not see every part.
    for losses, tensors in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(one, other) for one, other in zip(tensors, results[0][1], strict=True))


def test_what_a_step_is_counted_to_move_has_all_that_adamw_reads_and_writes() -> None:
    """Values, means, squares and the gradient of the table, each read and written, and no less for a small batch."""
    net = network("micro")
    step = native.Step(net, samples("micro", 40), torch.arange(40))
    counter = Counter(1 << 10, 1 << 10)
    with counter:
        hear_calls(counter.native)
        try:
            for _ in range(2):
                counter.begin_step()
                step(0, 2, rate=1e-3)
        finally:
            hear_calls(None)
    (work,) = counter.result()
    whole, layers = (sum(one.numel() for one in group) for group in (net.parameters, net.parameters[:-1]))
    assert work.beyond >= 8 * 4 * (whole - layers)
    assert work.bytes == pytest.approx(4 * (6 * whole + 2 * net.table_RD.numel()), rel=0.01)


def test_nan_reaches_the_loss_and_what_it_should() -> None:
    """A NaN passes a ReLU; rows of the table that no sample uses keep their numbers."""
    rows, net = samples("micro", 40), network("micro")
    rows.dense_ND[7, 3] = float("nan")
    table_RD = net.table_RD.clone()
    loss, norm = native.Step(net, rows, torch.arange(40))(0, 40, rate=0.0, norm=True)
    assert norm is not None
    assert bool(loss.isnan())
    assert bool(norm.isnan())
    assert all(bool(layer.isnan().any()) for layer in (*net.bottom, *net.top))
    starts_F1 = torch.tensor([[0], [94], [262]])
    used = torch.zeros(len(table_RD), dtype=torch.bool)
    used[(rows.ids_FN + starts_F1).reshape(-1)] = True
    assert torch.equal(net.table_RD[~used], table_RD[~used])
    assert bool(net.table_RD[(rows.ids_FN[:, 7:8] + starts_F1).reshape(-1)].isnan().any())


def deep(net: Network, layers: int) -> Network:
    """The network with so many layers in its top MLP."""
    square = [net.top[0].new_zeros(shape) for _ in range(layers - 2) for shape in ((32, 32), (32,))]
    top = [*net.top[:2], *square, net.top[0].new_zeros(1, 32), net.top[0].new_zeros(1)]
    states = [torch.zeros_like(one) for one in (*net.bottom, *top, net.table_RD)]
    return replace(net, top=top, means=states, squares=[one.clone() for one in states])


def test_what_c_would_read_as_garbage_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, net = samples("micro", 40), network("micro")
    rows.ids_FN[1, 39] = 168
    step = native.Step(net, rows, torch.arange(40))
    before = [tensor.clone() for tensor in changed(net)]
    with pytest.raises(ArgumentError, match=r"ids_FN\[1\]\[39\] is 168; allowed: 0 to 167"):
        step(0, 40, rate=1e-3)
    assert all(torch.equal(one, other) for one, other in zip(changed(net), before))
    with pytest.raises(ArgumentError, match="samples 30 to 41"):
        step(30, 41, rate=1e-3)
    with pytest.raises(ArgumentError, match="outside of the 40 samples"):
        native.Step(net, rows, torch.tensor([40]))
    with pytest.raises(ArgumentError, match="it must go from 24 to 1"):
        native.Step(replace(net, rows=(94, 190)), rows, torch.arange(40))
    monkeypatch.setattr(native, "MOST_LAYERS", 99)
    with pytest.raises(ArgumentError, match="no room for MLPs of 2 and 17 layers"):
        native.Step(deep(net, 17), rows, torch.arange(40))
    with pytest.raises(ArgumentError, match="contiguous float32"):
        native.Step(network("micro", torch.float64), rows, torch.arange(40))
