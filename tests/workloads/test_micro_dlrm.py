"""Steps of micro-dlrm in C beside those of operators: the same training, and a fallback that says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recperf.data.config import MovieLensConfig
from recperf.errors import MachineError
from recperf.train.loop import take_step
from recperf.workloads.micro_dlrm.build import ClickTrial, PreparedClicks
from recperf.workloads.micro_dlrm.config import default, dot


def prepared(preset: str = "default", **train: object) -> PreparedClicks:
    config = {"default": default, "dot": dot}[preset]()
    config = replace(config, data=MovieLensConfig(source="embedded"))
    return PreparedClicks(replace(config, train=replace(config.train, device="cpu", batch_size=900, **train)))


def losses(trial: ClickTrial, steps: int, start: int = 0) -> list[float]:
    batches = trial.recipe.order.batches(0, start)
    return [float(take_step(trial.recipe, batches, start + step)[0]) for step in range(steps)]


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


def test_a_frozen_parameter_is_left_to_operators() -> None:
    native = prepared()
    trial = native.trial(3)
    bias = trial.model.bottom.flat[1]
    bias.requires_grad_(False)
    before = bias.clone()
    losses(trial, 2)
    assert native.settings.reasons["step"] == "operators: a parameter is frozen"
    assert torch.equal(bias, before)


def test_a_request_that_c_cannot_meet_is_an_error() -> None:
    config = replace(default(), data=MovieLensConfig(source="embedded"))
    config = replace(config, model=replace(config.model, interaction="dcn"))
    for native, reason in (("auto", "operators: C has no cross layers"), ("on", "")):
        train = replace(config.train, device="cpu", native=native)
        if reason:
            assert PreparedClicks(replace(config, train=train)).settings.reasons["step"] == reason
        else:
            with pytest.raises(MachineError, match="C has no cross layers"):
                PreparedClicks(replace(config, train=train))
