"""dlrm as a user types it, on sizes of a moment."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recperf.ops import history
from recperf.train import loop
from recperf.workloads import find

TINY = ["--model.bottom", "8", "16", "4", "--model.dim", "4", "--model.top", "8", "1", "--train.batch-size", "64"]
TINY += ["--data.batches", "6", "--data.held-out-batches", "2", "--train.device", "cpu", "--train.threads", "1"]
KAGGLE = ["--preset", "criteo-kaggle", "--model.dim", "4", "--model.top", "8", "1", "--model.bottom", "13", "8", "4"]
KAGGLE += ["--train.batch-size", "64", "--train.device", "cpu", "--data", "criteo"]
QUICKLY = ["--no-peaks", "--no-report", "--quiet"]
Call = Callable[..., tuple[int, str, str]]


def result(folder: str = "r") -> dict[str, Any]:
    return dict(json.loads(Path(folder, "result.json").read_text()))


def steps(folder: str = "r") -> list[int]:
    events = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["kind"] == "step"]


@pytest.mark.parametrize("preset", find("dlrm").presets)
def test_every_preset_can_be_shown_and_looked_at(call: Call, preset: str) -> None:
    code, out, err = call("show", "dlrm", "--preset", preset, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert shown["config"]["model"]["interaction"] in ("dot", "dcn")
    scale = ["--model.row-scale", "0.001"] if preset == "criteo-kaggle" else []
    code, _, err = call("run", "dlrm", "--preset", preset, *scale, "--dry-run", "--train.device", "cpu")
    assert code == 0, err


def test_a_run_leaves_a_result_with_its_switches(call: Call) -> None:
    history.choose("auto")  # As another run of this process does; it is no operator of this one.
    code, out, err = call("run", "dlrm", *TINY, "--run-dir", "r", "--no-peaks", "--no-report", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert printed == result()
    assert printed["data"]["synthetic"] is True
    assert printed["data"]["rows"] == (6 + 2) * 64
    assert set(printed["quality"]["baselines"]) == {"majority", "planted"}
    settings = printed["performance"]["settings"]
    assert settings["graph"] == "off: no GPU"
    assert re.search("(native|reference): bag, dot, draw, mlp", settings["operators"])
    assert settings["precision"] == "float32: a CPU"
    assert sum(printed["performance"]["budget"].values()) == pytest.approx(1)
    assert steps() == [1, 2, 3, 4, 5, 6]


def import_log(call: Call, lines: int) -> None:
    """Import a log in Criteo's layout as `criteo`, its categories hashed to 50 rows."""
    draw = np.random.default_rng(3)
    with Path("train.txt").open("w") as file:
        for _ in range(lines):
            numbers = (str(number) if number >= 0 else "" for number in draw.integers(-20, 500, 13))
            categories = (f"{number:08x}" for number in draw.integers(0, 99, 26))
            file.write("\t".join([str(draw.integers(2)), *numbers, *categories]) + "\n")
    code, _, err = call("data", "import", "train.txt", "--clicks", "--hash", "50", "--name", "criteo")
    assert code == 0, err


def test_a_criteo_log_is_imported_and_trained_on(call: Call) -> None:
    import_log(call, 700)
    code, _, err = call("run", "dlrm", *KAGGLE, "--data.split", "time", "--run-dir", "r", *QUICKLY)
    assert code in (0, 5), err
    finished = result()
    assert (finished["data"]["rows"], finished["data"]["train_rows"]) == (700, 560)
    assert finished["data"]["split"] == "time; rows without times, in order of the file"
    model = json.loads(Path("r", "config.json").read_text())["config"]["model"]
    assert model["features"] == [f"c{number}" for number in range(1, 27)]
    assert set(model["rows"]) == {50}
    assert model["bottom"][0] == 26, "13 numbers, and for each whether it is missing"
    assert finished["performance"]["settings"]["input"] == "pageable: rows are read from files"
    assert len(steps()) == -(-finished["data"]["train_rows"] // 64)


def test_a_stopped_run_goes_on_to_the_same_result(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random batches with AdamW; test_clicks.py resumes one on imported clicks."""
    arguments = ["run", "dlrm", *TINY, "--train.optimizer", "adamw"]
    assert call(*arguments, "--run-dir", "straight", *QUICKLY)[0] == 0
    straight, real = result("straight"), loop.take_step

    def interrupted(recipe: Any, batches: Any, step: int, record_norm: Any) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(recipe, batches, step, record_norm)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", interrupted)
        assert call(*arguments, "--run-dir", "r", *QUICKLY)[0] == 75
    assert not Path("r", "result.json").exists()
    code, _, err = call("run", "--resume", "r", *QUICKLY)
    assert code == 0, err
    assert result()["quality"] == straight["quality"]
    assert result()["provenance"]["resumes"] == 1


def test_a_finished_run_has_a_model_and_a_disk_without_room_is_refused_before_it_trains(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("run", "dlrm", *TINY, "--run-dir", "r", *QUICKLY)[0] == 0
    (saved,) = Path("r/checkpoints/seed-42").glob("step-*")
    assert int(saved.name[5:]) == len(steps())
    full = SimpleNamespace(free=1000)
    monkeypatch.setattr("recperf.execution.training.disk_usage", lambda place: full)
    code, _, err = call("run", "dlrm", *TINY, "--run-dir", "s", *QUICKLY)
    assert code == 4
    assert "of disk; 1.0 KiB are free" in err
    assert not Path("s").exists()
    assert call("run", "dlrm", *TINY, "--run-dir", "s", *QUICKLY, "--train.no-checkpoint-end")[0] == 0
