"""dlrm-v4 by its settings for own events learns what a small log teaches, and nothing where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_events import Effect, planted

from recperf.cli import main


@pytest.mark.parametrize(("effect", "within"), [("last item", 0.03), ("none", 0.03)])
def test_a_small_log(
    effect: Effect,
    within: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recperf.execution.execute.measure_run", lambda *_: None)
    log = planted(effect, events=6_000, users=120, items=24, groups=3)
    command = ["run", "dlrm-v4", "--data", str(log.imported(tmp_path)), "--json", "--no-peaks", "--no-report"]
    options = ["--train.epochs", "4", "--ranking.users", "0", "--train.no-checkpoint-epochs"]
    assert main([*command, *options, "--run-dir", str(tmp_path / "run")]) in (0, 5)
    quality = json.loads(capsys.readouterr().out)["quality"]
    assert quality["metrics"]["auc"] > log.possible_auc() - within
    rules = {name: metrics["auc"] for name, metrics in quality["baselines"].items()}
    if effect == "none":
        assert quality["differences"][0]["standing"] != "below"
    else:
        # Those that do not know the last item cannot know the label.
        assert max(auc for name, auc in rules.items() if name != "gradient_boosting") < log.possible_auc() - 0.1
