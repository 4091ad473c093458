"""recperf.watch: planted bugs are named, sound programs get nothing at high confidence, and nothing changes."""

from __future__ import annotations

import copy
import io
import random
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import convert
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_pre_hooks

import recperf
from recperf.cli import main
from recperf.errors import UsageError
from recperf.execution import learning
from recperf.measure import schedule
from recperf.measure.learning_records import HIGH, Finding, LearningReport
from recperf.runs.report.blocks import render
from recperf.runs.report.profiles import report_of

STEPS = 40
Watched = tuple[Any, Any, Callable[[int], None]]
"""A model, its optimizers, and one step."""


@pytest.fixture(autouse=True)
def every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow from the number of steps, however slow the machine is; earlier tests may have compiled something."""
    monkeypatch.setattr(learning, "FIRST_LOOKS", 1 << 30)
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()
    torch.manual_seed(0)


def batch(index: int, rows: int = 64) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(index))


def ids(index: int, below: int, rows: int = 64) -> Tensor:
    return torch.randint(below, (rows, 2), generator=torch.Generator().manual_seed(index))


def target(x: Tensor) -> Tensor:
    return x[:, :1] * x[:, 1:2]


def error(output: Tensor, x: Tensor) -> Tensor:
    return (output - target(x)).square().mean()


def tower(*activations: nn.Module) -> nn.Sequential:
    first, second = (*activations, nn.ReLU(), nn.ReLU())[:2]
    return nn.Sequential(nn.Linear(8, 16), first, nn.Linear(16, 16), second, nn.Linear(16, 1))


def adam(model: nn.Module, rate: float = 1e-2) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=rate)


def stepping(optimizer: Any, loss: Callable[[Tensor], Tensor]) -> Callable[[int], None]:
    def step(index: int) -> None:
        value = loss(batch(index))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def watched(case: Watched, steps: int = STEPS) -> LearningReport:
    model, optimizer, step = case
    with recperf.watch(model, optimizer) as watch:
        for index in range(steps):
            step(index)
    return watch.report()


def of(report: LearningReport, name: str) -> Finding:
    assert name in [finding.name for finding in report.findings], str(report)
    return next(finding for finding in report.findings if finding.name == name)


# Planted bugs: what is found, where, and at least with which confidence.

PLANTED: dict[str, tuple[Callable[[], Watched], str, str]] = {}
Make = Callable[[], Watched]


def planted(name: str, where: str) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        PLANTED[make.__name__] = make, name, where
        return make

    return note


class Tables(nn.Module):
    def __init__(self, rows: int = 50, *, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(rows, 4, sparse=sparse), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.top(self.table(ids).flatten(1))
        return output


def of_ids(model: Tables, optimizer: Any, below: int) -> Callable[[int], None]:
    def step(index: int) -> None:
        used = ids(index, below)
        optimizer.zero_grad()
        (model(used)[:, 0] - (used.sum(1) % 2).float()).square().mean().backward()
        optimizer.step()

    return step


@planted("no-gradient", "unused")
def module_that_the_forward_pass_leaves_out() -> Watched:
    model = nn.ModuleDict({"used": tower(), "unused": tower()})
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model["used"](x), x))


@planted("no-gradient", "encoder")
def encoder_that_is_detached() -> Watched:
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "head": tower()})
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model["head"](model["encoder"](x).detach()), x))


@planted("not-optimized", "table.weight")
def optimizer_without_the_table() -> Watched:
    model = Tables()
    optimizer = adam(model.top)
    return model, optimizer, of_ids(model, optimizer, 50)


@planted("not-optimized", "4")
def layer_that_was_replaced_after_the_optimizer_was_made() -> Watched:
    model = tower()
    optimizer = adam(model)
    model[4] = nn.Linear(16, 1)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("tiny-updates", "0.weight")
def group_with_a_tiny_rate() -> Watched:
    model = tower()
    groups = [{"params": model[0].parameters(), "lr": 1e-8}, {"params": [*model[2:].parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("tiny-updates", "0.weight")
def gradients_that_vanish() -> Watched:
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(8, 8), nn.Sigmoid())), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("tiny-updates", "0.weight")
def updates_that_round_to_nothing() -> Watched:
    model = nn.Sequential(nn.Linear(8, 1)).bfloat16()
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[0].bias, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x.bfloat16()).float(), x))


@planted("dead-units", "1")
def dead_units() -> Watched:
    model = tower()
    nn.init.constant_(model[0].bias, -50.0)
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(functional.relu(self.first(x)))
        return output


@planted("idle-units", "first.weight")
def dead_units_of_a_function() -> Watched:
    model = Functional()
    with torch.no_grad():
        model.first.bias[:12] = -50.0
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("saturated-units", "1")
def saturated_units() -> Watched:
    model = tower(nn.Tanh())
    with torch.no_grad():
        model[0].weight.mul_(1e4)
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("non-finite", "4")
def logarithm_of_zero() -> Watched:
    model = tower()
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: -torch.log(torch.relu(model(x))).mean())


@planted("non-finite", "0")
def batch_with_a_missing_value() -> Watched:
    model = tower()
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(torch.where(x > 3.3, torch.nan, x)), x))


@planted("non-finite", "4.weight")
def gradient_of_a_square_root_at_zero() -> Watched:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: torch.sqrt((model(x) * 0).square()).mean())


@planted("spike", "test_learning.py:")
def loss_that_spikes() -> Watched:
    model = tower()
    optimizer = adam(model, 1e-3)
    seen = iter(range(STEPS))
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x * (100 if next(seen) == 25 else 1)))


@planted("diverges", "test_learning.py:")
def loss_that_rises() -> Watched:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.6)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("unused-rows", "table.weight")
def ids_that_are_folded_into_few_rows() -> Watched:
    model = Tables(400)
    optimizer = adam(model)
    return model, optimizer, of_ids(model, optimizer, 40)


@planted("unused-rows", "table.weight")
def the_same_beside_weight_decay() -> Watched:
    model = Tables(400)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, optimizer, of_ids(model, optimizer, 40)


@planted("zero-rate", "Adam")
def rate_of_zero() -> Watched:
    model = tower()
    optimizer = adam(model, 0.0)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("zero-rate", "group 1 of Adam")
def group_with_a_rate_of_zero() -> Watched:
    model = tower()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2:].parameters()}], lr=0.0
    )
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("zero-rate", "Adam")
def scheduler_that_ends_too_early() -> Watched:
    model = tower()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    step = stepping(optimizer, lambda x: error(model(x), x))
    return model, optimizer, lambda index: (step(index), scheduler.step())  # type: ignore[func-returns-value, return-value]


@planted("eval-mode", "the model")
def model_in_eval_mode() -> Watched:
    model = nn.Sequential(tower(), nn.Dropout(0.1)).eval()
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@planted("eval-mode", "the model")
def model_left_in_eval_mode_by_an_evaluation() -> Watched:
    model = nn.Sequential(nn.BatchNorm1d(8), tower())
    optimizer = adam(model)
    step = stepping(optimizer, lambda x: error(model(x), x))

    def and_evaluate(index: int) -> None:
        if index == 2:
            model.eval()
        step(index)

    return model, optimizer, and_evaluate


@planted("not-cleared", "Adam")
def gradients_that_are_not_cleared() -> Watched:
    model = tower()
    optimizer = adam(model)

    def step(index: int) -> None:
        error(model(batch(index)), batch(index)).backward()
        optimizer.step()

    return model, optimizer, step


@planted("not-cleared", "SGD")
def gradients_of_one_of_two_optimizers() -> Watched:
    model = tower()
    one, two = adam(model[:2]), torch.optim.SGD(model[2:].parameters(), lr=1e-3)

    def step(index: int) -> None:
        one.zero_grad()
        error(model(batch(index)), batch(index)).backward()
        one.step()
        two.step()

    return model, [one, two], step


@planted("no-step", "the model")
def loop_without_a_step() -> Watched:
    model = tower()
    return model, adam(model), lambda index: error(model(batch(index)), batch(index)).backward()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_named(name: str) -> None:
    make, expected, where = PLANTED[name]
    report = watched(make())
    finding = of(report, expected)
    assert where in finding.where, str(report)
    assert finding.sentence in str(report)
    assert finding.evidence


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("logarithm_of_zero", "log at 4 made it"),
        ("batch_with_a_missing_value", "addmm at 0 read a batch"),
        ("gradient_of_a_square_root_at_zero", "by a gradient that is not finite"),
    ],
)
def test_the_origin_of_a_loss_that_is_not_finite(name: str, operator: str) -> None:
    assert operator in of(watched(PLANTED[name][0]()), "non-finite").sentence


# Sound programs

SOUND: list[Make] = []


def sound(make: Make) -> Make:
    SOUND.append(make)
    return make


@sound
def plain() -> Watched:
    model = tower()
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def gradient_accumulation() -> Watched:
    model = tower()
    optimizer = adam(model)

    def step(index: int) -> None:
        error(model(batch(index)), batch(index)).backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step


@sound
def frozen_backbone() -> Watched:
    model = tower()
    model[:2].requires_grad_(False).eval()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def batch_norm_in_eval_mode() -> Watched:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), tower())
    optimizer = adam(model)
    model[1].eval()
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def compiled() -> Watched:
    model = torch.compile(tower(), backend="aot_eager")
    optimizer = adam(model)  # type: ignore[arg-type]
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def mixed_precision_with_a_scaler() -> Watched:
    model = tower()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu")

    def step(index: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = error(model(batch(index)).float(), batch(index))
        scaler.scale(loss * (1e33 if index in (0, 9) else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return model, optimizer, step


@sound
def sparse_gradients() -> Watched:
    model = Tables(500, sparse=True)
    tables = torch.optim.SparseAdam([model.table.weight], lr=1e-2)
    dense = adam(model.top)

    def step(index: int) -> None:
        for one in (tables, dense):
            one.zero_grad()
        used = ids(index, 500)
        (model(used)[:, 0] - (used.sum(1) % 2).float()).square().mean().backward()
        for one in (tables, dense):
            one.step()

    return model, [tables, dense], step


@sound
def two_that_compete() -> Watched:
    """A generator and a discriminator, each with its optimizer, whose gradients the other's loss fills too."""
    model = nn.ModuleDict({"makes": nn.Linear(8, 8), "judges": tower()})
    makes, judges = adam(model["makes"], 1e-3), adam(model["judges"], 1e-3)

    def step(index: int) -> None:
        x = batch(index)
        judges.zero_grad()
        made = model["makes"](x)
        (model["judges"](made.detach()).mean() - model["judges"](x).mean()).tanh().backward()
        judges.step()
        makes.zero_grad()
        model["judges"](made).mean().neg().tanh().backward()
        makes.step()

    return model, [makes, judges], step


