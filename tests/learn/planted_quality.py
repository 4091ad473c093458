"""Trainings on made-up logs with one flaw, two or none: in the data, in the settings or in the code of the model. A
case names the limit that explains it.

Shapes: N rows or events, T events of a batch, D a width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter
from zlib import crc32

import numpy as np
import torch
from planted_logs import SIZES, Draw, Log, labelled_events, rows, sequences, wide_rows

import recperf
from recperf.data.datasets import imported_as
from recperf.errors import RecperfWarning
from recperf.execution.run import TrainingRun
from recperf.execution.workload import Workload, load
from recperf.terminal import Terminal
from recperf.workloads.choice import choose, resolved, with_fields

# Flaws of the code


class Stepped:
    """An optimizer that gets no gradient of some parameters."""

    def __init__(self, optimizer: Any, parts: tuple[str, ...], trial: Any) -> None:
        self._inner, weights = optimizer, dict(trial.model.named_parameters())
        self._frozen = [tensor for name, tensor in weights.items() if name.startswith(parts)]
        assert self._frozen, (parts, list(weights))

    def step(self, rate: Any) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._inner.step(rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def frozen(*parts: str) -> Callable[[Any], None]:
    """Parameters whose names begin so get no gradient: they keep their values, or decay."""

    def flaw(trial: Any) -> None:
        trial.recipe = replace(trial.recipe, optimizer=Stepped(trial.recipe.optimizer, parts, trial))

    return flaw


def zeroed(column: str) -> Callable[[Any], None]:
    """The model gets a column of clicks as zeros."""

    def hidden(dense_BD: Any, features: Any) -> tuple[Any, Any]:
        if column.isdigit():
            dense_BD = dense_BD.clone()
            dense_BD[:, int(column)] = 0
            return dense_BD, features
        values = features.values_V.clone().view(len(features.keys), -1)
        values[features.keys.index(column)] = 0
        return dense_BD, replace(features, values_V=values.view(-1))

    def flaw(trial: Any) -> None:
        model, loss, forward = trial.model, trial.model.loss, trial.model.forward

        def changed(batch: Any) -> Any:
            dense_BD, features = hidden(batch.dense_BD, batch.features)
            return loss(replace(batch, dense_BD=dense_BD, features=features))

        model.loss = changed
        model.forward = lambda dense, features: forward(*hidden(dense, features))

    return flaw


def dead_units(trial: Any) -> None:
    """The biases of a hidden layer are so low that no unit is ever above zero."""
    biases = [one for name, one in trial.model.top.named_parameters() if one.dim() == 1]
    with torch.no_grad():
        biases[0].fill_(-30.0)


def late(trial: Any) -> None:
    """The encoder gets the item before each position in place of the item there."""
    model, encode = trial.model, trial.model.encode

    def changed(batch: Any, items_TD: Any = None) -> Any:
        first = batch.positions_T == 0
        shifted = torch.where(first, batch.items_T, batch.items_T.roll(1))
        return encode(replace(batch, items_T=shifted), None)

    model.encode = changed


def unordered(trial: Any) -> None:
    """The encoder gets the mean of a history's items at each position, which says nothing of their order."""
    model, encode = trial.model, trial.model.encode

    def changed(batch: Any, items_TD: Any = None) -> Any:
        rows = model.embedded(batch.items_T)
        sums = rows.cumsum(0)
        begins = batch.offsets_B1[:-1][batch.rows_T]
        before = torch.where((begins > 0)[:, None], sums[(begins - 1).clamp(min=0)], torch.zeros_like(sums))
        return encode(
            replace(batch, positions_T=0 * batch.positions_T), (sums - before) / (1 + batch.positions_T)[:, None]
        )

    model.encode = changed


def collapsed(trial: Any) -> None:
    """Every user gets the same vector."""
    model, encode = trial.model, trial.model.encode

    def changed(batch: Any, items_TD: Any = None) -> Any:
        users_TD = encode(batch, items_TD)
        return users_TD.mean(0, keepdim=True).expand_as(users_TD)

    model.encode = changed


# Cases


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    workload: str
    log: Callable[[Draw, float], Log]
    expected: tuple[str, ...]
    """Limits that explain it, each of which is right; of two flaws both."""
    fields: dict[str, Any] = field(default_factory=dict)
    flaws: tuple[Callable[[Any], None], ...] = ()
    healthy: bool = False


def training(**values: Any) -> dict[str, Any]:
    return {"train": values}


