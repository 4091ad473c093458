"""The torch module of docs/add-a-workload.md, registered as an installed package does, is used as any workload."""

from __future__ import annotations

import csv
import json
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recperf import stop, workloads
from recperf.cli import main
from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.errors import ConfigError
from recperf.runs.contract import check_run
from recperf.train.metrics import auc
from recperf.workloads.torch_module import Columns
from recperf.workloads.torch_module.build import TorchOptimizer, logits_of

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = ["--data.source", "embedded", "--train.device", "cpu", "--train.batch-size", "2048", "--train.epochs", "3"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The example as pip would install it, with an entry point."""
    facts = tmp_path / "site" / "wide_and_deep-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: wide-and-deep\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[recperf.workloads]\nwide-and-deep = wide_and_deep:WIDE_AND_DEEP\n")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(facts.parent)
    monkeypatch.chdir(tmp_path)
    workloads._installed.cache_clear()
    yield
    workloads._installed.cache_clear()


def losses(run: str) -> list[float]:
    events = map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


def test_it_stops_resumes_with_equal_losses_and_leaves_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "wide-and-deep", *DATA, "--no-peaks", "--run-dir", "whole"]) == 0
    result = json.loads(Path("whole/result.json").read_text())
    assert result["quality"]["met"]
    assert {"wide", "embedding", "deep", "loss", "backward", "update"} <= result["performance"]["budget"].keys()
    assert "wide-and-deep" in Path("whole/report.html").read_text()
    figures = json.loads(Path("whole/profile.json").read_text())["workload"]
    parts = {part["name"]: part for part in figures["components"]}
    # Two products for each layer, 2048 rows: 3 tables of 8 columns and the numbers of a row, 32 units, 1 logit.
    dense = (parts["deep"]["flops"] / 2 / 2048 - 32) / 32 - 24
    assert dense == int(dense) > 0
    assert parts["backward"]["flops"] == 2 * parts["deep"]["flops"]

    seen: list[str] = []

    def after_the_first_epoch(name: str) -> None:
        seen.append(name)
        if name == "save: folder synced" and seen.count(name) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stop, "listener", after_the_first_epoch)
    background = ["--train.checkpoint-background", "off"]
    assert main(["run", "wide-and-deep", *DATA, *background, "--no-peaks", "--run-dir", "halves"]) == 75
    monkeypatch.setattr(stop, "listener", None)
    assert 0 < len(losses("halves")) < len(losses("whole"))
    capsys.readouterr()
    assert main(["run", "--resume", "halves", "--no-peaks"]) == 0
    assert "resumes at step 41 of 120" in capsys.readouterr().out
    assert losses("halves") == losses("whole")
    halves = json.loads(Path("halves/result.json").read_text())
    assert halves["quality"]["metrics"] == result["quality"]["metrics"]
    assert all(claim.holds for claim in check_run(Path("halves"), ()))


def test_a_trained_module_scores_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--train.max-steps", "5", "--train.schedule", "constant", "--no-peaks", "--no-report"]
    assert main(["run", "wide-and-deep", *DATA, *few, "--target.beat", "none", "--dim", "4", "--run-dir", "run"]) == 0
    assert main(["score", "run", "--held-out", "--output", "held-out.csv"]) == 0
    rows = list(csv.DictReader(Path("held-out.csv").read_text().splitlines()))
    logits, labels = (torch.tensor([float(row[name]) for row in rows]) for name in ("logit", "label"))
    assert auc(logits, labels) == json.loads(Path("run/result.json").read_text())["quality"]["metrics"]["auc"]
    assert main(["recommend", "run", "--users", "1", "--k", "3"]) == 0
    assert main(["show", "wide-and-deep", *DATA[:2]]) == 0
    assert "embedding 21,192" in capsys.readouterr().out


def test_it_trains_on_imported_clicks_with_several_categories_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{row % 7},{'a|b' if row % 3 else 'c'},{row % 5},{int(row % 3 > 0)}" for row in range(3000)]
    Path("clicks.csv").write_text("\n".join(["shop,tags,price,label", *rows]))
    columns = ["--label", "label", "--multi", "tags"]
    assert main(["data", "import", "clicks.csv", "--clicks", *columns, "--name", "shop"]) == 0
    few = ["--train.device", "cpu", "--train.epochs", "2", "--no-peaks", "--no-report", "--target.beat", "none"]
    assert main(["run", "wide-and-deep", "--data", "shop", *few, "--run-dir", "run"]) == 0
    metrics = json.loads(Path("run/result.json").read_text())["quality"]["metrics"]
    assert metrics["auc"] > 0.99
    assert "validation_log_loss" in metrics


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), betas=(0.8, 0.9), capturable=False),
        lambda parameters: torch.optim.RMSprop([{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]),
    ],
)
def test_an_optimizer_of_torch_goes_on_from_its_state(make: Any) -> None:
    def trained(steps: int, state: Any = None) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(1)
        layer = nn.Linear(3, 2)
        optimizer = TorchOptimizer(make(list(layer.parameters())))
        if state is not None:
            layer.load_state_dict(state[0])
            optimizer.load_state_dict(json_values(state[1]))
        for step in range(steps):
            layer(torch.full((4, 3), 0.1 * (step + 1))).square().mean().backward()
            optimizer.step(optimizer.peak / (step + 2))
        return list(layer.parameters()), (layer.state_dict(), optimizer.state_dict())

    def json_values(value: Any) -> Any:
        """As a checkpoint returns a state: lists in place of tuples."""
        if isinstance(value, dict):
            return {key: json_values(inner) for key, inner in value.items()}
        return [json_values(inner) for inner in value] if isinstance(value, list | tuple) else value

    torch.manual_seed(1)
    reference = nn.Linear(3, 2)
    optimizer = make(list(reference.parameters()))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for run in range(2):
        for step in range(3):
            optimizer.zero_grad()
            reference(torch.full((4, 3), 0.1 * (step + 1))).square().mean().backward()
            for group, rate in zip(optimizer.param_groups, rates):
                of = torch.tensor if isinstance(group["lr"], torch.Tensor) else float
                group["lr"] = of(rate / (step + 2))
            optimizer.step()
        if not run:
            _, state = trained(3)
    resumed, _ = trained(3, state)
    for one, other in zip(resumed, reference.parameters()):
        torch.testing.assert_close(one, other)


def test_a_module_must_return_one_logit_for_each_row() -> None:
    module = import_module("wide_and_deep")
    batch = ClickBatch(torch.zeros(2, 1), JaggedFeatures.from_ids(("a",), torch.tensor([[1, 2]])), torch.ones(2))
    made = module.WideAndDeep(Columns(("a",), (3,), 1), module.WideAndDeepConfig())
    assert logits_of(made, batch).shape == (2,)
    made.deep = nn.Linear(9, 3)
    with pytest.raises(ConfigError, match="returns"):
        logits_of(made, batch)
    with pytest.raises(ConfigError, match="learning rates"):
        TorchOptimizer(torch.optim.SGD(made.parameters(), lr=0.0))
