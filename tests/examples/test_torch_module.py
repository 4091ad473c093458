"""The torch modules of docs/add-a-workload.md, registered as an installed package does, are used as any workload."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recperf
from recperf import stop, workloads
from recperf.cli import main
from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.distributed.config import DistributedConfig
from recperf.errors import ConfigError
from recperf.runs.contract import check_run
from recperf.tasks import EVENT_LABELS, NEXT_ITEM
from recperf.train.metrics import auc
from recperf.workloads.next_item.config import SequencesConfig
from recperf.workloads.torch_module import Columns, ItemModuleTrainConfig, ModuleConfig, torch_workload
from recperf.workloads.torch_module.build import TorchOptimizer, require_alike
from recperf.workloads.torch_module.clicks import logits_of
from recperf.workloads.torch_module.items import ModuleItems, item_vectors_of, vectors_of

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = ["--data.source", "embedded", "--train.device", "cpu", "--train.batch-size", "2048", "--train.epochs", "3"]


SEQUENCES = ["--data.users", "500", "--data.groups", "4", "--data.group-items", "5", "--train.device", "cpu"]
QUICK = ["--train.batch-size", "16", "--train.learning-rate", "1e-2", "--train.epochs", "4", "--dim", "16"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The examples as pip would install them, with entry points."""
    facts = tmp_path / "site" / "modules-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: modules\nVersion: 1.0\n")
    points = "wide-and-deep = wide_and_deep:WIDE_AND_DEEP\ngru4rec = gru4rec:GRU4REC\n"
    (facts / "entry_points.txt").write_text(f"[recperf.workloads]\n{points}")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(facts.parent)
    monkeypatch.chdir(tmp_path)
    workloads._installed.cache_clear()
    yield
    workloads._installed.cache_clear()


def losses(run: str) -> list[float]:
    events = map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


@pytest.mark.parametrize(
    ("name", "options", "parts", "resumes"),
    [
        ("wide-and-deep", DATA, {"wide", "embedding", "deep"}, "resumes at step 9 of 24"),
        ("gru4rec", [*SEQUENCES, *QUICK], {"items", "dropout", "gru"}, "resumes at step 33 of 128"),
    ],
)
def test_it_stops_resumes_with_equal_losses_and_leaves_a_page(
    name: str,
    options: list[str],
    parts: set[str],
    resumes: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", name, *options, "--no-peaks", "--run-dir", "whole"]) == 0
    result = json.loads(Path("whole/result.json").read_text())
    assert result["quality"]["met"]
    assert {*parts, "loss", "backward", "update"} <= result["performance"]["budget"].keys()
    assert name in Path("whole/report.html").read_text()
    seen: list[str] = []

    def after_the_first_epoch(name: str) -> None:
        seen.append(name)
        if name == "save: folder synced" and seen.count(name) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stop, "listener", after_the_first_epoch)
    background = ["--train.checkpoint-background", "off"]
    assert main(["run", name, *options, *background, "--no-peaks", "--run-dir", "halves"]) == 75
    monkeypatch.setattr(stop, "listener", None)
    assert 0 < len(losses("halves")) < len(losses("whole"))
    capsys.readouterr()
    assert main(["run", "--resume", "halves", "--no-peaks"]) == 0
    assert resumes in capsys.readouterr().out
    assert losses("halves") == losses("whole")
    halves = json.loads(Path("halves/result.json").read_text())
    assert halves["quality"]["metrics"] == result["quality"]["metrics"]
    assert all(claim.holds for claim in check_run(Path("halves"), ()))


