"""The rules about how a model learns, on records written by hand, and the origin of values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recperf.measure.learning import report_of
from recperf.measure.learning_records import (
    ClearingSeen,
    InputSeen,
    LearningSeen,
    LossesSeen,
    NonFiniteSeen,
    ParameterSeen,
    RateSeen,
    TableSeen,
    UnitsSeen,
)
from recperf.measure.losses import Losses
from recperf.measure.nonfinite import cause_of


def said(**seen: Any) -> list[tuple[str, str, str]]:
    report = report_of(LearningSeen(steps=100, looks=9, **seen))
    return [(one.name, one.where, one.confidence) for one in report.findings]


def parameter(name: str, **more: Any) -> ParameterSeen:
    seen = {"optimized": True, "written": True, "moved": True, "looks": 5, "gradients": 5, "nonzero": 5}
    fields = {"shape": [4, 4], **seen, "updates": [1e-3] * 5, "rate": 0.1}
    return ParameterSeen(name=name, **{**fields, **more})


UNSEEN = {"written": False, "moved": False, "gradients": 0, "nonzero": 0, "updates": []}


def test_a_flaw_of_all_parameters_of_a_module_is_one_of_the_module() -> None:
    names = ("encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder10.weight", "head.a", "head.b")
    flawed = {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "head.b"}
    seen = [parameter(name, **(UNSEEN if name in flawed else {})) for name in names]
    assert said(parameters=seen) == [("no-gradient", "encoder", "high"), ("no-gradient", "head.b", "high")]
    assert said(parameters=[parameter(name, **UNSEEN) for name in names]) == [("no-gradient", "the model", "high")]
    frozen = [parameter(name, trainable=False, **UNSEEN) for name in flawed]
    assert said(parameters=[*frozen, parameter("head.a")]) == []


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({**UNSEEN, "looks": 2}, ("no-gradient", "medium")),
        ({**UNSEEN, "looks": 1}, None),
        ({**UNSEEN, "written": True}, None),
        ({**UNSEEN, "optimized": False}, None),
        ({"optimized": False, "written": False}, ("not-optimized", "high")),
        ({"optimized": False, "written": False, "nonzero": 2}, ("not-optimized", "medium")),
        ({"optimized": False, "written": True}, None),
        ({"nonzero": 0, "moved": False}, ("zero-gradient", "high")),
        ({"nonzero": 0, "moved": True}, ("zero-gradient", "medium")),
        ({"nonzero": 0, "moved": False, "shape": [4]}, ("zero-gradient", "low")),
        ({"nonzero": 0, "moved": False, "gradients": 2}, None),
        ({"updates": [9e-7] * 5}, ("tiny-updates", "medium")),
        ({"updates": [9e-10] * 5}, ("tiny-updates", "high")),
        ({"updates": [0.0] * 5}, ("tiny-updates", "high")),
        ({"updates": [0.0] * 5, "rate": 0.0}, None),
        ({"updates": [2e-6] * 5}, None),
        ({"updates": [9e-7] * 2}, None),
        ({"updates": [9e-7] * 5, "shape": [4]}, None),
        ({"idle_units": 0.5}, ("idle-units", "medium")),
        ({"idle_units": 0.49}, None),
    ],
)
def test_a_flaw_of_one_parameter(more: dict[str, Any], expected: tuple[str, str] | None) -> None:
    names = [
        (name, confidence) for name, _, confidence in said(parameters=[parameter("a.x", **more), parameter("b.y")])
    ]
    assert names == ([expected] if expected else [])


def test_a_rate_of_its_own_explains_tiny_updates() -> None:
    few = [parameter("a.x", updates=[1e-8] * 5, rate=1e-6), parameter("b.y"), parameter("c.z")]
    (finding,) = report_of(LearningSeen(steps=100, looks=9, parameters=few)).findings
    assert finding.sentence.endswith("are 1e-05 of those of other parts; its learning rate is 1e-06, theirs 0.1.")


def units(**more: Any) -> UnitsSeen:
    return UnitsSeen(**{"name": "1", "kind": "ReLU", "units": 10, "looks": 3, "rows": 100, **more})


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (units(dead=4), None),
        (units(dead=5), ("dead-units", "medium")),
        (units(dead=9), ("dead-units", "high")),
        (units(dead=9, rows=99), None),
        (units(dead=9, looks=2), None),
        (units(saturated=9, kind="Tanh"), ("saturated-units", "high")),
        (units(saturated=9, kind="Sigmoid"), ("saturated-units", "medium")),
    ],
)
def test_units(one: UnitsSeen, expected: tuple[str, str] | None) -> None:
    assert [(name, confidence) for name, _, confidence in said(units=[one])] == ([expected] if expected else [])


def test_dead_units_are_said_once() -> None:
    idle = parameter("0.weight", idle_units=0.9)
    assert said(units=[units(dead=9)], parameters=[idle]) == [("dead-units", "1", "high")]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.0, 0.1, 0.2], None),
        ([0.0, 0.0, 0.0], "high"),
        ([0.0], "low"),
        ([0.1, 0.0, 0.0], None),
        ([0.1, 0.0, 0.0, 0.0], "medium"),
    ],
)
def test_rates(rates: list[float], expected: str | None) -> None:
    seen = RateSeen(name="Adam", rates=rates, steps=list(range(0, 10 * len(rates), 10)))
    assert said(rates=[seen]) == ([("zero-rate", "Adam", expected)] if expected else [])


def test_modes_and_clearing() -> None:
    assert said(training=[True, False, False], differ_in_eval=["dropout"]) == []
    assert said(training=[False] * 3) == []
    assert said(training=[True, False, False, False], differ_in_eval=["dropout"]) == [
        ("eval-mode", "the model", "high")
    ]
    clearing = [ClearingSeen(name=str(n), intervals=n, cleared=c) for n, c in ((1, 0), (2, 0), (3, 0), (3, 1))]
    assert said(clearing=clearing) == [("not-cleared", "3", "high"), ("not-cleared", "2", "medium")]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1 + 0.01 * math.sin(at) for at in range(40)] + [1.5, 1.0], None),
        ([1 + 0.01 * math.sin(at) for at in range(40)] + [3.0, 1.0], ("spike", "low")),
        ([1 + 0.01 * math.sin(at) for at in range(40)] + [30.0, 1.0], ("spike", "medium")),
        ([1 + 0.01 * math.sin(at) for at in range(40)] + [math.nan, 1.0], None),
        ([1 + 0.1 * at for at in range(200)], ("diverges", "medium")),
        ([5 - 0.1 * at for at in range(200)], None),
        ([10 ** math.sin(at) for at in range(200)], None),
    ],
)
def test_losses(values: list[float], expected: tuple[str, str] | None) -> None:
    seen = LossesSeen(place="a.py:3", steps=list(range(len(values))), values=values)
    assert [(name, confidence) for name, _, confidence in said(losses=[seen])] == ([expected] if expected else [])


def test_rows() -> None:
    def table(unchanged: int, lookups: int) -> list[tuple[str, str, str]]:
        return said(tables=[TableSeen(name="t", rows=1000, sampled=100, unchanged=unchanged, lookups=lookups)])

    assert table(50, 10_000) == [("unused-rows", "t", "medium")]
    assert table(49, 10_000) == table(50, 9_999) == table(90, 1_999) == []
    assert table(90, 2_000) == [("unused-rows", "t", "low")]


def test_inputs() -> None:
    scores = [1.0, 2.0, 3.0, 4.0]
    seen = [
        InputSeen(name="matters", scores=scores, permuted=[2.0, 3.0, 4.0, 5.0]),
        InputSeen(name="ignored", scores=scores, permuted=scores),
        InputSeen(name="hardly", scores=scores, permuted=[1.001, 2.002, 3.001, 4.001]),
        InputSeen(name="varies", scores=scores, permuted=[1.1, 1.9, 3.1, 3.9]),
        InputSeen(name="constant", scores=scores, permuted=scores, constant=True),
        InputSeen(name="nothing", scores=[math.nan], permuted=[1.0]),
        InputSeen(name="once", scores=[1.0], permuted=[1.0]),
    ]
    assert said(inputs=seen) == [
        ("ignored-input", "ignored", "high"),
        ("ignored-input", "hardly", "medium"),
        ("ignored-input", "constant", "medium"),
        ("ignored-input", "once", "medium"),
    ]


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("operator", "(a.py:3): log at head made it from finite values."),
        ("outside", "(a.py:3): it comes out of log at head, which may have read it from a batch."),
        ("input", "(a.py:3): log at head read a batch that is not finite."),
        ("weights", "(a.py:3): head is not finite, by an update of an earlier step."),
        ("", "(a.py:3)."),
    ],
)
def test_a_loss_that_is_not_finite(cause: str, text: str) -> None:
    loss = NonFiniteSeen(place="a.py:3", step=7, value="nan", cause=cause, where="head", operator="log")
    (finding,) = report_of(LearningSeen(nonfinite=loss)).findings
    assert finding.sentence == f"The loss is nan at step 7 {text}"


# The origin in the graph


def masked(model: nn.Sequential, x: Tensor, columns: int) -> Tensor:
    mask = torch.arange(8) >= columns
    return model[0](x).masked_fill(mask, -math.inf).softmax(-1)


ORIGINS: dict[str, tuple[Callable[[nn.Sequential, Tensor], Tensor], tuple[str, str, str]]] = {
    "logarithm": (lambda model, x: -torch.log(torch.relu(model(x))).mean(), ("operator", "2", "log")),
    "hidden by a product": (
        lambda model, x: (torch.log(torch.relu(model(x))) * 0 + 1).mean() + model(x).sum(),
        ("operator", "2", "log"),
    ),
    "overflow": (lambda model, x: torch.exp(model(x) * 1e4).mean(), ("operator", "2", "exp")),
    "root": (lambda model, x: torch.sqrt(model(x) - 5).mean(), ("operator", "2", "sqrt")),
    "quotient": (lambda model, x: (model(x) / torch.zeros(16, 1)).mean(), ("operator", "2", "div")),
    "power": (lambda model, x: (torch.relu(model(x)) ** -1.0).mean(), ("operator", "2", "pow")),
    "mask of everything": (lambda model, x: masked(model, x, 0).sum(), ("operator", "0", "softmax")),
    "behind a mask": (
        lambda model, x: torch.log(torch.relu(model[2](masked(model, x, 3))) - 9).sum(),
        ("operator", "2", "log"),
    ),
    "batch": (lambda model, x: model(x / (x[:1] - x[:1])).mean(), ("input", "0", "addmm")),
    "target": (lambda model, x: nn.functional.mse_loss(model(x), x[:, :1] * math.nan), ("input", "2", "mse_loss")),
    "target of a difference": (
        lambda model, x: (model(x) - x[:, :1] * math.nan).square().mean(),
        ("outside", "2", "sub"),
    ),
    "nothing": (lambda model, x: torch.tensor(math.nan), ("", "", "")),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_the_operator_that_made_it(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    names = {id(one): name for name, one in model.named_parameters()}
    loss_of, origin = ORIGINS[name]
    loss = loss_of(model, torch.randn(16, 4))
    assert not math.isfinite(loss.item())
    assert cause_of(loss, names) == origin
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    if origin[0]:
        assert cause_of(model(torch.randn(16, 4)).mean(), names) == ("weights", "2.weight", "")


class OnDevice(Tensor):
    """A loss whose value must be waited for."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


def test_losses_of_a_device_are_read_together() -> None:
    losses = Losses()
    frame = type("Frame", (), {"f_code": (lambda: 0).__code__, "f_lasti": 0, "f_back": None})()
    weight = nn.Parameter(torch.ones(()))

    def note(step: int, value: float) -> None:
        loss = (weight * value).as_subclass(OnDevice)
        losses.note(loss, frame, step, {id(weight): "a.weight"}, False)

    for step in range(10):
        note(step, math.inf if step == 7 else 1.0)
    assert not losses.seen[0].values
    losses.read()
    assert losses.seen[0].values == [1.0] * 7 + [math.inf] + [1.0] * 2
    assert losses.nonfinite is not None
    assert (losses.nonfinite.step, losses.nonfinite.cause) == (7, "")
    # From now on each is waited for, until one tells the operator.
    note(10, 2.0)
    assert losses.seen[0].values[-1] == 2.0
    note(11, math.inf)
    assert losses.nonfinite.cause == "input"
