"""The published model's names: values go over and come back, what does not fit is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recperf.errors import DataError
from recperf.models.dlrm_v4.config import laptop
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.models.dlrm_v4.published import load_reference, reference_state

CONFIG = replace(laptop(), row_scale=1e-6)


def test_values_go_over_and_come_back() -> None:
    model, other = DLRMv4(CONFIG, seed=1), DLRMv4(CONFIG, seed=2)
    state = {name: value.clone() for name, value in reference_state(model).items()}
    assert not all(torch.equal(value, reference_state(other)[name]) for name, value in state.items())
    load_reference(other, state)
    assert all(torch.equal(value, state[name]) for name, value in reference_state(other).items())


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    model = DLRMv4(CONFIG, seed=1)
    before = [parameter.clone() for parameter in model.parameters()]
    state = {name: torch.zeros_like(value) for name, value in reference_state(model).items()}
    last = list(state)[-1]
    with pytest.raises(DataError, match="1 parameters are missing"):
        load_reference(model, {name: value for name, value in state.items() if name != last})
    with pytest.raises(DataError, match=r"1 are unknown \(first: what\)"):
        load_reference(model, state | {"what": torch.zeros(1)})
    with pytest.raises(DataError, match="has shape"):
        load_reference(model, state | {last: torch.zeros(1)})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