@sound
def groups_of_parameters() -> Watched:
    model = nn.Sequential(nn.LayerNorm(8), tower())
    weights = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": weights, "weight_decay": 0.1, "lr": 1e-3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def tied_weights() -> Watched:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 50, bias=False))
    model[4].weight = model[0].weight
    optimizer = adam(model)

    def step(index: int) -> None:
        used = ids(index, 50)
        optimizer.zero_grad()
        functional.cross_entropy(model(used), used.sum(1) % 50).backward()
        optimizer.step()

    return model, optimizer, step


@sound
def gradients_that_are_set_to_zero() -> Watched:
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(index: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        error(model(batch(index)), batch(index)).backward()
        optimizer.step()

    return model, optimizer, step


@sound
def rate_that_warms_up_and_ends_at_zero() -> Watched:
    model = tower()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 1, div_factor=1e9)
    step = stepping(optimizer, lambda x: error(model(x), x))
    return model, optimizer, lambda index: (step(index), scheduler.step())  # type: ignore[func-returns-value, return-value]


@sound
def evaluations_and_an_average_of_weights() -> Watched:
    model = nn.Sequential(nn.Dropout(0.1), tower())
    average = copy.deepcopy(model)
    optimizer = adam(model)

    def step(index: int) -> None:
        if index % 5 == 0:
            model.eval()
            with torch.no_grad():
                model(batch(index))
        model.train()
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = average(batch(index))
        (error(model(batch(index)), batch(index)) + (model(batch(index)) - wanted).square().mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for one, other in zip(average.parameters(), model.parameters()):
                one.lerp_(other, 0.1)

    return nn.ModuleDict({"model": model, "average": average}), optimizer, step


@sound
def distributed() -> Watched:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(8), tower()))
    optimizer = adam(model)
    return model, optimizer, stepping(optimizer, lambda x: error(model(x), x))


