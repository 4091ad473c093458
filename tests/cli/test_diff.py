"""recperf diff as a user types it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import example_profiles as profiles
import pytest

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Call) -> Call:
    """Profiles old and new (data takes 44 % longer), and the command."""
    slow = profiles.eager()
    slow |= {k: v for k, v in profiles.base({**profiles.EAGER, "data": 1.3}, "NVIDIA H200").items() if "ms" in k}
    slow["components"] = profiles.base({**profiles.EAGER, "data": 1.3}, "NVIDIA H200")["components"]
    slow["kernels"]["rows"][0]["total_ms"] += 0.05
    for name, profile in (("old", profiles.eager()), ("new", slow), ("graph", profiles.graph())):
        Path(name).mkdir()
        Path(name, "profile.json").write_text(json.dumps(profile))

    return functools.partial(call, "diff")


def test_a_diff_in_words(call) -> None:
    code, out, err = call("old", "new/profile.json")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 110
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["old/profile.json", "->", "new/profile.json"]
    assert next(line for line in lines if line[:1] == ["step"] and "ms" in line)[-2:] == ["+8.2%", "slower"]
    assert next(line for line in lines if line[:1] == ["data"])[-2:] == ["+44.4%", "slower"]
    assert "+50.0 µs" in out
    assert "16 take the same time in both" in out


def test_the_gate_lets_pass_and_stops(call) -> None:
    code, out, err = call("old", "new", "--gate", "50%")
    assert (code, err) == (0, "")
    assert "gate: nothing got slower by more than 50%" in out
    code, out, err = call("old", "new", "--gate", "5%")
    assert code == 5
    assert "error: slower by more than the gate of 5%: step +8.2%, data +44.4%" in err
    assert "data: 900 µs -> 1.30 ms" in err
    assert "+44.4%" in out
    assert call("new", "old", "--gate", "5%")[0] == 0


def test_one_object_on_stdout(call) -> None:
    code, out, err = call("old", "new", "--json", "--gate", "5%")
    assert code == 5
    diff = json.loads(out)
    assert diff["gate"] == {"limit": 0.05, "beyond": ["step", "data"]}
    assert diff["error"]["exit_code"] == 5
    assert diff["components"][0]["name"] == "data"
    assert diff["kernels"][0]["change"] == pytest.approx(0.05 / 0.252)
    assert "slower by more than the gate" in err
    code, out, err = call("old", "old", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["notes"] == ["a profile is compared with itself"]
    assert json.loads(out)["gate"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("old", "new", "graph"), 2, "diff needs two profiles, got 3"),
        (("old", "new", "--gate", "lots"), 2, "--gate takes a percentage such as 5%, not 'lots'"),
        (("old", "missing"), 3, "no profile there"),
        (("old", "."), 3, "profile.json is missing"),
        (("torn.json", "new", "--json"), 3, "torn.json is not JSON"),
    ],
)
def test_mistakes(call, arguments: tuple[str, ...], code: int, message: str) -> None:
    Path("torn.json").write_text(json.dumps(profiles.eager())[:500])
    exit_code, out, err = call(*arguments)
    assert exit_code == code
    assert message in err
    assert out == "" or json.loads(out)["error"]["exit_code"] == code


def test_it_needs_no_torch(call: Call, runs_without_torch: Callable[..., None]) -> None:
    runs_without_torch("diff", "old", "new")