CLICKS, EVENTS, ITEMS = "micro-dlrm", "dlrm-v4", "next-item"
MODEL_ALONE: dict[str, Any] = {
    "model": {"encoder": "transformer", "counts": "off", "dim": 32, "blocks": 1, "heads": 2, "head_dim": 16,
              "max_length": 16, "dropout": 0.1, "temperature": 0.1, "time_buckets": 0},
    "train": {"epochs": 25, "batch_size": 32, "learning_rate": 3e-3, "patience": 4, "threads": 1},
}  # fmt: skip
WIDE_ENOUGH: dict[str, Any] = {
    "model": {"bottom": [2, 32, 8], "top": [64, 32, 1]},
    "train": {"epochs": 12, "weight_decay": 0.06, "table_weight_decay": 1.0},
}
SHORT_EVENTS: dict[str, Any] = {"train": {"epochs": 4}}


def merged(base: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in (*base, *sections)}


def clicks(name: str, *expected: str, log: Any = None, fields: Any = None, **more: Any) -> Case:
    used = merged(WIDE_ENOUGH, **(fields or {}))
    return Case(name=f"clicks: {name}", workload=CLICKS, log=log or rows, expected=expected, fields=used, **more)


def events(name: str, *expected: str, log: Any = None, fields: Any = None, **more: Any) -> Case:
    used = merged(SHORT_EVENTS, **(fields or {}))
    return Case(
        name=f"events: {name}", workload=EVENTS, log=log or labelled_events, expected=expected, fields=used, **more
    )


def items(name: str, *expected: str, log: Any = None, fields: Any = None, **more: Any) -> Case:
    used = merged(MODEL_ALONE, **(fields or {}))
    return Case(name=f"items: {name}", workload=ITEMS, log=log or sequences, expected=expected, fields=used, **more)


def made(maker: Callable[..., Log], **options: Any) -> Callable[[Draw, float], Log]:
    return lambda draw, size: maker(draw, size, **options)


