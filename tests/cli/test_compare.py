"""recperf compare as a user types it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import example_profiles as profiles
import example_runs as examples
import example_traces as traces
import pytest
from test_page import of_program

from recperf.jsonfile import sealed

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Call) -> Call:
    """Profiles old and new (data takes 44 % longer), and the command."""
    slow = profiles.eager()
    slow["workload"] |= profiles.base({**profiles.EAGER, "data": 1.3}, "NVIDIA H200")["workload"]
    slow["kernels"]["rows"][0]["total_ms"] += 0.05
    for name, profile in (("old", profiles.eager()), ("new", slow), ("graph", profiles.graph())):
        Path(name).mkdir()
        Path(name, "profile.json").write_text(json.dumps(sealed(profile)))

    return functools.partial(call, "compare")


def test_two_profiles_in_words(call: Call) -> None:
    code, out, err = call("old", "new/profile.json")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 110
    lines = [line.split() for line in out.splitlines()]
    assert out.startswith("old/profile.json → new/profile.json · step +8.2% (slower)")
    assert next(line for line in lines if line[:1] == ["step"] and "ms" in line)[-2:] == ["+8.2%", "slower"]
    assert next(line for line in lines if line[:1] == ["data"])[-2:] == ["+44.4%", "slower"]
    assert "+50.0 µs" in out
    assert "29 the same or within noise" in out


def test_the_gate_lets_pass_and_stops(call: Call) -> None:
    code, out, err = call("old", "new", "--gate", "50%")
    assert (code, err) == (0, "")
    assert "gate: nothing got slower by more than 50%" in out
    code, out, err = call("old", "new", "--gate", "5%", "--json")
    assert code == 5
    assert "error: slower by more than the gate of 5%: step +8.2%, data +44.4%" in err
    assert "data: 900 µs -> 1.30 ms" in err
    comparison = json.loads(out)
    assert comparison["gate"] == {"limit": 0.05, "beyond": ["step", "data"]}
    assert comparison["error"]["exit_code"] == 5
    assert comparison["groups"]["parts"][0]["name"] == "data"
    assert comparison["groups"]["kernels"][0]["change"] == pytest.approx(0.05 / 0.252)
    assert call("new", "old", "--gate", "5%")[0] == 0


def test_runs_are_compared_by_quality_and_config_and_with_a_gate_by_their_profiles(call: Call, tmp_path: Path) -> None:
    examples.make_run(tmp_path / "one")
    examples.make_run(tmp_path / "two", auc=0.83, config={"seed": 7})
    code, out, _ = call("one", "two")
    assert code == 0
    for expected in (
        "one → two · 1 config field differs, step +0.0% (same)",
        "quality   AUC 0.8212 → 0.8300 (one seed: may be chance)",
        "config    seed: 42 → 7",
        "note      synthetic data",
        "limit     dispatch in both: dispatch 60% → 60%",
    ):
        assert expected in out
    assert "train.epochs" not in out
    assert "embedding, backward" in call("one", "two", "--verbose")[1]
    code, out, _ = call("one", "two", "--gate", "5%", "--json")
    assert code == 0
    assert json.loads(out)["step"]["says"] == "same"
    examples.make_run(tmp_path / "third", workload="other", measured=())
    comparison = json.loads(call("one", "third", "--json")[1])
    assert comparison["limits"] == ["dispatch", None]
    code, _, err = call("one", "two", "third")
    assert (code, "compare takes two runs" in err) == (2, True)


def test_traces_differ_beyond_the_spread_of_their_steps(call: Call, tmp_path: Path) -> None:
    """Steps of 100 us with an operator that varies, one that gets slower, and one that comes and one that goes."""
    for name, extra, slow in (("a", "gone", 10), ("b", "new", 20)):
        events = []
        for step in range(11):
            at = 100.0 * step
            events += [traces.around(f"ProfilerStep#{step}", at, 100), traces.around("part", at + 1, 98)]
            events += [traces.op("varies", at + 2, 10 + step + slow / 10), traces.op("slow", at + 40, slow + step / 10)]
            events += [traces.op(extra, at + 70, 5)]
        traces.write(tmp_path / f"{name}.json", events)
    code, out, _ = call("a.json", "b.json", "--json")
    assert code == 0
    says = {row["name"]: row["says"] for row in json.loads(out)["groups"]["operators"]}
    assert says == {"slow": "slower", "varies": "within noise", "gone": "gone", "new": "new"}
    assert next(iter(says)) == "slow"
    printed = [" ".join(line.split()) for line in call("a.json", "b.json")[1].splitlines()]
    assert "slow 10.5 µs 10.2 – 10.8 µs 20.5 µs 20.2 – 20.8 µs +10.0 µs +95.2% slower" in printed


@pytest.mark.parametrize("kind", ["workload", "program", "run"])
def test_a_gate_reads_nothing_that_was_changed(call: Call, kind: str) -> None:
    if kind == "run":
        for name in ("old", "new"):
            shutil.rmtree(name)
            examples.make_run(Path(name))
    elif kind == "program":
        for name in ("old", "new"):
            of_program(profiles.eager()).save(f"{name}/profile.json", force=True)
    else:
        shutil.copyfile("old/profile.json", "new/profile.json")
    assert call("old", "new", "--gate", "5%")[0] == 0
    path = Path("new", "result.json" if kind == "run" else "profile.json")
    content = json.loads(path.read_text())
    times = content["performance"]["step_ms"] if kind == "run" else content["step_ms"]
    times |= {name: 3 * value for name, value in times.items()}
    path.write_text(json.dumps(content, indent=2) + "\n")
    code, _, err = call("old", "new", "--gate", "5%")
    assert code == 3
    assert path.name in err
    content.pop("seal", None)
    path.write_text(json.dumps(content))
    assert call("old", "new", "--gate", "5%")[0] == 3
