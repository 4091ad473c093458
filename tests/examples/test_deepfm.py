"""The example of docs/add-a-workload.md: registered by one line, it runs, resumes and is checked like any workload."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from recperf import workloads
from recperf.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(workloads.WORKLOADS, "deepfm", "deepfm.config:DEEPFM")


@pytest.mark.long
def test_it_trains_beats_its_baseline_and_passes_its_claims(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    data = ["--data.source", "embedded", "--train.device", "cpu"]
    assert main(["run", "deepfm", *data, "--train.epochs", "2", "--no-peaks", "--run-dir", run]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["quality"]["met"]
    assert result["quality"]["metrics"]["auc"] > result["quality"]["baselines"]["user_item_bias"]["auc"]
    assert {"embedding", "interaction", "top", "backward", "update"} <= result["performance"]["budget"].keys()
    assert main(["check", run]) == 0
    assert main(["run", "--resume", run]) == 0
    assert main(["show", "deepfm"]) == 0
    assert "interaction" in capsys.readouterr().out


def test_its_factorization_machine_sums_all_pairs() -> None:
    from deepfm.build import DeepFM
    from deepfm.config import DeepFMConfig

    from recperf.data.batch import ClickBatch, JaggedFeatures
    from recperf.data.config import MovieLensConfig

    keys = ("user", "item", "occupation")
    model = DeepFM(DeepFMConfig(data=MovieLensConfig(source="embedded")), keys, seed=1)
    for parameter in model.mlp.parameters():
        torch.nn.init.zeros_(parameter)
    batch = ClickBatch(torch.zeros(2, 16), JaggedFeatures.from_ids(keys, torch.tensor([[3, 7], [5, 1], [2, 2]])), None)
    rows = torch.stack(list(model.embeddings(batch.features).values()))
    vectors, linear = rows[..., :-1], rows[..., -1]
    pairs = sum((vectors[a] * vectors[b]).sum(-1) for a, b in ((0, 1), (0, 2), (1, 2)))
    torch.testing.assert_close(model(batch), linear.sum(0) + pairs)


def test_a_workload_of_an_installed_package_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = EntryPoint("theirs", "deepfm.config:DEEPFM", "recperf.workloads")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [point] if group == "recperf.workloads" else []
    )
    workloads._installed.cache_clear()
    try:
        assert workloads.find("theirs").name == "deepfm"
        assert main(["show"]) == 0
        assert capsys.readouterr().out.count("DeepFM on MovieLens-100K") == 2
    finally:
        workloads._installed.cache_clear()
