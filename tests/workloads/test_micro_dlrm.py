"""Steps of micro-dlrm in C beside those of operators: the same training, and a fallback that says why."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from recperf.data.config import MovieLensConfig
from recperf.data.order import ShuffledOrder
from recperf.errors import MachineError
from recperf.ops import choice
from recperf.ops.dlrm_step import native as body
from recperf.train.device import applied
from recperf.train.feeds import IndexedOrder
from recperf.train.loop import take_step
from recperf.workloads.micro_dlrm import config as micro
from recperf.workloads.micro_dlrm.build import ClickTrial, PreparedClicks
from recperf.workloads.micro_dlrm.config import default, dot

needs_c = pytest.mark.skipif(isinstance(body.library(), str), reason=f"no C: {body.library()}")


def prepared(preset: str = "default", **train: object) -> PreparedClicks:
    config = {"default": default, "dot": dot}[preset]()
    config = replace(config, data=MovieLensConfig(source="embedded"))
    return PreparedClicks(replace(config, train=replace(config.train, device="cpu", batch_size=900, **train)))


def losses(trial: ClickTrial, count: int, start: int = 0) -> list[float]:
    batches = trial.recipe.order.batches(0, start)
    return [float(take_step(trial.recipe, batches, start + step)[0]) for step in range(count)]


@needs_c
@pytest.mark.parametrize("preset", ["default", "dot"])
def test_c_and_operators_train_alike_and_a_saved_state_continues_to_the_bit(preset: str) -> None:
    native, operators = prepared(preset), prepared(preset, native="off")
    assert native.settings.reasons["step"].startswith("native: ")
    assert operators.settings.reasons["step"] == "operators: requested"
    trial, plain, resumed = native.trial(3), operators.trial(3), native.trial(4)
    first = losses(trial, 5)
    assert first == pytest.approx(losses(plain, 5), rel=1e-5)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(trial.model.state_dict()[name], value, rtol=1e-3, atol=1e-5, msg=name)
    resumed.recipe = replace(resumed.recipe, order=trial.recipe.order)
    resumed.restore(trial.state())
    assert losses(resumed, 3, start=5) == losses(trial, 3, start=5)


@needs_c
@pytest.mark.parametrize("began", ["operators", "native"])
def test_a_resumed_run_keeps_what_took_its_steps(began: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` would choose the other one now: bits are those of a run that was not interrupted."""
    choice.forget_used()
    whole = prepared(native="off" if began == "operators" else "on").trial(3)
    losses(whole, 5)
    state, recorded = copy.deepcopy(whole.state()), choice.used()
    assert recorded == {choice.DLRM_STEP: began}
    expected = losses(whole, 3, start=5)
    for record in (recorded, {}) if began == "operators" else (recorded,):
        choice.forget_used()
        if began == "native":
            monkeypatch.setattr(micro, "caches", lambda: {"L2": 1024})
        again = prepared()
        other = "native" if began == "operators" else "operators"
        assert again.settings.reasons["step"].startswith(other)
        trial = again.trial(4)
        trial.recipe = replace(trial.recipe, order=whole.recipe.order if began == "native" else indexed(whole))
        trial.restore(copy.deepcopy(state))
        assert choice.replaced(record) == {}
        with applied(again.settings):
            assert losses(trial, 3, start=5) == expected
        assert again.settings.reasons["step"] == f"{began}: the run began so"
        assert choice.used() == recorded
    choice.forget_used()


def indexed(trial: ClickTrial) -> IndexedOrder:
    order = trial.recipe.order
    assert isinstance(order, ShuffledOrder)
    return IndexedOrder(order)


@needs_c
def test_a_frozen_parameter_is_left_to_operators_unless_c_was_requested() -> None:
    for requested in ("auto", "on"):
        native = prepared(native=requested)
        trial = native.trial(3)
        bias = trial.model.bottom.flat[1]
        bias.requires_grad_(False)
        before = bias.clone()
        if requested == "on":
            with pytest.raises(MachineError, match="one call of C: a parameter is frozen"):
                losses(trial, 1)
        else:
            losses(trial, 2)
            assert native.settings.reasons["step"] == "operators: a parameter is frozen"
        assert torch.equal(bias, before)


@needs_c
@pytest.mark.parametrize(
    ("train", "model", "reason", "threads"),
    [
        ({}, {}, "native: one call of C takes a whole step", 1),
        ({"native": "off"}, {}, "operators: requested", 1),
        ({"threads": 2}, {}, "operators: 2 threads; C uses one", 2),
        ({"threads": 2, "native": "on"}, {}, "native: requested", 1),
        ({"threads": 1}, {"top": (4096, 4096, 1)}, r"operators: C reads [\d,]+ KiB again and again; .*", 1),
        ({}, {"top": (*[8] * 16, 1)}, "operators: an MLP has more than 16 layers", 1),
        ({"threads": 1}, {"interaction": "dcn"}, "operators: C has no cross layers", 1),
    ],
)
def test_what_takes_the_steps(train: dict[str, Any], model: dict[str, Any], reason: str, threads: int) -> None:
    config = replace(default(), data=MovieLensConfig(source="embedded"))
    config = replace(config, model=replace(config.model, **model), train=replace(config.train, device="cpu", **train))
    settings = PreparedClicks(config).settings
    assert re.fullmatch(reason, settings.reasons["step"])
    assert settings.threads == threads
    if threads < config.train.threads:
        assert settings.reasons["threads"] == "1: the step in C uses one thread"


def test_without_a_compiler_operators_take_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "library", lambda: "no C compiler on this machine")
    assert prepared().settings.reasons["step"] == "operators: no C compiler on this machine"
    with pytest.raises(MachineError, match="no C compiler"):
        prepared(native="on")
    assert choice.replaced({choice.DLRM_STEP: "native"}) == {
        choice.DLRM_STEP: ("reference", "no C compiler on this machine")
    }
    choice.forget_used()


def test_a_request_that_c_cannot_meet_is_an_error() -> None:
    config = replace(default(), data=MovieLensConfig(source="embedded"))
    config = replace(config, model=replace(config.model, interaction="dcn"))
    with pytest.raises(MachineError, match="C has no cross layers"):
        PreparedClicks(replace(config, train=replace(config.train, device="cpu", native="on")))