NARROW = {"model": {"dim": 2, "bottom": [2, 2, 2], "top": [2, 2, 1]}}
MEMORISING = {"train": {"weight_decay": 0.0, "table_weight_decay": 0.0, "epochs": 30, "learning_rate": 0.01}}
HEALTHY = [
    clicks("nothing wrong", "noise", healthy=True),
    clicks("nothing wrong, users", "noise", log=made(rows, users=60, taste=0.5), healthy=True),
    clicks("nothing wrong, three quarters noise", "noise", log=made(rows, flipped=0.4, count=9000), healthy=True),
    clicks("nothing wrong, clear labels", "noise", log=made(rows, weight=2.0), healthy=True),
    clicks("nothing wrong, gently regularised", "noise", log=made(rows, count=9000),
           fields=training(weight_decay=0.02, table_weight_decay=0.3, epochs=8), healthy=True),
    clicks("nothing wrong, in order of time", "noise", log=made(rows, steady=True), healthy=True),
    events("nothing wrong", "noise", fields={"train": {"epochs": 8}}, healthy=True),
    events("nothing wrong, more events", "noise", log=made(labelled_events, count=6000),
           fields={"train": {"epochs": 14}}, healthy=True),
    items("nothing wrong", "noise", healthy=True),
    items("nothing wrong, more users", "noise", log=made(sequences, users=900), healthy=True),
    items("nothing wrong, wider", "noise", fields={"model": {"dim": 48, "head_dim": 24}}, healthy=True),
    items("nothing wrong, many items", "noise", log=made(sequences, users=900, each=30), healthy=True),
    items("nothing wrong, repeats", "noise", log=made(sequences, again=0.3), healthy=True),
]  # fmt: skip
ONE_FLAW = [
    clicks("rate 30 times too small", "rate", fields=training(learning_rate=0.01 / 30)),
    clicks("rate 30 times too large", "rate", fields=training(learning_rate=0.3)),
    clicks("a tenth of the epochs", "steps", fields=training(max_steps=82)),
    clicks("width 2", "capacity", fields=NARROW),
    clicks("no regularisation on few rows", "overfit", log=wide_rows, fields=MEMORISING),
    clicks("a column zeroed", "ignored", flaws=(zeroed("page"),)),
    clicks("a number zeroed", "ignored", flaws=(zeroed("0"),)),
    clicks("a frozen table", "dead", flaws=(frozen("embeddings."),)),
    clicks("an optimizer without the first layers", "dead", flaws=(frozen("bottom."),)),
    clicks("dead units", "dead", flaws=(dead_units,)),
    clicks("labels flipped for 30 %", "noise", log=made(rows, flipped=0.6)),
    clicks("labels at random", "noise", log=made(rows, flipped=1.0)),
    clicks("half of held-out users unseen", "unseen", log=made(rows, users=300, taste=2.0, arrive=True)),
    clicks("drift", "drift", log=made(rows, turns=2.0)),
    clicks("a leaked column", "leak", log=made(rows, leak=0.95)),
    clicks("the same rows on both sides", "leak", log=made(rows, repeated=4)),
    clicks("too few held-out rows", "protocol", log=made(rows, count=300)),
    events("a frozen encoder", "dead", flaws=(frozen("hstu."),)),
    events("rate 30 times too small", "rate", fields=training(learning_rate=1e-4, table_learning_rate=0.1 / 30)),
    events("labels at random", "noise", log=made(labelled_events, chance=True)),
    items("rate 30 times too small", "rate", fields=training(learning_rate=1e-4)),
    items("rate 30 times too large", "rate", fields=training(learning_rate=0.1)),
    items("a tenth of the epochs", "steps", fields=training(epochs=2)),
    items("width 4", "capacity", fields={"model": {"dim": 4, "heads": 1, "head_dim": 4}}),
    items("a frozen table", "dead", flaws=(frozen("items_ID"),)),
    items("order hidden", "ignored", flaws=(unordered,)),
    items("the last item hidden", "ignored", flaws=(late,)),
    items("negatives that are too easy", "negatives", fields={"model": {"loss": "sampled", "negatives": 1}}),
    items("the same list for everyone", "popularity", flaws=(collapsed,)),
    items("the target in its history", "leak", log=made(sequences, twice=True)),
    items("items at random", "noise", log=made(sequences, chance=True)),
    items("unseen items", "unseen", log=made(sequences, fresh=True)),
    items("too few users", "protocol", log=made(sequences, users=24)),
]  # fmt: skip
TWO_FLAWS = [
    clicks("a column zeroed, a tenth of the epochs", "ignored", "steps", flaws=(zeroed("page"),),
           fields=training(max_steps=82)),
    clicks("a frozen table, width 2", "dead", "capacity", flaws=(frozen("embeddings."),), fields=NARROW),
    clicks("drift, labels flipped", "drift", "noise", log=made(rows, turns=2.0, flipped=0.4)),
    clicks("no regularisation, rate too large", "overfit", "rate", log=wide_rows,
           fields=merged(MEMORISING, train={"learning_rate": 0.1})),
    items("order hidden, width 4", "ignored", "capacity", flaws=(unordered,),
          fields={"model": {"dim": 4, "heads": 1, "head_dim": 4}}),
    items("rate too small, the same list", "rate", "popularity", flaws=(collapsed,),
          fields=training(learning_rate=1e-4)),
]  # fmt: skip
CASES = [*ONE_FLAW, *TWO_FLAWS, *HEALTHY]


def flawed(workload: Workload, flaws: tuple[Callable[[Any], None], ...]) -> Workload:
    """The workload whose every trial has flaws."""

    def build(config: Any) -> Any:
        prepared = load(workload.build)(config)
        original = prepared.trial

        def trial(seed: int) -> Any:
            made = original(seed)
            for flaw in flaws:
                flaw(made)
            return made

        prepared.trial = trial
        return prepared

    return replace(workload, build=build)


def prepare(case: Case, size: str, seed: int) -> tuple[Workload, Any, Log]:
    """The workload of a case, its config on a log drawn for it, and the log, which is imported where that was not done
    before."""
    log = case.log(np.random.default_rng([seed, len(case.name), *case.name.encode()]), SIZES[size])
    name = f"planted-{crc32(case.name.encode()):x}-{size}-{seed}"
    data = imported_as(name)
    if data is None:
        label = {"label": "label"} if "label" in log.columns else {}
        with catch_warnings():
            simplefilter("ignore", RecperfWarning)
            data = recperf.dataset(log.columns, name=name, **label, **log.options)
    choice = choose(case.workload, data=data)
    # Made for few rows, and the same for all flaws.
    config = resolved(choice, with_fields(choice.config, {**case.fields, "seed": 100 + seed}))
    return flawed(choice.workload, case.flaws), config, log


def train(workload: Workload, config: Any, folder: Path) -> Any:
    """Train a case; returns the result."""
    report = Terminal(as_json=False, quiet=True)
    return TrainingRun(
        workload=workload, config=config, report=report, folder=folder, peaks=False, measured=False
    ).train()
