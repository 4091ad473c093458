"""Predicted gains of fixes, on synthetic steps with known answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import example_runs as examples
import pytest
from msgspec import convert
from msgspec.structs import replace as changed

import recperf.models.config  # noqa: F401  declares the spans of the synthetic steps
from recperf.measure.advice_rules import explain
from recperf.measure.ceilings import ceilings_of
from recperf.measure.fixes import Fix, Predictor, drifted, too_busy
from recperf.measure.peaks.records import DeviceRates, Launch, PeakFigure, Peaks
from recperf.measure.profile_records import Component
from recperf.measure.records import Observed, Operator, Percentiles


def even(value: float) -> PeakFigure:
    return PeakFigure(value, value, value, n=9)


def around(middle: float, spread: float = 0.0) -> Percentiles:
    return Percentiles(middle * (1 - spread), middle, middle * (1 + spread))


def peaks_of(**more: Any) -> Peaks:
    """The ceilings of a machine that streams, multiplies and calls at these rates."""
    known = convert(examples.peaks(), Peaks)
    rates = {name: even(5e10) for name in ("copy", "read", "update", "cached")}
    return changed(known, gemm={"float32": even(1e11)}, calls={"elementwise": even(2000.0)}, **rates, **more)


GPU = DeviceRates(
    **{name: getattr(peaks_of(), name) for name in ("gather", "knee")},
    copy=even(4e12), read=even(4e12), update=even(4e12), cached=even(4e12),
    calls={"elementwise": even(4000.0), "view": even(1000.0)},
    gemm={"float32": even(5e13), "tf32": even(4e14), "bfloat16": even(7e14)},
    launch=Launch(queue=even(4000.0), kernel=even(2500.0)),
    transfer={"host_to_device_pinned": even(5e10)},
)  # fmt: skip
PEAKS = peaks_of(gpu={"H": GPU})
PARTS = {"embedding": 2.0, "top": 1.0, "dense_update": 0.5}


def predictor(device: str = "cpu", *, doubt: str | None = None, others: float = 0.0, **observed: Any) -> Predictor:
    """A step of 4 ms: tables, a product and its activation, an optimizer, and half a millisecond of input."""
    kernels = {"kernels": 10} if device != "cpu" else {}
    rows = [
        Operator("aten::embedding_bag", "embedding", "embedding_bag", 10, 10, PARTS["embedding"], **kernels),
        Operator("aten::addmm", "top", "product", 1, 1, 0.6, flops=2e7 if device == "cpu" else 3e10, **kernels),
        Operator("aten::relu", "top", "elementwise", 1, 1, 0.4, bytes=1e6, **kernels),
        Operator("aten::add_", "optimizer Adam.step", "elementwise", 8, 8, PARTS["dense_update"], **kernels),
    ]
    components = [Component(name, "", around(ms), 0.1, 0, 1e6) for name, ms in PARTS.items()]
    waits = {"input": 0.5, **observed.pop("waits", {})}
    seen = Observed(device, PEAKS.threads, around(4.0), waits, rows, others, **observed)
    figures: Any = SimpleNamespace(
        device=device, threads=PEAKS.threads, batch_size=64, communication=None, components=components
    )
    ceilings = ceilings_of(PEAKS, device=device, threads=PEAKS.threads)
    return Predictor(seen, explain(seen, ceilings, None), figures, PEAKS, doubt)


def gain(step: Predictor, *names: str) -> float:
    advice = step.row(any_fix(names[0]), names)
    low, high = advice.predicted_range
    assert low <= advice.predicted_gain <= high
    return advice.predicted_gain


def any_fix(name: str, implies: tuple[str, ...] = ()) -> Fix:
    return Fix(name=name, title=name, switch=f"--{name} on", config=None, tolerance=0.0, implies=implies)


def test_a_fused_part_takes_its_bytes_at_half_the_ceiling() -> None:
    # A megabyte at 25 GB/s.
    assert gain(predictor(), "embedding") == pytest.approx(4 / (4 - 2 + 0.04))
    assert gain(predictor(), "optimizer") == pytest.approx(4 / (4 - 0.5 + 0.04))
    # The product remains, its activation goes.
    assert gain(predictor(), "mlp") == pytest.approx(4 / 3.6)
    # 20 MFLOP at half of 100 GFLOP/s.
    assert gain(predictor(), "onednn") == pytest.approx(4 / (4 - 0.6 + 0.4))
    assert gain(predictor(), "embedding", "mlp") == pytest.approx(4 / (4 - 2.4 + 0.04))


def test_fixes_are_sorted_by_gain_and_need_ceilings() -> None:
    fixes = [any_fix(name) for name in ("optimizer", "embedding", "mlp", "interaction")]
    ordered, rows = predictor().suggest(fixes)
    assert [fix.name for fix in ordered] == ["embedding", "optimizer", "mlp", "interaction"]
    assert rows[0].seen == "Embedding: 50% of the step; embedding."
    assert rows[-1].predicted_gain == 1
    assert predictor("another").suggest(fixes) == ([], [])


def test_a_graph_removes_the_time_of_the_host_and_a_precision_that_of_products() -> None:
    """The host takes 3.9 of 4 ms for 40 kernels in which the device works for 0.6, of which 0.3 are the product."""
    idle = predictor("H", host_ms=3.9, waits={"launch": 0.0})
    device = 3.5
    assert gain(idle, "graph") == pytest.approx(4 / device, rel=0.05)
    # 30 GFLOP at 50 and at 400 TFLOP/s.
    assert gain(predictor("H", host_ms=0.2), "precision") == pytest.approx(4 / (4 - 0.575 * 7 / 8), rel=0.02)
    assert gain(predictor("H", host_ms=0.2), "input") == pytest.approx(4 / 3.5, rel=0.02)


def test_a_larger_batch_shares_what_does_not_depend_on_it() -> None:
    """Python takes 8 of 12 ms, which twice the samples share."""
    advice = predictor(waits={"python": 8.0}).larger_batch()
    assert advice.change == "--train.batch-size 128"
    assert advice.note == "In samples per second"
    assert advice.predicted_gain == pytest.approx(12 / 8, rel=0.02)
    assert advice.predicted_range[1] == pytest.approx(2)
    busy = predictor(waits={"python": 8.0}, others=0.6).larger_batch()
    assert (busy.predicted_gain, busy.status) == (None, "not judged")
    assert predictor().larger_batch() is None


def test_a_doubt_predicts_nothing() -> None:
    for step in (predictor(doubt="machine drifted"), predictor(others=0.6)):
        (row,) = step.suggest([any_fix("embedding")])[1]
        assert (row.predicted_gain, row.predicted_range, row.status) == (None, None, "not judged")
        assert row.note == f"Not predicted: {step.doubt}"


def test_drift_is_more_than_the_spread_and_more_than_a_seventh() -> None:
    assert drifted(around(4.0, 0.0), around(2.0, 0.0)) == (
        "machine drifted, a step without any fix took 4 ms and later 2 ms"
    )
    # A change of 3 ms within half-spreads of 1.2 and 2.1 ms; and one of 14 % of steps that hardly vary.
    assert drifted(around(4.0, 0.3), around(7.0, 0.3)) is None
    assert drifted(around(4.0, 0.01), around(4.56, 0.01)) is None
    assert drifted(around(4.0, 0.01), around(4.64, 0.01)) is not None
    assert too_busy(None) is None
    assert too_busy(0.16) == "machine too busy, other work took 16 % of the cores"
