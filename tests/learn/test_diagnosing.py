"""Diagnosing: which change is kept, what its share is, and what is said; trainings are made up, as a config scores."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted_logs import labelled_events, rows
from planted_quality import CASES, made, prepare, train

from recperf.config import to_json
from recperf.errors import ConfigError
from recperf.execution import diagnosing
from recperf.execution.beside_changes import part_of
from recperf.execution.diagnosing import Diagnosing, Quiet
from recperf.execution.tried_configs import key_of, with_change
from recperf.execution.workload import TRAINED, load
from recperf.learn.experiments import changes, left_out, much_larger_rates
from recperf.learn.gains import Scored
from recperf.learn.records import InputSeen, Mean
from recperf.runs import diagnosis_report
from recperf.workloads import find, names
from recperf.workloads.choice import choose

Run = tuple[Any, Any, Path]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", str(folder / "home"))
        patch.setattr("recperf.execution.measuring.measure_run", lambda *_: None)
        case = replace(next(one for one in CASES if one.name == "clicks: width 2"), log=made(rows, count=1200))
        workload, config, _ = prepare(case, "small", 3)
        config = replace(config, baseline_seconds=1e-6)
        train(workload, config, folder / "run")
    return workload, config, folder / "run"


def made_up(score: Any, monkeypatch: pytest.MonkeyPatch, noise: float = 0.003) -> None:
    """Trainings whose AUC is what `score` says of a config, and what a seed adds."""

    def trained(self: Diagnosing, config: Any, seed: int, name: str) -> Scored:
        key = key_of(config)
        values = dict(self._scored[key].values) if key in self._scored else {}
        drawn = random.Random(f"{config.model} {config.train} {seed}")
        values[seed] = score(config) + drawn.gauss(0, noise)
        self._scored[key] = Scored(values, {one: [v - 0.01, v, v + 0.01] for one, v in values.items()}, values)
        return self._scored[key]

    monkeypatch.setattr(Diagnosing, "_train", trained)
    monkeypatch.setattr(diagnosing, "scored_of", lambda evidence, task: Scored({}, {}, {}))


def diagnosed(run: Run, minutes: float = 100.0) -> Any:
    workload, config, folder = run
    quiet: Any = Quiet()
    return Diagnosing(workload=workload, config=config, folder=folder, report=quiet, minutes=minutes).run()


def test_what_gains_is_kept_and_its_share_is_its_gain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(lambda config: 0.7 + 0.05 * min(config.model.dim, 8) / 8 + 0.02 * (config.train.epochs > 12), monkeypatch)
    found = diagnosed(run)
    shares = {share.name: share.gain.value for share in found.shares if share.limit != "baseline"}
    assert found.verdict.limit == "capacity"
    assert found.verdict.confidence == "high"
    assert found.verdict.second == "steps"
    assert sum(shares.values()) == pytest.approx(found.best - found.score)
    assert shares["twice the epochs"] == pytest.approx(0.02, abs=0.012)
    assert "--train.epochs 24" in found.advice
    assert found.advised.low < found.best - found.score < found.advised.high
    again = choose(from_diagnosis=run[2]).config
    assert (again.model.dim, again.train.epochs) == (8, 24)
    text = str(diagnosis_report.DiagnosisReport.of(found))
    assert "recperf run --from-diagnosis" in text
    assert len(text.splitlines()) <= 15


def test_changes_that_gain_nothing_are_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(lambda config: 0.7, monkeypatch)
    found = diagnosed(run)
    assert not found.advice
    assert found.verdict.limit in ("noise", "unclear")
    assert not [one for one in found.tried if one.kept]


def test_what_changes_gain_only_together_is_a_part_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def score(config: Any) -> float:
        wide, long = config.model.dim >= 4, config.train.epochs > 12
        return 0.7 + 0.05 * wide + 0.04 * (wide and long)

    made_up(score, monkeypatch, noise=0.001)
    found = diagnosed(run)
    shares = {share.limit: share for share in found.shares if share.limit != "baseline"}
    assert shares["interaction"].gain.value == pytest.approx(0.04, abs=0.005)
    assert shares["interaction"].gain.certain
    assert abs(shares["steps"].gain.value) < 0.005
    assert sum(share.gain.value for share in shares.values()) == pytest.approx(found.best - found.score, abs=0.003)


def test_more_rows_are_named_where_only_they_gain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(lambda config: 0.8 - 0.1 * (0.5 / config.data.train_share) ** 0.5, monkeypatch, noise=0.001)
    found = diagnosed(run)
    assert found.verdict.limit == "data"
    assert found.verdict.confidence == "low"
    assert found.curve.doubled.low < 0.1 * (0.5**0.5 - 0.5) < found.curve.doubled.high
    assert [point.share for point in found.curve.points] == [0.25, 0.5, 1.0]
    assert "twice as many would gain" in found.verdict.because[0]


def test_one_epoch_is_not_screened(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, config, folder = run
    config = replace(config, train=replace(config.train, epochs=1, max_steps=0))
    made_up(lambda config: 0.7 + 0.05 * (config.train.learning_rate > 0.02), monkeypatch)
    quiet: Any = Quiet()
    cost = Diagnosing(workload=workload, config=config, folder=folder, report=quiet)._cost
    found = diagnosed((workload, config, folder), minutes=6 * cost / 60)
    assert found.tried
    assert not any(one.screened for one in found.tried)


def test_experiments_without_time_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(lambda config: 0.7, monkeypatch)
    found = diagnosed(run, minutes=1e-9)
    assert not found.tried
    assert "twice the epochs" in found.left_out
    assert found.verdict.confidence == "low"


def test_rates_that_moved_nothing_are_raised_as_far_as_weights_are_to_move() -> None:
    config = to_json(find("dlrm-v4").presets["mlperf"]())
    (raised,) = much_larger_rates(config, 3e-6)
    assert raised.fields == {"train.learning_rate": 0.1, "train.table_learning_rate": 0.1}
    assert not much_larger_rates(config, 0.1)
    assert not much_larger_rates(config, None)


@pytest.mark.parametrize("name", names())
def test_every_workload_has_experiments_that_its_config_accepts(name: str) -> None:
    workload = find(name)
    config = next(iter(workload.presets.values()))()
    limits = set()
    for change in changes(to_json(config)):
        try:
            assert with_change(config, change) != config
        except ConfigError:
            continue
        limits.add(change.limit)
    assert {"steps", "rate", "capacity"} <= limits


def test_labelled_events_have_a_curve_the_recent_half_and_inputs_to_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path))
    healthy = next(one for one in CASES if one.name == "events: nothing wrong")
    workload, config, _ = prepare(replace(healthy, log=made(labelled_events, count=400)), "small", 3)
    whole, quarter = (load(workload.build)(one) for one in (config, part_of(config, 0.25)))
    assert quarter.data["train_rows"] == pytest.approx(whole.data["train_rows"] / 4, rel=0.3)
    for part in ("holdout", "validation"):
        assert quarter.positions(getattr(quarter, part)).tolist() == whole.positions(getattr(whole, part)).tolist()
    probed = dict(whole.trial(0).probes())
    assert list(probed) == ["", TRAINED, "item_id", "actions", "running rates"]
    # A model that was not trained uses its table; what it adds for running rates is zero so far.
    assert (probed["item_id"] != probed[""]).any()
    costs = {"running rates": 0.0, "item_id": 0.5, "actions": 0.0}
    inputs = [InputSeen(name=name, costs=Mean(value=cost, error=0.01, rows=80)) for name, cost in costs.items()]
    names = {one.name for one in (*changes(to_json(config)), *left_out(to_json(config), inputs))}
    assert {"the recent half of the rows", "leaving out running rates"} <= names
    assert "leaving out item_id" not in names
    assert part_of(with_change(config, left_out(to_json(config), inputs)[0]), 0.5).data.train_share == 0.5


@pytest.mark.long
def test_experiments_are_trained_and_read_again(run: Run) -> None:
    found = diagnosed(run, minutes=3.0)
    assert found.best >= found.score
    assert any(not one.screened for one in found.tried)
    assert {one.name for one in found.sums} == {"its second seed", "gradient boosting"}
    assert [point.share for point in found.curve.points] == [0.25, 0.5, 1.0]
    # It goes on where it was: nothing is trained again.
    assert diagnosed(run, minutes=3.0).tried[0].gain == found.tried[0].gain
