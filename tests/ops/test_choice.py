"""The rule that picks an implementation, its reasons, and requests that cannot be met."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import example_runs as examples
import pytest
import torch
from msgspec import convert

from recperf.errors import MachineError
from recperf.measure import bag_speeds as measured
from recperf.measure.peaks.records import BagRatios, Figure, Peaks
from recperf.models.tables import HashedTable
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


class Machine:
    """Ceilings that a comparison finds and stores, the readings it takes, and the other work meanwhile."""

    def __init__(self) -> None:
        self.peaks = convert(examples.peaks(), Peaks)
        self.peaks.knee.bytes = 1 << 20
        self.lookups, self.updates, self.others, self.compared = 1.9, 6.1, 0.0, 0

    def measure(self, rows: int, dim: int) -> BagRatios:
        assert 4 * rows * dim == measured.KNEES * self.peaks.knee.bytes, "whatever the size of the table"
        self.compared += 1
        return BagRatios(*(Figure(0.9, ratio, ratio, n=5) for ratio in (self.lookups, self.updates)))

    def share(self) -> float:
        return self.others


@pytest.fixture
def this(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(measured, "measure", machine.measure)
    monkeypatch.setattr(measured, "OtherWork", lambda: machine)
    monkeypatch.setattr(measured, "load", lambda: machine.peaks)
    monkeypatch.setattr(measured, "save", lambda peaks: None)
    choice.forget_used()
    yield machine
    choice.forget_used()


def large() -> HashedTable:
    return HashedTable(("a",), 1 << 15, 64)


def names(table: HashedTable) -> tuple[str, str]:
    return table.bodies.sum.__name__.rpartition(".")[2], table.bag.__name__.rpartition(".")[2]


@pytest.mark.usefixtures("native_code")
def test_a_resumed_run_keeps_the_body_of_its_updates_whose_bits_differ(this: Machine) -> None:
    table = large()
    recorded = {"bag on cpu": "native", choice.BAG_UPDATE: "reference"}
    assert (choice.used(), names(table)) == ({"bag on cpu": "native"}, ("native", "native"))
    assert choice.replaced(recorded) == {}
    assert (names(table), choice.used()) == (("native", "reference"), recorded)
    stay = "updates stay torch's, as in the run that is resumed"
    speed = "on this machine lookups are 1.9 times as fast as torch's"
    assert table.why == f"native lookups, reference updates: {speed}; {stay}"
    small = HashedTable(("a",), 10, 64)
    assert small.why == f"native lookups, reference updates: the tensors are on cpu; {stay}"
    assert choice.replaced({"bag on cpu": "native"}) == {}
    assert (names(table), choice.used()) == (("native", "native"), {"bag on cpu": "native"})
    assert table.why == f"native: {speed}, updates are 6.1 times as fast as torch's"


def test_each_run_records_what_it_uses_on_a_gpu() -> None:
    """Also where the choice is known from an earlier run of the process."""
    pytest.importorskip("triton")
    choice.forget_used()
    for _ in range(2):
        chosen = [short(layer_norm.choose("auto", CUDA)) for _ in range(2)]
        assert chosen == [("triton", "triton: the tensors are on cuda")] * 2
        assert choice.used() == {"layer_norm on cuda": "triton"}
        choice.forget_used()
