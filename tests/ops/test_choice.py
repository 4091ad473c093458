"""The rule that picks an implementation, its reasons, and requests that cannot be met."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from recperf.errors import MachineError
from recperf.ops import bag, choice, dot, history, layer_norm, mlp
from recperf.ops.dot import native

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def short(chosen: tuple[ModuleType, str]) -> tuple[str, str]:
    return chosen[0].__name__.rpartition(".")[2], chosen[1]


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("native_code")
def test_a_cpu_takes_c() -> None:
    assert short(dot.choose("auto", CPU)) == ("native", "native: the tensors are on cpu")
    assert short(mlp.choose("native", CPU)) == ("native", "native: requested")
    assert short(history.choose("auto")) == ("native", "native: the tensors are on cpu")


@pytest.mark.usefixtures("no_interpreter")
def test_without_a_fast_implementation_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert short(layer_norm.choose("auto", CPU)) == ("reference", "reference: the tensors are on cpu")
    assert short(dot.choose("auto", torch.device("meta"))) == ("reference", "reference: the tensors are on meta")
    half = torch.zeros(2, 2, dtype=torch.bfloat16)
    assert short(bag.choose("auto", half)) == ("reference", "reference: the table is torch.bfloat16")
    monkeypatch.setattr(native, "library", lambda: "no C compiler on this machine")
    assert short(dot.choose("auto", CPU)) == ("reference", "reference: no C compiler on this machine")
    with pytest.raises(MachineError, match="the native implementation of dot cannot be used: no C compiler"):
        dot.choose("native", CPU)


@pytest.mark.usefixtures("no_interpreter")
def test_a_request_that_cannot_be_met_is_an_error_with_the_option_that_avoids_it() -> None:
    with pytest.raises(MachineError, match="the triton implementation of dot cannot be used: ") as caught:
        dot.choose("triton", CPU)
    assert caught.value.fix == "--fast.interaction plain"
    with pytest.raises(MachineError, match="implementation of mlp cannot be used: the tensors are on cuda") as caught:
        mlp.choose("native", CUDA)
    assert caught.value.fix == "--fast.mlp plain"
    with pytest.raises(MachineError, match="the native implementation of layer_norm cannot be used: there is none"):
        layer_norm.choose("native", CPU)
    with pytest.raises(MachineError, match="the native implementation of bag cannot be used: the table is"):
        bag.choose("native", torch.zeros(2, 2).half())


def test_each_run_records_what_it_uses_on_a_gpu() -> None:
    """Also where the choice is known from an earlier run of the process."""
    pytest.importorskip("triton")
    choice.forget_used()
    for _ in range(2):
        chosen = [short(layer_norm.choose("auto", CUDA)) for _ in range(2)]
        assert chosen == [("triton", "triton: the tensors are on cuda")] * 2
        assert choice.used() == {"layer_norm on cuda": "triton"}
        choice.forget_used()