@sound
def closure() -> Watched:
    model = tower()
    optimizer = adam(model)

    def step(index: int) -> None:
        def again() -> Tensor:
            optimizer.zero_grad()
            loss = error(model(batch(index)), batch(index))
            loss.backward()
            return loss

        optimizer.step(again)  # type: ignore[arg-type]

    return model, optimizer, step


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_sound_programs_get_nothing(make: Make) -> None:
    report = watched(make())
    assert report.steps >= STEPS // 3
    assert report.looks >= 4, str(report)
    assert not [finding for finding in report.findings if finding.confidence == HIGH], str(report)
    # The last bias of a judge that compares cancels out.
    assert not report.findings or make is two_that_compete, str(report)
    assert not [note for note in report.notes if "ended" in note], str(report)


# What a watch must not do

EAGER = [make for make in SOUND if make is not compiled]


def bits(case: Watched, random_state: Tensor) -> list[Any]:
    model, optimizers, _ = case
    states = [one.state_dict() for one in (optimizers if isinstance(optimizers, list) else [optimizers])]
    return [model.state_dict(), states, [one.grad for one in model.parameters()], random_state]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", EAGER, ids=lambda make: make.__name__)
def test_training_is_the_same_to_the_bit(make: Make) -> None:
    results = []
    for watching in (True, False):
        torch.manual_seed(3)
        case = make()
        if watching:
            watched(case)
        else:
            for index in range(STEPS):
                case[2](index)
        results.append(bits(case, torch.get_rng_state()))
    assert equal(*results)


