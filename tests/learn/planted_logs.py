"""Made-up logs and rows whose best possible score is known.

Shapes: N rows or events, I items.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Draw = np.random.Generator
Columns = dict[str, NDArray[Any]]
FIRST_SECOND, SECONDS = 1_599_955_200, 200 * 86_400
SIZES = {"small": 1.0, "large": 2.5}
HELD_OUT = 0.2


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log with the score of the probabilities that it was drawn from."""

    columns: Columns
    possible: float
    """The leading metric of the true probabilities, expected over labels."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `recperf.dataset`."""


def expected_auc(shares_N: NDArray[Any]) -> float:
    """The expected AUC of ranking rows by the probabilities that their labels are drawn with."""
    values, place = np.unique(shares_N, return_inverse=True)
    positive, negative = (np.bincount(place) * share for share in (values, 1 - values))
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / (positive.sum() * negative.sum()))


def sigmoid(logits_N: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(1 / (1 + np.exp(-logits_N)))


# Rows with a label


def rows(
    draw: Draw,
    size: float,
    *,
    flipped: float = 0.0,
    users: int = 0,
    taste: float = 0.0,
    turns: float = 0.0,
    leak: float = 0.0,
    repeated: int = 1,
    count: int = 6000,
    arrive: bool = False,
    weight: float = 1.0,
    steady: bool = False,
) -> Log:
    """Clicks of a page on a site, with two numbers.

    `flipped` is the share of labels drawn anew from a fair coin, `taste` how much users differ, `turns` how far what
    sites mean turns with time, `leak` the share of rows in which a column repeats the label, `repeated` how often each
    row is logged; with `arrive` users come one after the other; `weight` scales what the columns tell; a log that is
    `steady` has times, by which nothing changes.
    """
    count = int(count * size) // repeated
    site, page, time = draw.integers(0, 40, count), draw.integers(0, 12, count), np.sort(draw.random(count))
    x = draw.normal(0, 1, (2, count))
    means, group = draw.normal(0, 1.4, (2, 12, 4)), draw.integers(0, 4, 40)
    angle = np.pi / 2 * turns * time
    sites = np.cos(angle) * means[0][page, group[site]] + np.sin(angle) * means[1][page, group[site]]
    logits = weight * (sites + 0.9 * x[0] + np.abs(x[1]) - 0.8)
    columns: Columns = {"site": site, "page": page, "x0": x[0], "x1": x[1]}
    options: dict[str, Any] = {"categorical": "site,page", "numeric": "x0,x1"}
    if users:
        many = int(users * size)
        user = np.minimum((time * many).astype(np.int64) if arrive else draw.integers(0, many, count), many - 1)
        if arrive:
            user = np.clip(user - draw.geometric(8 / many, count), 0, many - 1)
        logits = logits + taste * draw.normal(0, 1, many)[user]
        columns["user"], options["user"] = user, "user"
    shares = flipped / 2 + (1 - flipped) * sigmoid(logits)
    labels = (draw.random(count) < shares).astype(np.int64)
    if leak:
        columns["status"] = np.where(draw.random(count) < leak, labels + 1, 0)
        options["categorical"] += ",status"
    timed = bool(turns) or arrive or steady
    if timed:
        columns["time"], options["time"] = (FIRST_SECOND + time * SECONDS).astype(np.int64), "time"
        options["split"] = "time"
    columns["label"] = labels
    held_out = time >= 1 - HELD_OUT if timed else slice(None)
    if repeated > 1:
        again = draw.permutation(np.repeat(np.arange(count), repeated))
        columns = {name: column[again] for name, column in columns.items()}
    return Log(columns=columns, possible=expected_auc(shares[held_out]), options={**options, "clicks": True})


def wide_rows(draw: Draw, size: float) -> Log:
    """Few rows with a column of many categories that tell nothing."""
    log = rows(draw, size, count=2500)
    count = len(log.columns["label"])
    columns = {**log.columns, "session": draw.integers(0, count // 3, count)}
    return replace(log, columns=columns, options={**log.options, "categorical": "site,page,session"})


# Events with a label


def labelled_events(draw: Draw, size: float, *, chance: bool = False, count: int = 4000) -> Log:
    """Events whose label follows from the groups of the item and of the one before."""
    events, users, items, groups = int(count * size), int(200 * size), 50, 4
    user, time = np.sort(draw.integers(0, users, events)), draw.random(events)
    time, item = time[np.lexsort((time, user))], draw.integers(0, items, events)
    group = draw.integers(0, groups, items)[item]
    before = np.where(user == np.roll(user, 1), np.roll(group, 1), groups)
    logits = 0 * time if chance else draw.normal(0, 2, (groups, groups + 1))[group, before]
    shares = sigmoid(logits)
    labels = (draw.random(events) < shares).astype(np.int64)
    seconds = (FIRST_SECOND + time * SECONDS).astype(np.int64)
    columns: Columns = {"user": user, "item": item, "time": seconds, "label": labels}
    return Log(columns=columns, possible=expected_auc(shares[time >= np.quantile(time, 1 - HELD_OUT)]), options=NAMED)


NAMED = {"user": "user", "item": "item", "time": "time"}


# Next items


def sequences(
    draw: Draw,
    size: float,
    *,
    chance: bool = False,
    users: int = 500,
    twice: bool = False,
    fresh: bool = False,
    each: int = 10,
    again: float = 0.0,
) -> Log:
    """Items whose group follows from that of the last one, and within a group from popularity.

    With `twice` each event is logged twice; with `fresh` half of the items have no event before the end. A group has
    `each` items; `again` is the share of events that repeat the last item.
    """
    many, groups, length = int(users * size), 6, 14
    items = groups * each
    moves = draw.dirichlet(np.full(groups, 0.25), groups)
    within = 1 / np.arange(1, each + 1)
    shares_II = np.repeat(np.repeat(moves, each, 0), each, 1) * np.tile(within / within.sum(), groups)
    if chance:
        shares_II = np.full((items, items), 1 / items)
    shares_II = (1 - again) * shares_II + again * np.eye(items)
    upto_II, item = shares_II.cumsum(1), draw.integers(0, items, many)
    shown, kept = [item], []
    for _ in range(length):
        item = np.minimum((upto_II[item] < draw.random((many, 1))).sum(1), items - 1)
        shown.append(item)
    taken = np.stack(shown, 1)
    if fresh:
        # The newer half of a group is a copy that only the last tenth of the time has.
        late = np.arange(length + 1) >= length - 1
        taken = np.where(late & (draw.random(taken.shape) < 0.8), taken + items, taken)
    kept = np.repeat(taken, 2, 1) if twice else taken
    user = np.repeat(np.arange(many), kept.shape[1])
    begin = draw.random(many)[:, None] * 0.5
    time = begin + np.sort(draw.random(kept.shape) * 0.5, 1)
    columns: Columns = {
        "user": user, "item": kept.reshape(-1), "time": (FIRST_SECOND + time * SECONDS).astype(np.int64).reshape(-1)
    }  # fmt: skip
    order = np.argsort(-shares_II, 1)
    gains = 1 / np.log2(2 + np.arange(10))
    top = np.take_along_axis(shares_II, order[:, :10], 1)
    possible = float((top @ gains)[taken[:, -2] % items].mean())
    return Log(columns=columns, possible=possible, options={**NAMED, "split": "leave-one-out"})