@pytest.mark.long
def test_ranks_resume_with_equal_losses_where_each_draws_its_own_dropout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchrec")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    few = ["--train.epochs", "2", "--train.checkpoint-steps", "8", "--train.keep-last", "9", "--train.threads", "1"]
    quietly = ["--ranks", "2", "--no-peaks", "--no-report"]
    options = [*SEQUENCES, *QUICK, *few, "--target.beat", "none", "--train.checkpoint-background", "off"]
    assert main(["run", "gru4rec", *options, *quietly, "--run-dir", "whole"]) == 0
    shutil.copytree("whole", "halves")
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        Path("halves", name).unlink()
    checkpoints = Path("halves/checkpoints/seed-42")
    for later in sorted(checkpoints.glob("step-*"))[3:]:
        shutil.rmtree(later)
    (checkpoints / "index.json").write_text(json.dumps({"last": "step-00000024", "best": None}))
    capfd.readouterr()
    assert main(["run", "--resume", "halves", *quietly]) == 0
    assert "resumes at step 24 of 64" in capfd.readouterr().out
    assert losses("halves") == losses("whole")


def test_parts_that_ranks_do_not_keep_the_same_are_refused() -> None:
    require_alike([nn.LayerNorm(3), nn.EmbeddingBag(3, 2), nn.BatchNorm1d(3, track_running_stats=False)])
    for part in (nn.BatchNorm1d(3), nn.Embedding(3, 2, sparse=True)):
        with pytest.raises(ConfigError, match=type(part).__name__):
            require_alike([nn.ReLU(), part])
    with pytest.raises(ConfigError, match="sharding"):
        ModuleConfig(distributed=DistributedConfig(sharding="row"))


def test_the_work_of_a_step_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--no-confirm", "--no-peaks", "--steps", "5"]
    assert main(["profile", "wide-and-deep", *DATA[:6], *few, "--run-dir", "clicks"]) == 0
    figures = json.loads(Path("clicks/profile.json").read_text())["workload"]
    parts = {part["name"]: part for part in figures["components"]}
    # Two products for each layer, 2048 rows: 3 tables of 8 columns and the numbers of a row, 32 units, 1 logit.
    dense = (parts["deep"]["flops"] / 2 / 2048 - 32) / 32 - 24
    assert dense == int(dense) > 0
    assert parts["backward"]["flops"] == 2 * parts["deep"]["flops"]
    prepared = item_module(batch_size=3)
    trial, items = prepared.trial(1), prepared.sequences.data.items
    for batch in itertools.islice(trial.recipe.order.batches(0), 2):
        cost, positions = prepared.step_cost(batch, 0, 0), len(batch.items_T)
        # Three gates of 8 numbers, from as many of the item and of the state, at each place of the padded batch.
        assert cost["gru"].flops == 2 * 2 * 3 * 8 * 8 * 3 * batch.longest
        # The loss computes its gradient too.
        assert cost["softmax"].flops == 3 * 2 * 8 * positions * items
    assert main(["show", "gru4rec", *SEQUENCES, "--dim", "8"]) == 0
    assert "items 168" in capsys.readouterr().out


def item_module(**train: Any) -> ModuleItems:
    """GRU4Rec on few embedded sequences."""
    settings = ItemModuleTrainConfig(device="cpu", **train)
    config = import_module("gru4rec").GRU4RecConfig(data=SequencesConfig(users=20), train=settings, dim=8, dropout=0)
    return ModuleItems(config, "gru4rec:GRU4Rec", "gru4rec:optimizer")


