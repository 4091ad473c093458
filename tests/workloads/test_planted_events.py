"""dlrm-v4 by its settings for own events learns what a small log teaches, and nothing where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_events import Effect, planted

from recperf.cli import main


@pytest.mark.long
@pytest.mark.parametrize(("effect", "epochs"), [("last item", 4), ("none", 2)])
def test_a_small_log(
    effect: Effect,
    epochs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("recperf.execution.execute.measure_run", lambda *_: None)
    log = planted(effect, events=8_000, users=160, items=30, groups=3)
    command = ["run", "dlrm-v4", "--data", str(log.imported(tmp_path)), "--json", "--no-peaks", "--no-report"]
    shorter = ["--data.history.length", "12", "--model.hstu.max-length", "21", "--ranking.users", "0"]
    options = [*shorter, "--train.epochs", str(epochs), "--train.no-checkpoint-epochs"]
    assert main([*command, *options, "--run-dir", str(tmp_path / "run")]) in (0, 5)
    quality = json.loads(capsys.readouterr().out)["quality"]
    rules = {name: metrics["auc"] for name, metrics in quality["baselines"].items()}
    if effect == "none":
        assert quality["differences"][0]["standing"] != "below"
    else:
        assert quality["metrics"]["auc"] > log.possible_auc() - 0.04
        # Those that do not know the last item cannot know the label.
        assert max(auc for name, auc in rules.items() if name != "gradient_boosting") < log.possible_auc() - 0.1
