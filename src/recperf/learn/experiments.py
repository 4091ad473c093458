"""Changes of a config that confirm what limits the quality of its model. Torch-free; knows names of fields, but no
workload.

Which apply follows from the fields that a config has. What a config refuses is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import flatten
from ..data.streaming.features import CONTEXT, HISTORY, RUNNING_RATES
from .records import InputSeen
from .rules import SURE

Values = dict[str, Any]
WIDTHS, LAYERS, DROPOUT = ("dim", "head_dim"), ("bottom", "top"), ("dropout", "input_dropout")
"""Fields of a model: widths of vectors, lists of widths of layers, shares that are dropped."""
MOST_DROPPED = 0.6
RATES = ("train.learning_rate", "train.table_learning_rate")
FAR = 0.3
"""The share of themselves that weights are to move by."""
LEAST_PATIENCE = 3
MOST_LEFT_OUT = 2
"""Inputs that are left out, each in an experiment of its own."""


@dataclass(frozen=True)
class Change:
    """Fields of a config by their dotted names, with new values."""

    name: str
    limit: str
    """The limit that it would confirm."""
    fields: Mapping[str, Any]

    @property
    def command(self) -> str:
        """As options of a command."""
        return " ".join(f"--{name.replace('_', '-')} {_text(value)}" for name, value in self.fields.items())


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def changes(config: Values) -> list[Change]:
    """Every change that the fields of a config allow."""
    fields = flatten(config)
    makers = (_steps, _rates, _widths, _negatives, _regularisation, _recent, _parts)
    return [change for maker in makers for change in maker(fields)]


def _steps(fields: Values) -> Iterator[Change]:
    if steps := fields.get("train.max_steps"):
        yield Change("all planned epochs", "steps", {"train.max_steps": 0})
        yield Change("twice the steps", "steps", {"train.max_steps": 2 * steps})
    else:
        epochs, stop = fields["train.epochs"], {}
        by_epoch = not (fields.get("train.evaluate_steps") or fields.get("evaluate.every_share"))
        if fields.get("data.validate") and fields.get("train.patience") == 0 and by_epoch and epochs > 1:
            # Half of the epochs more without a better one end it.
            stop = {"train.patience": max(LEAST_PATIENCE, epochs // 2)}
        yield Change("twice the epochs", "steps", {"train.epochs": 2 * epochs, **stop})


def _rates(fields: Values) -> Iterator[Change]:
    names = [name for name in RATES if fields.get(name)]
    for factor, name in ((3.0, "three times the rate"), (1 / 3, "a third of the rate"), (10.0, "ten times the rate"),
                         (0.1, "a tenth of the rate")):  # fmt: skip
        yield Change(name, "rate", {field: float(f"{factor * fields[field]:.4g}") for field in names})


def much_larger_rates(config: Values, distance: float | None) -> list[Change]:
    """Rates with which weights would leave their start, where they moved by so small a share of it: an early step moves
    them in proportion to the rate. Whatever kept them, as a long warm-up, is outweighed."""
    if distance is None or distance >= FAR / 30:
        return []
    fields, factor = flatten(config), FAR / distance
    raised = {name: float(f"{factor * fields[name]:.3g}") for name in RATES if fields.get(name)}
    return [Change(f"{factor:.1e} times the rate", "rate", raised)]


def _widths(fields: Values) -> Iterator[Change]:
    for factor, name, limit in (
        (2.0, "twice the width", "capacity"), (4.0, "four times the width", "capacity"),
        (0.5, "half the width", "overfit"),
    ):  # fmt: skip
        wider: Values = {}
        for field, value in fields.items():
            last = field.rpartition(".")[2]
            if not field.startswith("model.") or not value:
                continue
            if last in WIDTHS and isinstance(value, int):
                wider[field] = _times(factor, value)
            elif last in LAYERS and isinstance(value, list):
                first = last == "bottom"
                wider[field] = [
                    one if (first and not at) or (not first and at == len(value) - 1) else _times(factor, one)
                    for at, one in enumerate(value)
                ]
        if wider:
            yield Change(name, limit, wider)
    if blocks := fields.get("model.blocks"):
        yield Change("one block more", "capacity", {"model.blocks": blocks + 1})
        if blocks > 1:
            yield Change("half the blocks", "overfit", {"model.blocks": blocks // 2})


def _times(factor: float, value: int) -> int:
    return max(1, int(factor * value))


def _negatives(fields: Values) -> Iterator[Change]:
    if fields.get("model.loss") == "sampled":
        yield Change("the softmax over all items", "negatives", {"model.loss": "full"})
        if count := fields.get("model.negatives"):
            yield Change("eight times the negatives", "negatives", {"model.negatives": 8 * count})


def _regularisation(fields: Values) -> Iterator[Change]:
    dropped = [name for name in fields if name.startswith("model.") and name.rpartition(".")[2] in DROPOUT]
    if dropped:
        more = {name: round(min(MOST_DROPPED, max(0.2, 2 * fields[name])), 3) for name in dropped}
        yield Change("more dropout", "overfit", more)
        if any(fields[name] for name in dropped):
            yield Change("no dropout", "capacity", dict.fromkeys(dropped, 0.0))
    for name, what, least in (
        ("train.weight_decay", "decay", 0.1),
        ("train.table_weight_decay", "decay of tables", 1.0),
    ):
        if name in fields:
            yield Change(f"more {what}", "overfit", {name: max(least, 3 * fields[name])})
            if fields[name]:
                yield Change(f"a fifth of the {what}", "capacity", {name: float(f"{fields[name] / 5:.3g}")})


def _recent(fields: Values) -> Iterator[Change]:
    # Rows that were made of events are not divided by their own times: the config names the folder of these.
    of_events = isinstance(fields.get("data.events"), str)
    if fields.get("data.split") == "time" and fields.get("data.recent") == 1.0 and not of_events:
        yield Change("the recent half of the rows", "drift", {"data.recent": 0.5})


def left_out(config: Values, inputs: Sequence[InputSeen]) -> list[Change]:
    """The config without each of the inputs that helped the model least."""
    fields = flatten(config)
    useless = sorted(
        (one for one in inputs if one.costs.value <= SURE * one.costs.error), key=lambda one: one.costs.value
    )
    made = ((one.name, _without(fields, one.name)) for one in useless)
    possible = [Change(f"leaving out {name}", "overfit", changed) for name, changed in made if changed]
    return possible[:MOST_LEFT_OUT]


def without_leaks(config: Values, inputs: Iterable[str]) -> list[Change]:
    """The config without each of the inputs that tell what cannot be known."""
    fields = flatten(config)
    made = ((name, _without(fields, name)) for name in inputs)
    return [Change(f"without {name}", "leak", changed) for name, changed in made if changed]


def _without(fields: Values, name: str) -> Values:
    """The fields that leave out an input; none where a config cannot, or does so already."""
    hidden, rows, tables = fields.get("data.without"), fields.get("model.rows"), (*HISTORY, *CONTEXT)
    if hidden is not None:
        return {} if name in hidden else {"data.without": [*hidden, name]}
    if name == RUNNING_RATES:
        return {"model.rates_hidden": 0} if fields.get("model.rates_hidden") else {}
    if name in tables and rows and len(rows) == len(tables) and rows[tables.index(name)] > 1:
        # In a table of one row all ids are the same.
        return {"model.rows": [1 if table == name else count for table, count in zip(tables, rows)]}
    return {}


def _parts(fields: Values) -> Iterator[Change]:
    if fields.get("model.counts") == "off":
        yield Change("a sum with counting", "complement", {"model.counts": "on"})
    others = {"transformer": "hstu", "hstu": "transformer"}
    if (encoder := fields.get("model.encoder")) in others:
        yield Change(f"the {others[encoder]} encoder", "capacity", {"model.encoder": others[encoder]})
    if temperature := fields.get("model.temperature"):
        yield Change("half the temperature", "popularity", {"model.temperature": temperature / 2})
    if (interaction := fields.get("model.interaction")) in ("concat", "dot"):
        other = "dot" if interaction == "concat" else "concat"
        yield Change(f"the {other} interaction", "capacity", {"model.interaction": other})