def test_everything_is_put_back_after_an_exception() -> None:
    model, optimizer, step = plain()
    backward, scale = Tensor.backward, torch.amp.GradScaler.scale
    with pytest.raises(KeyError), recperf.watch(model, optimizer) as watch:
        for index in range(STEPS):
            step(index)
            if index == 2:
                assert Tensor.backward is not backward
                assert torch.nn.modules.module._global_forward_hooks
                raise KeyError
    assert Tensor.backward is backward
    assert torch.amp.GradScaler.scale is scale
    assert not torch.nn.modules.module._global_forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert watch.report().steps == 3
    step(0)
    assert watch.report().steps == 3
    with pytest.raises(UsageError, match="used once"):
        watch.__enter__()


def test_a_model_can_be_copied_and_saved_in_the_loop_and_no_graph_is_kept() -> None:
    model, optimizer, _ = plain()
    with recperf.watch(model, optimizer):
        for index in range(6):
            output = model(batch(index))
            graph = weakref.ref(output)
            optimizer.zero_grad()
            error(output, batch(index)).backward()
            del output
            assert graph() is None
            torch.save(model, io.BytesIO())
            optimizer.step()
            assert copy.deepcopy(model)[0].weight.equal(model[0].weight)
            torch.save(model, io.BytesIO())


def test_a_failure_of_a_look_ends_watching_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(learning.Parameters, "after", fail)
    report = watched(plain())
    assert report.steps == STEPS
    assert "watching ended at step 1: RuntimeError: no memory" in report.notes


def test_looks_become_rare_where_they_cost_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "FIRST_LOOKS", 0)
    monkeypatch.setattr(learning, "SHARE", 0.0)
    model, optimizer, step = plain()
    with recperf.watch(model, optimizer) as watch:
        for index in range(300):
            step(index)
    assert watch.report().looks == 1
    assert watch._final is not None
    (losses,) = watch._final.losses
    # Every loss, then each second and each fourth.
    assert losses.steps[:66] == [*range(65), 66]
    assert len(losses.steps) == 64 + 64 + 27
    monkeypatch.setattr(learning, "SHARE", 1e9)
    assert watched(plain(), 300).looks == 10


def test_a_report_is_a_record() -> None:
    report = watched(rate_of_zero())
    assert convert(report.as_json(), LearningReport) == report
    assert report.as_json()["findings"][0]["name"] == "zero-rate"
    assert "nothing found" in str(watched(plain()))
    assert "only 2 of 2 steps were looked at" in str(watched(plain(), 2))


def test_what_cannot_be_watched_is_refused() -> None:
    model, optimizer, _ = plain()
    with pytest.raises(UsageError, match=r"torch\.nn\.Module"):
        recperf.watch({"a": 3}, optimizer)  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"one of torch\.optim"):
        recperf.watch(model, [])