def test_a_trained_module_recommends_next_items(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--train.max-steps", "40", "--no-peaks", "--no-report", "--target.beat", "none"]
    assert main(["run", "gru4rec", *SEQUENCES, *QUICK, *few, "--run-dir", "run"]) == 0
    assert main(["recommend", "run", "--users", "1", "--k", "3"]) == 0
    assert main(["recommend", "run", "--history", "7", "12", "--k", "3"]) == 0
    run, longer = recperf.open("run"), [*range(1, 21)] * 3
    lists = run.recommend([longer, longer[-50:], [7]], k=20)
    one, same, other = (lists[lists["history"] == number] for number in (1, 2, 3))
    assert one["item"].tolist() == same["item"].tolist() != other["item"].tolist()
    assert run.recommend([[7]], k=20)["logit"].tolist() == pytest.approx(other["logit"].tolist(), abs=1e-5)
    assert main(["score", "run", "--held-out", "--output", "held-out.csv"]) == 2
    assert "not a label" in capsys.readouterr().err


def test_next_items_are_learned_from_imported_events() -> None:
    rows = [f"{user},{(user + place) % 12},{1000 * user + 7 * place}" for user in range(60) for place in range(7)]
    Path("log.csv").write_text("\n".join(["user,item,time", *rows]))
    assert main(["data", "import", "log.csv", "--name", "log"]) == 0
    few = ["--train.device", "cpu", "--train.learning-rate", "0.03", "--train.epochs", "10", "--dim", "8"]
    few += ["--no-peaks", "--no-report"]
    assert main(["run", "gru4rec", "--data", "log", *few, "--target.beat", "none", "--run-dir", "run"]) == 0
    assert json.loads(Path("run/result.json").read_text())["quality"]["metrics"]["hit_rate_10"] == 1
    top = recperf.open("run").recommend([[0, 1, 2], [7, 8]], k=1)
    assert top["item"].tolist() == [3, 9]


def test_a_trained_module_scores_and_recommends(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--train.max-steps", "5", "--train.schedule", "constant", "--no-peaks", "--no-report"]
    assert main(["run", "wide-and-deep", *DATA, *few, "--target.beat", "none", "--dim", "4", "--run-dir", "run"]) == 0
    assert main(["score", "run", "--held-out", "--output", "held-out.csv"]) == 0
    rows = list(csv.DictReader(Path("held-out.csv").read_text().splitlines()))
    logits, labels = (torch.tensor([float(row[name]) for row in rows]) for name in ("logit", "label"))
    assert auc(logits, labels) == json.loads(Path("run/result.json").read_text())["quality"]["metrics"]["auc"]
    assert main(["recommend", "run", "--users", "1", "--k", "3"]) == 0
    assert main(["show", "wide-and-deep", *DATA[:2]]) == 0
    assert "embedding 6,584" in capsys.readouterr().out


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


def test_a_module_must_return_a_vector_for_each_position_and_item() -> None:
    prepared = item_module()
    trial = prepared.trial(1)
    batch = next(trial.recipe.order.batches(0))
    vectors_TD, items = vectors_of(trial.module, batch), prepared.sequences.data.items
    scores_TI = vectors_TD @ item_vectors_of(trial.module, items).t()
    expected = nn.functional.cross_entropy(scores_TI, batch.targets_T - 1)
    torch.testing.assert_close(trial.recipe.model.loss(batch), expected)
    both = (expected, trial.recipe.model.loss(batch))
    gradients = [torch.autograd.grad(loss, list(trial.module.parameters())) for loss in both]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)
    # The state after the first item does not depend on what follows, nor on the other sequences of the batch.
    alone = prepared.events.batch(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    several = prepared.events.batch(torch.tensor([0, 2]), torch.tensor([3, 6]))
    torch.testing.assert_close(vectors_of(trial.module, alone)[0], vectors_of(trial.module, several)[0])
    with pytest.raises(ConfigError, match="item_vectors"):
        item_vectors_of(trial.module, items + 1)
    with pytest.raises(ConfigError, match="no method item_vectors"):
        item_vectors_of(nn.Linear(1, 1), items)
    trial.module.forward = lambda batch: batch.padded(batch.items_T)
    with pytest.raises(ConfigError, match="positions"):
        vectors_of(trial.module, batch)
    with pytest.raises(ConfigError, match="event-labels"):
        torch_workload("own", "", model="gru4rec:GRU4Rec", optimizer="gru4rec:optimizer", task=EVENT_LABELS)
    with pytest.raises(ConfigError, match="no config of next-item"):
        torch_workload("own", "", model="a:b", optimizer="a:c", task=NEXT_ITEM, config=ModuleConfig)
