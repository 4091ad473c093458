"""Where claims about a run begin and cease to hold, by numbers on both sides of each bound."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import example_runs as examples
import msgspec
import pytest

from recperf.errors import DataError
from recperf.jsonfile import sealed
from recperf.measure.peaks.records import Peaks
from recperf.measure.profile import StepProfile
from recperf.measure.profile_records import Pair, PairLookups
from recperf.measure.records import Percentiles
from recperf.runs import contract
from recperf.runs.contract import judge
from recperf.runs.evidence import Evidence, curve, kind_of, read_profile
from recperf.runs.record import PROFILE_MARK
from recperf.runs.schemas import Event, Scores, Step


def forged(stated: Any, derived: Any) -> int:
    return len(list(contract._differences("", stated, derived)))


def test_a_forged_number_may_differ_by_a_billionth() -> None:
    for value in (0.8, -2.5e9, 3e-7):
        assert forged({"auc": value * (1 + 0.75e-9)}, {"auc": value}) == 0
        for factor in (1 + 1.5e-9, 0.999, 1.01, -1.0):
            assert forged({"auc": value * factor}, {"auc": value}) == 1
    assert forged([0.9e-18], [0.0]) == 0
    assert forged([1e-12], [0.0]) == forged([1.5e-18], [0.0]) == forged([0.0], [1e-9]) == 1


def test_every_place_of_a_result_is_compared() -> None:
    derived = {"a": 1, "b": [1.0, {"c": "x"}], "d": None}
    assert forged({"a": 1, "b": [1.0, {"c": "x"}], "d": None}, derived) == 0
    assert forged({"a": 2, "b": [1.1, {"c": "y"}], "d": 0}, derived) == 4
    assert forged({"b": [1.0], "e": 1}, derived) == 3
    assert forged({"a": 1, "b": {"0": 1.0}}, derived) == 1
    # What was derived may be a tuple; a number is neither its text nor an integer beside it.
    assert forged([1.0, 2.0], (1.0, 2.0)) == 0
    assert forged(["1.0", 1.0], [1.0, 2]) == 2
    assert list(contract._differences("", {"b": [1.0, {"c": 1.25}]}, {"b": [1.0, {"c": 1.5}]})) == [
        "result.json: b.1.c is 1.25, the other files give 1.5"
    ]


def test_three_objections_are_named_and_the_others_counted() -> None:
    for count, shown in ((1, "0"), (3, "0; 1; 2"), (4, "0; 1; 2; and 1 more"), (6, "0; 1; 2; and 3 more")):
        found = contract.finding(map(str, range(count)), "fine")
        assert (found.holds, found.detail) == (False, shown)
    assert contract.finding([], "fine") == contract.Finding(holds=True, detail="fine")


@pytest.mark.parametrize(("by", "holds"), [(0.625, True), (0.626, False), (0.5, True), (0.9, False)])
def test_the_loss_falls_from_the_first_to_the_last_twentieth(by: float, holds: bool) -> None:
    # Of 40 steps two at either end: from a mean of 0.75 to one of 0.125.
    losses = {7: [1.0, 0.5, *[8.0] * 18, *[-8.0] * 18, 0.25, 0.0], 8: [9.0] * 20 + [1.0] * 20}
    run: Any = SimpleNamespace(seeds=lambda: range(7, 9), losses=lambda seed: losses[seed])
    found = judge(contract.loss_falls(by), run)
    assert (found.holds, "by 0.625 in seed 7, the least of 2" in found.detail) == (holds, True)


def test_the_loss_of_few_steps_is_that_of_the_first_and_the_last() -> None:
    run: Any = SimpleNamespace(seeds=lambda: range(1), losses=lambda _: [1.0, 9.0, 9.0, 9.0, 0.5])
    assert [judge(contract.loss_falls(by), run).holds for by in (0.5, 0.51)] == [True, False]


Times = tuple[float, float, float]
STEADY = (10.0, 10.0, 10.0)


def measured(
    shares: dict[str, float], step: Times = STEADY, other_work: float | None = 0.0, peaks: float | None = 0.0
) -> Any:
    """A run whose steps and ceilings were measured beside that much other work."""
    profile = msgspec.convert(examples.profile(shares=shares, other_work=other_work), StepProfile)
    profile.step_ms = Percentiles(*step)
    ceilings = msgspec.convert({**examples.peaks(), "other_work": peaks}, Peaks)
    return SimpleNamespace(profile=profile, figures=profile.workload, peaks=ceilings)


@pytest.mark.parametrize(
    ("own", "other", "step", "holds"),
    [
        (0.5, 0.375, STEADY, True),
        # Steps that vary by a quarter hide an eighth of a half, and no more.
        (0.5, 0.375, (8.0, 10.0, 13.0), True),
        (0.5, 0.375, (8.0, 10.0, 13.2), None),
        (0.375, 0.5, (8.0, 10.0, 13.2), False),
        (0.375, 0.5, (8.0, 10.0, 15.0), None),
        (0.5, 0.5, (0.0, 0.0, 0.0), False),
        (0.5, 0.375, (0.0, 0.0, 0.0), True),
        (0.2, 0.6, STEADY, False),
    ],
)
def test_the_largest_limit_leads_by_more_than_steps_vary(
    own: float, other: float, step: Times, holds: bool | None
) -> None:
    run = measured({"python": own / 2, "input": own / 2, "compute": other, "cache": 0.01}, step)
    assert judge(contract.limits_lead("python", "input", "absent"), run).holds is holds


def test_limits_are_named_together() -> None:
    claim = contract.limits_lead("python", "input", called="the host")
    assert (claim.name, claim.text) == ("limit: the host", "the host takes the largest share of a step")
    assert contract.limits_lead("python", "input").name == "limit: python with input"
    run = measured({"python": 0.5, "input": 0.25, "compute": 0.25})
    assert judge(claim, run).detail == "the host 75% of the step, compute 25%"


@pytest.mark.parametrize(
    ("steps", "ceilings", "said"),
    [
        (0.15, 0.15, ""), (0.16, 0.0, "16% of the cores while steps"), (0.0, 0.16, "16% of the cores while ceilings"),
        (0.2, 0.3, "30% of the cores while ceilings"), (0.3, 0.2, "30% of the cores while steps"),
        (None, 0.1, ""), (None, 0.3, "30% of the cores while ceilings"), (None, None, ""),
    ],
)  # fmt: skip
def test_beside_other_work_nothing_is_judged(steps: float | None, ceilings: float | None, said: str) -> None:
    for shares, holds in (({"python": 0.6, "compute": 0.4}, True), ({"python": 0.4, "compute": 0.6}, False)):
        found = judge(contract.limits_lead("python"), measured(shares, STEADY, steps, ceilings))
        assert found.holds is (None if said else holds)
        assert said in found.detail


@pytest.mark.parametrize(
    ("cold", "holds"),
    [
        ((3.75, 4.0, 4.5), True), ((3.8, 4.0, 4.5), False), ((1.4, 1.5, 1.6), True), ((1.4, 1.5, 1.58), False),
        ((1.6, 2.0, 3.3), None),
    ],
)  # fmt: skip
def test_ranges_of_a_ratio_need_a_value_in_common(cold: Times, holds: bool | None) -> None:
    """Hot lookups take 0.8 to 1.25 ms in a step, and cold ones outside a step 2 to 3 times what hot ones do. A ratio
    from 1.28 to 4.13 is too wide to be judged."""
    pair, run = examples.pair(), measured({"python": 1.0})
    for arm, ms in (("hot", (0.8, 1.0, 1.25)), ("cold", cold)):
        pair[arm]["components"][2]["ms"] = dict(zip(("p20", "p50", "p80"), ms))
    run.pair = msgspec.convert(pair, Pair)
    run.pair.lookups = PairLookups(hot=Percentiles(1.0, 1.0, 1.0), cold=Percentiles(2.0, 2.5, 3.0))
    claim = contract.pair_ratio_as_measured("embedding")
    assert judge(claim, run).holds is holds
    run.pair.hot.components[2].ms.p20 = 0.0
    assert judge(claim, run).detail == "no evidence: pair.json has no times of embedding"
    run.pair.hot.components[2].ms.p20 = 0.8
    run.pair.lookups.hot.p20 = 0.0
    assert "no lookups outside a step" in judge(claim, run).detail


def trial(folder: Path, seed: int) -> None:
    evaluation = json.dumps({"seed": seed, "metrics": {}, "best": {"step": 1, "epoch": 1, "metrics": {}}})
    (folder / f"trial-{seed}.json").write_text(evaluation)


def test_every_seed_that_was_asked_for_needs_a_trial(tmp_path: Path) -> None:
    for number, (seed, seeds, trials, fits) in enumerate(
        [(42, 1, 1, True), (42, 2, 2, True), (42, 2, 1, False), (42, 1, 2, False), (42, 0, 0, False),
         ("42", 1, 1, False), (42, True, 1, False), (42, None, 1, False)]
    ):  # fmt: skip
        folder = examples.make_run(tmp_path / str(number), config={"seed": seed, "seeds": seeds})
        for each in range(trials):
            trial(folder, 42 + each)
        if fits:
            assert list(Evidence(folder).seeds()) == [42, 43][:trials]
        else:
            with pytest.raises(DataError, match="seeds"):
                Evidence(folder).seeds()


def logged(tmp_path: Path, *events: dict[str, Any]) -> Evidence:
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"schema": 1, "workload": "w", "config": {}, "task": "click-labels"}')
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Evidence(folder)


def step(number: int, loss: float | None = 0.5, seed: int = 42) -> dict[str, Any]:
    return {"kind": "step", "seed": seed, "step": number, "loss": loss}


def test_losses_are_those_of_every_step_once(tmp_path: Path) -> None:
    assert logged(tmp_path, step(2, 0.25), step(1), step(1, 9.0, seed=43)).losses(42) == [0.5, 0.25]
    for steps in ([step(1)], [], [step(1), step(3)], [step(2), step(3)], [step(1), step(1)], [step(1), step(2, None)]):
        with pytest.raises(DataError, match="every step of seed 42 once"):
            logged(tmp_path, *steps).losses(42)


def test_only_whole_evaluations_of_validation_rows_count(tmp_path: Path) -> None:
    def evaluation(**fields: Any) -> dict[str, Any]:
        return {"kind": "metric", "seed": 42, "step": 9, "epoch": 1, "split": "valid", "auc": 0.8, **fields}

    history = logged(tmp_path, evaluation(), evaluation(split="train", auc=0.9), evaluation(seed=43))._history(42)
    assert [(row.step, row.epoch, row.metrics) for row in history] == [(9, 1, {"auc": 0.8})]
    for fields in ({"epoch": None}, {"auc": "high"}):
        with pytest.raises(DataError, match="damaged"):
            logged(tmp_path, evaluation(**fields))._history(42)
    with pytest.raises(DataError, match="damaged"):
        logged(tmp_path, {"kind": "metric", "seed": 42, "step": 9, "epoch": 1, "split": "valid", "mrr": 1.0})._history(
            42
        )
    with pytest.raises(DataError, match="no evaluation of seed 42"):
        logged(tmp_path, evaluation(split="train"))._history(42)


def test_curves_hold_finite_values_by_seed() -> None:
    def scores(kind: str, number: int, **metrics: Any) -> Scores:
        return Scores(kind=kind, seed=42, step=number, metrics=metrics)

    log: list[Event] = [
        Step(kind="step", seed=42, step=1, loss=0.5), Step(kind="step", seed=43, step=1, loss=0.75, gradient_norm=2),
        Step(kind="step", seed=42, step=2, loss=None), Step(kind="step", seed=42, step=3, loss=float("nan")),
        Step(kind="step", seed=42, step=4, loss=0.25), scores("metric", 4, auc=0.8, loss=7.0),
        scores("training", 4, auc=0.9), scores("metric", 5, auc="high"), scores("metric", 6, auc=1),
        Event(kind="notice"),
    ]  # fmt: skip
    assert curve(log, "loss") == {42: [(1, 0.5), (4, 0.25), (4, 7.0)], 43: [(1, 0.75)]}
    assert curve(log, "auc") == {42: [(4, 0.8), (6, 1.0)]}
    assert curve(log, "gradient_norm") == {43: [(1, 2.0)]}


@pytest.mark.parametrize(
    ("shares", "fits"),
    [([0.25, 0.75], True), ([0.0, 1.0], True), ([0.259, 0.75], True), ([0.241, 0.75], True), ([0.265, 0.75], False),
     ([0.235, 0.75], False), ([-0.001, 1.001], False), ([], False), ([2.0], False)],
)  # fmt: skip
def test_shares_sum_to_one_within_a_hundredth(tmp_path: Path, shares: list[float], fits: bool) -> None:
    profile = examples.profile({f"part{number}": 1.0 for number in range(len(shares))} or {"none": 1.0})
    profile["workload"]["components"] = profile["workload"]["components"][: len(shares)]
    for row, share in zip(profile["workload"]["components"], shares):
        row["share"] = share
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(sealed(profile)))
    if fits:
        assert [row.share for row in read_profile(path).workload.components] == shares
    else:
        with pytest.raises(DataError, match="do not sum to 1"):
            read_profile(path)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"config.json": "{}", "trace.json": "{}"}, "run"), ({"result.json": "{}", "profile.json": "{}"}, "run"),
        ({"profile.json": "{}"}, "profile"), ({"trace.json": "[]"}, "traces"), ({"trace.json.gz": ""}, "traces"),
        ({}, "run"), ({"notes.txt": ""}, "run"),
    ],
)  # fmt: skip
def test_the_kind_of_a_folder(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert kind_of(tmp_path) == kind


def test_the_kind_of_a_file(tmp_path: Path) -> None:
    for name, text, kind in (
        ("a.json", "{}", "profile"), ("b.json", '{"traceEvents": []}', "trace"), ("c.json", " [", "trace"),
        ("d.json.gz", "{}", "trace"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        assert kind_of(tmp_path / name) == kind


def test_a_chosen_name_is_shortened_to_its_random_end() -> None:
    assert Evidence(Path("micro-dlrm-20261118-101112-a1b2c3")).short_name == "micro-dlrm a1b2c3"
    assert Evidence(Path("my-run-101112-a1b2c3")).short_name == "my-run-101112-a1b2c3"


def test_a_folder_without_a_result_is_unfinished_or_a_profile(tmp_path: Path) -> None:
    folder = examples.make_run(tmp_path / "run")
    assert Evidence(folder).result.workload == "micro-dlrm"
    (folder / "result.json").unlink()
    with pytest.raises(DataError, match="not finished") as refused:
        _ = Evidence(folder).result
    assert refused.value.fix == f"recperf run --resume {folder}"
    (folder / PROFILE_MARK).touch()
    with pytest.raises(DataError, match="holds a profile, not a run"):
        _ = Evidence(folder).result
    assert (kind_of(folder), kind_of(tmp_path)) == ("profile", "run")
