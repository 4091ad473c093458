"""Two profiles compared: what changed, what is noise, and what exceeds a gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import example_profiles as profiles
import example_runs as examples
import msgspec
import pytest

from recperf.errors import DataError, UsageError
from recperf.jsonfile import sealed
from recperf.measure.profile import StepProfile
from recperf.runs.compare import Comparison, TimeChange, compare, parse_gate
from recperf.runs.sides import Side, load, of_profile


def loaded(profile: dict[str, Any], name: str = "a") -> Side:
    return of_profile(Path(name), msgspec.convert(profile, StepProfile))


def diff(old: dict[str, Any], new: dict[str, Any]) -> Comparison:
    return compare(loaded(old), loaded(new, "b"))


def slower(**times: float) -> dict[str, Any]:
    """The eager profile with other times of some parts."""
    difference = profiles.eager()
    difference["workload"] |= profiles.base({**profiles.EAGER, **times}, "NVIDIA H200")["workload"]
    return difference


def changes(difference: Comparison, group: str = "parts") -> dict[str, TimeChange]:
    return {change.name: change for change in difference.groups[group]}


def test_what_got_slower_and_faster_by_part() -> None:
    difference = diff(profiles.eager(), slower(data=1.5, loss=0.05))
    assert difference.groups["parts"][0].name == "data"
    assert changes(difference)["data"].change == pytest.approx(0.6 / 0.9)
    assert {name: change.says for name, change in changes(difference).items() if change.says != "same"} == {
        "data": "slower",
        "loss": "faster",
    }
    assert difference.step.says == "slower"
    assert (difference.warnings, difference.notes) == ([], [])


def test_a_change_inside_the_spread_is_noise_whatever_its_size() -> None:
    assert changes(diff(profiles.eager(), slower(data=0.94)))["data"].says == "within noise"
    wide = profiles.eager()
    wide["workload"]["step_ms"] = {"p20": 4.0, "p50": 9.0, "p80": 20.0}
    noisy = diff(profiles.eager(), wide)
    assert noisy.step.says == "within noise"
    assert noisy.step.change == pytest.approx(9.0 / 4.9 - 1)
    assert noisy.regressions(0.05) == []


def test_the_gate_names_the_step_and_its_large_parts() -> None:
    difference = diff(profiles.eager(), slower(data=1.3))
    assert [change.name for change in difference.regressions(0.05)] == ["step", "data"]
    assert [change.name for change in difference.regressions(0.3)] == ["data"]
    assert difference.regressions(0.5) == []
    assert diff(slower(data=1.3), profiles.eager()).regressions(0.05) == []
    # A small part counts once it is large.
    assert diff(profiles.eager(), slower(loss=0.15)).regressions(0.05) == []
    assert [change.name for change in diff(profiles.eager(), slower(loss=0.5)).regressions(0.2)] == ["loss"]


def test_a_part_that_took_no_time_before_exceeds_every_gate() -> None:
    none = profiles.eager()
    none["workload"]["components"][0]["ms"] = {"p20": 0.0, "p50": 0.0, "p80": 0.0}
    difference = diff(none, profiles.eager())
    assert changes(difference)["data"].change is None
    assert [change.name for change in difference.regressions(10.0)] == ["data"]
    assert json.dumps(msgspec.to_builtins(difference), allow_nan=False)


def test_new_and_gone_parts_and_kernels_are_listed() -> None:
    difference = diff(profiles.eager(), profiles.graph())
    assert changes(difference)["data"].says == "gone"
    assert changes(difference)["step_graph"].says == "new"
    kernels = changes(difference, "kernels")
    assert kernels["_bag_update"].old_ms is None
    assert kernels["reduce_kernel_3"].new_ms is None
    assert kernels[profiles.CUTLASS].difference_ms == pytest.approx(12 * (12 - 21) / 1e3)
    assert kernels[profiles.CUTLASS].says == "no spread"
    assert difference.notes == ["switch graph: off, then on"]
    assert difference.regressions(0.05) == []


def test_profiles_of_different_things_are_warned_about() -> None:
    other = profiles.cpu()
    other["workload"] |= {"name": "micro-dlrm", "preset": "large", "batch_size": 256}
    assert [warning.partition(";")[0] for warning in diff(profiles.eager(), other).warnings] == [
        "different workloads: dlrm and micro-dlrm",
        "different presets: experiment and large",
        "different devices: NVIDIA H200 and cpu",
        "different batch sizes: 2048 and 256",
    ]


def test_possible_causes_are_noted() -> None:
    other = profiles.eager()
    other["workload"]["trust"]["versions"] |= {"torch": "2.13.0", "triton": None}
    other["workload"] |= {"switches": {"tf32": "off: asked for", "fused": "on: a CUDA device"}, "steps": 5}
    other["threads"] = 1
    old, new = loaded(profiles.eager()), loaded(other, "b")
    old.circumstances[""]["machine"], new.circumstances[""]["machine"] = "m1", "m2"
    old.config, new.config = {"train": {"batch": 1}, "seed": 1}, {"train": {"batch": 2}, "seed": 1}
    assert compare(old, new).config == {"train.batch": (1, 2)}
    assert compare(old, new).notes == [
        "machine: m1, then m2",
        "threads: 2, then 1",
        "version of torch: 2.11.0, then 2.13.0",
        "version of triton: 3.6.0, then none",
        "switch graph: off, then none",
        "switch tf32: on, then off",
        "switch fused: none, then on",
        "b has only 5 steps, so its spread says little",
    ]


@pytest.mark.parametrize("text", ["5", "", "-5%", "nan%", "1e9%", "٥%"])
def test_a_gate_is_a_percentage(text: str) -> None:
    assert parse_gate(" 2.5 % ") == pytest.approx(0.025)
    with pytest.raises(UsageError, match="percentage such as 5%"):
        parse_gate(text)


def _with(path: str, value: Any) -> str:
    return json.dumps(sealed(examples.changed(profiles.graph(), path, value)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[]", "not a profile of a step"),
        (_with("schema", 9), "profile.json has schema 9; this recperf reads 3"),
        (_with("step_ms.p50", ...), "does not fit its description: step_ms.p50 is missing"),
        (_with("workload.components", []), "the shares of workload.components do not sum to 1"),
        (_with("kernels.rows.0.total_ms", None), "kernels.rows.0.total_ms should be a number, is null"),
    ],
)
def test_a_damaged_profile_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert message in caught.value.what
    assert caught.value.where == {"file": str(path)}


def test_a_missing_profile_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"profile\.json is missing"):
        load(tmp_path)
    with pytest.raises(DataError, match="nothing at this path"):
        load(tmp_path / "nothing")
    with pytest.raises(DataError, match="not a file"):
        load(Path("/dev/null"))