# Inputs of held-out batches


class Inputs(nn.Module):
    """Reads the first column and the ids; the second column only a little."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.drop(self.norm(batch["x"]))
        return x[:, 0] + 1e-4 * x[:, 1] + batch["ids"][0] + 0 * batch["unused"].sum() + batch["same"]


def test_inputs_that_do_not_matter() -> None:
    model = Inputs()
    watch = recperf.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held_out = [
        {"x": torch.randn(50, 3), "ids": [torch.arange(50)], "unused": torch.rand(50), "same": torch.ones(50), "k": 2}
        for _ in range(5)
    ]
    before = copy.deepcopy((model.state_dict(), held_out)), torch.get_rng_state(), random.getstate()
    findings = {one.where: one for one in watch.held_out(held_out, lambda one: (model(one) * one["x"][:, 0]).mean())}
    assert equal([model.state_dict(), held_out], list(before[0]))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]
    assert model.training
    assert model.drop.training
    assert findings.keys() == {"['x'][:, 1]", "['x'][:, 2]", "['unused']", "['same']"}
    assert findings["['unused']"].confidence == findings["['x'][:, 2]"].confidence == HIGH
    assert "hardly matters" in findings["['x'][:, 1]"].sentence
    assert "the same in all rows" in findings["['same']"].sentence


def test_batches_of_every_form_and_scores_within_the_loop() -> None:
    Pair = namedtuple("Pair", "x y")
    model, optimizer, step = plain()

    def score(pair: Any) -> Tensor:
        return error(model(pair.x), pair.x) + 0 * random.random()

    with recperf.watch(model, optimizer) as watch:
        for index in range(4):
            step(index)
        assert not watch.held_out([batch(1), batch(2)], lambda x: error(model(x), x))
        ignored = watch.held_out([Pair(batch(1), ids(1, 5))], score)
        step(4)
    assert [one.where for one in ignored] == ["[1]", "[1][:, 0]", "[1][:, 1]"]
    assert watch.report().steps == 5
    assert watch.findings == ignored
    assert not watch.held_out([torch.ones(())], float)


# Programs that are not changed

PROGRAM = """
import torch
from torch import nn

def main():
    optimizer = torch.optim.Adam(tower.parameters(), lr=1e-2)
    for _ in range(300):
        ids = torch.randint(50, (64, 2))
        loss = (tower(table(ids).flatten(1))[:, 0] - (ids.sum(1) % 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

table = nn.Embedding(50, 4)
tower = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
other = nn.Linear(3, 3)
main()
"""


def test_a_first_loss_that_is_not_finite_is_named_in_a_program() -> None:
    model, _, step = logarithm_of_zero()
    with learning.Watch(lambda: {"": model}, None) as watch:
        for index in range(8):
            step(index)
    finding = of(watch.report(), "non-finite")
    assert finding.where == "4"
    assert finding.evidence == {"step": 0}


def test_a_program_that_is_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    arguments = ["--no-peaks", "--no-report", "--no-try", "--run-dir"]
    assert main(["profile", "--script", "train.py", "--learning", *arguments, "one"]) == 0
    printed = capsys.readouterr().out
    sentence = "table.weight gets gradients, but no optimizer holds it."
    assert sentence in printed
    assert printed.index("  limit") < printed.index("  learning  ") < printed.index("  notes")
    learned = recperf.load("one/profile.json").learning
    assert learned is not None
    assert [one.sentence for one in learned.findings] == [sentence]
    assert learned.looks >= 4
    assert "Learning" in render(report_of(recperf.load("one/profile.json")), verbose=True)
    assert main(["profile", "--script", "train.py", *arguments, "two"]) == 0
    assert recperf.load("two/profile.json").learning is None
    assert not _global_optimizer_pre_hooks


def test_a_program_without_a_step_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["import torch", "model = torch.nn.Linear(4, 1)", "for _ in range(20):"]
    Path("train.py").write_text("\n".join([*lines, "    model(torch.ones(2, 4)).sum().backward()\n"]))
    assert main(["profile", "--script", "train.py", "--learning", "--no-peaks", "--no-report"]) != 0
    assert "learning: No optimizer stepped in 20 backward passes." in capsys.readouterr().err
