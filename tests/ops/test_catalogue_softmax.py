"""The softmax over a catalogue by every implementation: loss and gradients against float64, and lists of the highest
scores against sorted ones."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from recperf.errors import ArgumentError
from recperf.ops import catalogue_softmax
from recperf.ops.catalogue_softmax import Masks, reference, softmax_loss, top

ALL = ["reference", "native", "triton"]
TEMPERATURE = 0.5

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dozens of positions and items then have blocks of every kind."""
    monkeypatch.setitem(reference.SCORES, "cpu", 1000)
    monkeypatch.setattr(reference, "BLOCK", 32)
    if importlib.util.find_spec("triton"):
        body = importlib.import_module("recperf.ops.catalogue_softmax.triton")
        tiles = body.Tiles(32, 32, 4, 1, parts=2)
        by_items = tiles._replace(persistent=True, engine=True)
        monkeypatch.setattr(body, "tiles_of", lambda *_, items_own: by_items if items_own else tiles)


class Case:
    """Positions and items, drawn, and the loss as torch computes it in float64."""

    def __init__(
        self, positions: int, items: int, width: int, *, cosine: bool = False, bias: bool = False, masked: float = 0.0,
        smoothing: float = 0.0, weights: bool = False,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(positions + 7 * items + width)
        self.inputs = [torch.randn(count, width, generator=draw) for count in (positions, items)]
        if bias:
            self.inputs.append(torch.randn(items, generator=draw))
        self.targets_T = torch.randint(items, (positions,), generator=draw)
        self.options: dict[str, Any] = {"temperature": TEMPERATURE, "cosine": cosine, "smoothing": smoothing}
        self.weights_T = torch.full((positions,), 1 / max(1, positions))
        if weights:
            self.weights_T = torch.rand(positions, generator=draw) * (torch.arange(positions) % 3 > 0)
            self.options["weights_T"] = self.weights_T
        self.hidden_TI = torch.zeros(positions, items, dtype=torch.bool)
        if masked:
            # Three masks for all positions, with their items in any order and one of them twice.
            hidden_SI = torch.rand(3, items, generator=draw) < masked
            lists = [torch.cat([row.nonzero().squeeze(1).flip(0), row.nonzero().squeeze(1)[:1]]) for row in hidden_SI]
            offsets_S1 = torch.tensor([0, *(len(one) for one in lists)]).cumsum(0)
            masks_T = torch.randint(3, (positions,), generator=draw)
            self.options["masks"] = Masks(offsets_S1, torch.cat(lists), masks_T)
            self.hidden_TI = hidden_SI[masks_T].scatter(1, self.targets_T[:, None], False)

    def exact(self, users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None = None) -> Tensor:
        if self.options["cosine"]:
            users_TD, items_ID = (rows / rows.norm(dim=1, keepdim=True) for rows in (users_TD, items_ID))
        logs_TI = self.scores(users_TD, items_ID, bias_I).log_softmax(1).masked_fill(self.hidden_TI, 0)
        wanted_TI = self.options["smoothing"] * ~self.hidden_TI / (~self.hidden_TI).double().sum(1, keepdim=True)
        own_T1 = self.targets_T[:, None]
        wanted_TI.scatter_add_(1, own_T1, torch.full_like(own_T1, 1 - self.options["smoothing"], dtype=torch.float64))
        return -((wanted_TI * logs_TI).sum(1) * self.weights_T).sum()

    def scores(self, users_TD: Tensor, items_ID: Tensor, bias_I: Tensor | None = None) -> Tensor:
        scores_TI = users_TD @ items_ID.t() / TEMPERATURE
        return (scores_TI if bias_I is None else scores_TI + bias_I).masked_fill(self.hidden_TI, -torch.inf)

    def ours(self, impl: Any, *inputs: Tensor) -> Tensor:
        users_TD, items_ID, *bias = inputs
        return softmax_loss(
            users_TD, items_ID, self.targets_T, bias_I=bias[0] if bias else None, impl=impl, **self.options
        )


def with_gradients(loss: Any, inputs: list[Tensor], kind: torch.dtype) -> list[Tensor]:
    leaves = [one.to(kind).requires_grad_() for one in inputs]
    value = loss(*leaves)
    return [value.detach().double(), *(one.double() for one in torch.autograd.grad(value * 3, leaves))]


CASES: dict[str, dict[str, Any]] = {
    "one position": {"positions": 1, "items": 63, "width": 50},
    "one item": {"positions": 5, "items": 1, "width": 16},
    "cosines": {"positions": 63, "items": 70, "width": 64, "cosine": True},
    "96 wide": {"positions": 33, "items": 63, "width": 96, "weights": True},
    "256 wide": {"positions": 37, "items": 40, "width": 256, "cosine": True, "masked": 0.3},
    "everything": {"positions": 40, "items": 50, "width": 33, "bias": True, "masked": 0.5, "smoothing": 0.1},
    "all masked": {"positions": 20, "items": 50, "width": 16, "masked": 1.1, "weights": True},
    "no positions": {"positions": 0, "items": 40, "width": 16, "bias": True},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("impl", ALL)
def test_loss_and_gradients_are_those_of_float64(impl: Any, case: dict[str, Any]) -> None:
    made = Case(**case)
    exact = with_gradients(made.exact, made.inputs, torch.float64)
    ours = with_gradients(lambda *leaves: made.ours(impl, *leaves), made.inputs, torch.float32)
    for actual, right in zip(ours, exact):
        assert float((actual - right).norm()) <= 3e-6 * (float(right.norm()) + 5)


@pytest.mark.parametrize("case", ["cosines", "everything"])
@pytest.mark.parametrize("impl", ALL)
def test_half_precision_is_as_close_as_its_bits_and_repeats_are_equal(impl: Any, case: str) -> None:
    made = Case(**CASES[case])
    made.inputs[:2] = [one.bfloat16() for one in made.inputs[:2]]
    exact = with_gradients(made.exact, made.inputs, torch.float64)
    ours, again = [], []
    for results in (ours, again):
        leaves = [one.clone().requires_grad_() for one in made.inputs]
        loss = made.ours(impl, *leaves)
        results += [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]
    for actual, repeated, right in zip(ours, again, exact):
        assert torch.equal(actual, repeated)
        # What nearly cancels is as far off as its parts.
        assert float((actual - right).norm()) <= 1e-2 * (float(right.norm()) + 1)


def test_gradients_are_differences_of_losses() -> None:
    made = Case(4, 5, 3, bias=True, masked=0.4, smoothing=0.1, weights=True)
    inputs = [one.double().requires_grad_() for one in made.inputs]
    assert torch.autograd.gradcheck(lambda *leaves: made.ours("auto", *leaves), inputs)


@pytest.mark.parametrize("impl", ALL)
def test_large_products_are_no_infinity(impl: Any) -> None:
    """Exponentials of unbounded scores are those of differences to the highest."""
    made = Case(20, 100, 16)
    made.inputs[0] *= 20
    exact = with_gradients(made.exact, made.inputs, torch.float64)
    for actual, right in zip(
        with_gradients(lambda *leaves: made.ours(impl, *leaves), made.inputs, torch.float32), exact
    ):
        assert float((actual - right).norm()) <= 3e-5 * float(right.norm())


@pytest.mark.parametrize("impl", ALL)
def test_no_number_stays_in_its_position(impl: Any) -> None:
    made = Case(50, 40, 16)
    users_TD, items_ID = (one.clone().requires_grad_() for one in made.inputs)
    with torch.no_grad():
        users_TD[3] = torch.nan
    weights_T = torch.where(torch.arange(50) == 3, 0.0, 1.0)
    loss = softmax_loss(users_TD, items_ID, made.targets_T, cosine=True, weights_T=weights_T, impl=impl)
    (d_users_TD,) = torch.autograd.grad(loss, [users_TD])
    assert d_users_TD[3].isnan().all()
    assert not d_users_TD[torch.arange(50) != 3].isnan().any()


@pytest.mark.parametrize("impl", ALL)
def test_items_elsewhere_are_brought_over_in_blocks(impl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Case(20, 70, 16, bias=True, masked=0.4, smoothing=0.1)
    run = lambda *leaves: made.ours(impl, *leaves)  # noqa: E731
    whole = with_gradients(run, made.inputs, torch.float32)
    monkeypatch.setattr(catalogue_softmax, "STREAMED", 40)
    monkeypatch.setattr(catalogue_softmax, "_elsewhere", lambda *_: True)
    for streamed, right in zip(with_gradients(run, made.inputs, torch.float32), whole):
        assert float((streamed - right).norm()) <= 1e-6 * float(right.norm())


@pytest.mark.parametrize("masked", [0.0, 0.4, 1.1])
@pytest.mark.parametrize("k", [1, 10, 200])
@pytest.mark.parametrize("impl", ALL)
def test_the_highest_scores_are_the_first_of_all_sorted(impl: Any, k: int, masked: float) -> None:
    """Scores are whole numbers, so that many are equal; one is no number."""
    made = Case(110, 130, 16, bias=True, masked=masked)
    users_TD, items_ID, bias_I = (one.mul(2).round() for one in made.inputs)
    bias_I[7] = torch.nan
    masks = made.options.get("masks")
    if masks is not None:
        # Here targets are masked like others.
        made.hidden_TI = made.hidden_TI | torch.zeros_like(made.hidden_TI).scatter(
            1, made.targets_T[:, None], masks.have(made.targets_T)[:, None]
        )
    scores_TI = made.scores(users_TD, items_ID, bias_I)
    scores_TK, items_TK, reached_T = top(
        users_TD, items_ID, k, temperature=TEMPERATURE, bias_I=bias_I, masks=masks,
        targets_T=made.targets_T, impl=impl,
    )  # fmt: skip
    right_TI, order_TI = scores_TI.nan_to_num(-torch.inf, neginf=-torch.inf).sort(dim=1, descending=True, stable=True)
    order_TI[right_TI == -torch.inf] = -1
    there = min(k, 130)
    assert torch.equal(scores_TK[:, :there], right_TI[:, :k])
    assert torch.equal(items_TK[:, :there], order_TI[:, :k])
    assert (items_TK[:, there:] == -1).all()
    own_T1 = scores_TI.gather(1, made.targets_T[:, None])
    assert reached_T is not None
    assert torch.equal(reached_T, (~(scores_TI < own_T1)).sum(1))


@pytest.mark.usefixtures("native_code")
def test_threads_change_no_bit() -> None:
    made, results = Case(300, 500, 50, weights=True), []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            results.append(with_gradients(lambda *leaves: made.ours("native", *leaves), made.inputs, torch.float32))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_what_does_not_fit_is_an_error() -> None:
    users_TD, items_ID, targets_T = torch.randn(3, 4), torch.randn(5, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="one type and one width"):
        softmax_loss(users_TD, items_ID[:, :3], targets_T)
    with pytest.raises(ArgumentError, match="one type and one width"):
        softmax_loss(users_TD.bfloat16(), items_ID, targets_T)
    with pytest.raises(ArgumentError, match="one number for each of 5 items"):
        softmax_loss(users_TD, items_ID, targets_T, bias_I=torch.zeros(4))
    with pytest.raises(ArgumentError, match="one for each of 3"):
        softmax_loss(users_TD, items_ID, targets_T, masks=Masks(torch.tensor([0, 1]), torch.tensor([1])))
