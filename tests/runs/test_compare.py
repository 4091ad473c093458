"""What changed between runs, and what forbids a naive reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_runs as examples
import msgspec
import pytest

from recperf.errors import UsageError
from recperf.measure.records import Percentiles
from recperf.runs import compare as compare_runs
from recperf.runs.compare import Comparison, TimeChange, changed, compare
from recperf.runs.compare_report import summary
from recperf.runs.result import Quality, Target
from recperf.runs.sides import Side, TimedPart, load


def compared(tmp_path: Path, change: dict[str, Any] | None = None, **two: Any) -> Comparison:
    """A run and another one, of whose files some fields are changed."""
    folders = examples.make_run(tmp_path / "one", seeds=two.get("seeds", 1)), examples.make_run(tmp_path / "two", **two)
    for place, value in (change or {}).items():
        examples.change(folders[1], *place.split(":"), value)
    return compare(*map(load, folders))


def test_two_runs(tmp_path: Path) -> None:
    change = {
        "result.json:performance.step_ms": {"p20": 2.2, "p50": 2.24, "p80": 2.3},
        "profile.json:verdict.limit": "latency",
    }
    found = compared(tmp_path, change, auc=0.83, config={"train": {"epochs": 9, "batch_size": 256}})
    assert found.config["train.epochs"] == (4, 9)
    assert found.config["train.learning_rate"] == (0.005, None)
    assert (found.quality["auc"].old, found.quality["auc"].new) == (0.8212, 0.83)
    assert found.quality["auc"].remark == "one seed: may be chance"
    (step,) = found.groups["training"]
    assert (step.text, step.says, found.step.says) == ("+100.0%", "slower", "same")
    assert found.limits == ("dispatch", "latency")
    assert summary(found) == (
        "2 config fields differ, step +0.0% (same); AUC 0.8212 → 0.8300 (one seed: may be chance); dispatch → latency."
    )
    assert json.loads(json.dumps(msgspec.to_builtins(found), allow_nan=False))["config"]["train.epochs"] == [4, 9]


@pytest.mark.parametrize(
    ("auc", "remark"), [(0.8215, "within the seeds' spread"), (0.9, "beyond the seeds' spread"), (0.8212, "")]
)
def test_a_difference_is_held_against_the_spread_of_the_seeds(tmp_path: Path, auc: float, remark: str) -> None:
    assert compared(tmp_path, seeds=3, auc=auc).quality["auc"].remark == remark


def test_what_is_not_comparable_is_said(tmp_path: Path) -> None:
    change = {
        "result.json:data.digest": "ff",
        "result.json:provenance.machine": "another",
        "result.json:provenance.commit": "5" * 40,
        "result.json:performance.device": "NVIDIA H200",
        "result.json:performance.step_ms": None,
    }
    found = compared(tmp_path, change, workload="other", measured=())
    said = "; ".join([*found.warnings, *found.notes])
    for what in (
        "different task, data or split",
        "machine: 0",
        "commit: 4",
    ):
        assert what in said
    assert "different devices: cpu and NVIDIA H200" in said
    assert not found.comparable
    assert not found.same_model
    assert found.limits == ("dispatch", None)
    assert (found.step.says, found.step.change, found.groups) == ("another model", None, {})
    assert summary(found) == "Different models; dispatch → not measured."


def quality(value: float | None, spread: float | None, auc_bound: float | None = None) -> Any:
    made = Quality(
        metrics={} if value is None else {"auc": value},
        spread={} if spread is None else {"auc": spread},
        seeds=[],
        target=Target(beat=None, accuracy=None, auc=auc_bound),
        met=True,
        baselines={},
    )
    return SimpleNamespace(result=SimpleNamespace(quality=made))


@pytest.mark.parametrize(
    ("difference", "says"), [(10.0, "within"), (10.5, "beyond"), (7.0, "within"), (5.5, "within"), (19.0, "beyond")]
)
def test_two_standard_deviations_of_both_sides_are_beyond_chance(difference: float, says: str) -> None:
    """Spreads of 3 and 4 are 5 together, and twice that is 10."""
    for spreads in ((3.0, 4.0), (4.0, 3.0)):
        for values in ((20.0, 20.0 + difference), (20.0, 20.0 - difference)):
            both = compare_runs._quality(*map(quality, values, spreads))
            assert both["auc"].remark == f"{says} the seeds' spread"


def test_metrics_that_cannot_be_held_against_a_spread() -> None:
    def remark(old: Any, new: Any) -> str:
        return compare_runs._quality(old, new)["auc"].remark

    assert remark(quality(0.5, None), quality(0.6, 0.1)) == remark(quality(0.5, 0.1), quality(0.6, None))
    assert "one seed" in remark(quality(0.5, None), quality(0.6, None))
    assert remark(quality(0.5, 0.1), quality(0.5, 0.1)) == remark(quality(0.5, 0.1), quality(None, 0.1)) == ""
    assert remark(quality(None, 0.1), quality(0.5, 0.1)) == ""
    met = compare_runs._quality(quality(0.5, None), quality(0.5, None, auc_bound=0.4))["target met"]
    assert (met.old, met.new) == (None, True)


def part(*ms: float, share: float = 0.5, count: float | None = None) -> TimedPart:
    return TimedPart(ms=Percentiles(*ms), share=share, count=count)


@pytest.mark.parametrize(
    ("old", "new", "says", "change", "more"),
    [
        ((9, 10, 11), (18, 20, 22), "slower", 1.0, 10), ((18, 20, 22), (9, 10, 11), "faster", -0.5, -10),
        ((9, 10, 11), (11, 12, 13), "within noise", 0.2, 2), ((9, 10, 11), (11.1, 12, 13), "slower", 0.2, 2),
        ((9, 10, 11), (7, 8, 9), "within noise", -0.2, -2), ((9, 10, 11), (7, 8, 8.9), "faster", -0.2, -2),
        ((9, 10, 11), (9, 10, 11), "same", 0.0, 0), ((9, 10, 11), (20, 20, 20), "no spread", 1.0, 10),
        ((10, 10, 10), (18, 20, 22), "no spread", 1.0, 10), ((0, 0, 0), (0, 0, 0), "same", 0.0, 0),
        ((0, 0, 0), (1, 2, 3), "slower", None, 2), ((1, 2, 3), (0, 0, 0), "faster", -1.0, -2),
        ((0, 0, 1), (2, 0, 3), "faster", 0.0, 0), ((0, 5e-324, 1), (2, 1e300, 1e301), "slower", None, 1e300),
        (None, (1, 2, 3), "new", None, 2), ((1, 2, 3), None, "gone", None, -2), (None, None, "not measured", None, 0),
    ],
)  # fmt: skip
def test_times_change_beyond_the_middle_of_their_steps(
    old: Any, new: Any, says: str, change: float | None, more: float
) -> None:
    found = changed("x", old and part(*old, share=0.25, count=3), new and part(*new, share=0.5, count=4))
    assert (found.says, found.difference_ms) == (says, more)
    assert found.change == (None if change is None else pytest.approx(change))
    assert (found.old_count, found.new_count) == (old and 3, new and 4)
    assert found.share == (0.5 if new else 0.25 if old else 0.0)
    assert found.text == (says if change is None else f"{100 * change:+.1f}%")


@pytest.mark.parametrize(
    ("share", "change", "says", "exceeds"),
    [
        (0.05, 0.11, "slower", True), (0.07, 0.11, "slower", True), (0.049, 0.11, "slower", False),
        (0.03, 0.11, "slower", False), (0.5, 0.1, "slower", False), (0.5, None, "slower", True),
        (0.5, 0.11, "within noise", False), (0.5, None, "new", False),
    ],
)  # fmt: skip
def test_a_gate_holds_large_parts_beyond_noise(share: float, change: float | None, says: str, exceeds: bool) -> None:
    row = TimeChange(name="x", old_ms=None, new_ms=None, share=share, difference_ms=1.0, change=change, says=says)
    assert row.exceeds(0.1) is exceeds


def side(name: str = "a", **fields: Any) -> Side:
    made = {"steps": 48, "step": Percentiles(9, 10, 11), "groups": {"parts": {"x": part(9, 10, 11)}}, **fields}
    return Side(path=Path(name), **made)


def test_limits_of_a_hundredth_of_the_step_are_noticed_the_largest_first() -> None:
    old = {"python": 0.01, "input": 0.0075, "compute": 0.2, "cache": 0.5}
    found = compare(side(shares=old), side("b", shares={"compute": 0.6, "bandwidth": 0.015}))
    assert list(found.shares.items()) == [
        ("compute", (0.2, 0.6)), ("cache", (0.5, 0.0)), ("bandwidth", (0.0, 0.015)), ("python", (0.01, 0.0))
    ]  # fmt: skip
    assert compare(side(shares=old), side("b")).shares == compare(side(), side("b", shares=old)).shares == {}


def test_groups_of_both_are_compared_the_largest_change_first() -> None:
    old = {"x": part(9, 10, 11), "y": part(1, 2, 3), "z": part(1, 2, 3)}
    new = {"x": part(9, 11, 12), "y": part(8, 9, 10), "w": part(1, 5, 6)}
    groups = {"parts": old, "regions": old, "kernels": old, "operators": old}
    others = {"parts": new, "kernels": new, "operators": new}
    found = compare(side(groups=groups, missing={"operators": "why"}), side("b", groups=others))
    assert list(found.groups) == ["parts", "kernels"]
    assert [row.name for row in found.groups["parts"]] == ["y", "w", "z", "x"]
    assert found.missing == {"operators": "not measured in a: why"}
    assert (found.step.name, found.step.share, found.samples_per_s) == ("step", 1.0, (None, None))
    assert compare(side(step=None), side("b")).step.says == "new"
    with pytest.raises(UsageError, match="nothing in common"):
        compare(side(groups={"parts": old}), side("b", groups={"regions": old}))


def test_sides_are_described_by_what_both_have() -> None:
    long = "n" * 100
    old = {"devices": long, "presets": None, "units": "steps", "workloads": "one"}
    found = compare(side(identity=old), side("b", identity={"devices": "cpu", "presets": "x", "units": "steps"}))
    assert found.warnings == [f"different devices: {long[:60]} and cpu; the two measure different things"]
    assert (found.names, found.config, found.notes) == (("a", "b"), {}, [])
    assert compare(side(config={"seed": 1}), side("b")).config == {}
    assert compare(side(config={"seed": 1, "x": 1}), side("b", config={"seed": 2, "x": 1})).config == {"seed": (1, 2)}


def test_notes_on_steps_and_spread() -> None:
    def notes(old: Side, new: Side) -> list[str]:
        return compare(old, new).notes

    assert notes(side(steps=8), side("b", steps=48)) == []
    assert [note[:17] for note in notes(side(steps=7), side("b"))] == ["a has only 7 step"]
    flat = Percentiles(10, 10, 10)
    assert [note[:17] for note in notes(side(steps=2, step=flat), side("b"))] == ["a: fewer than 3 s"]
    assert notes(side(steps=2, step=None), side("b")) == []
    regions = {"regions": {"x": part(9, 10, 11)}}
    assert [note[:31] for note in notes(side(groups=regions), side("b", groups=regions, steps=20))] == [
        "different numbers of steps: 48 "
    ]
    assert notes(side(groups=regions), side("b", groups=regions)) == []
    assert notes(side(notes=["same", "one"]), side("b", notes=["same", "two"])) == ["same", "one", "two"]
    assert notes(side(), side()) == ["it is compared with itself"]
    facts = {"": {"machine": "m", "threads": 2}, "switch ": {"graph": "on"}, "none ": {"x": 1}}
    others = {"": {"machine": None, "threads": 3}, "switch ": {"tf32": "on"}, "none ": {}}
    assert notes(side(circumstances=facts), side("b", circumstances=others)) == [
        "threads: 2, then 3", "switch graph: on, then none", "switch tf32: none, then on"
    ]  # fmt: skip


def test_throughput_and_rows_of_two_runs(tmp_path: Path) -> None:
    change = {"result.json:performance.steady.samples_per_s": 1000.5, "result.json:performance.step_ms": None}
    found = compared(tmp_path, change)
    assert (found.samples_per_s, found.comparable, found.warnings) == ((215051.9, 1000.5), True, [])
    runs = [load(tmp_path / name) for name in ("one", "two")]
    for name, value in (("digest", "x"), ("split", "last"), ("valid_rows", 1)):
        before = getattr(runs[1].run.result.data, name)  # type: ignore[union-attr]
        setattr(runs[1].run.result.data, name, value)  # type: ignore[union-attr]
        found = compare(*runs)
        assert (found.comparable, found.warnings) == (
            False,
            ["different task, data or split: quality is not comparable"],
        )
        setattr(runs[1].run.result.data, name, before)  # type: ignore[union-attr]
    assert compare(*runs).comparable
    # Beside the profile of another run there is no quality to compare.
    alone = compare(runs[0], load(tmp_path / "two" / "profile.json"))
    assert (alone.comparable, alone.quality, alone.samples_per_s, alone.warnings) == (False, {}, (None, None), [])
    with pytest.raises(UsageError, match="nothing in common"):
        compare(runs[0], side("b", groups={}))


@pytest.mark.parametrize("field", ["holdout", "split_seed"])
def test_other_held_out_rows_are_not_comparable(tmp_path: Path, field: str) -> None:
    assert not compared(tmp_path, config={"data": {**examples.CONFIG["data"], field: 0.5}}).comparable
