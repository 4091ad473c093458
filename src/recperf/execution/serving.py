"""A trained model without its training: rebuilt from the folder of a run, with the encodings of its data.

Shapes: N rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.tables import Ids, Table, Unknown, find_column
from ..errors import DataError, UsageError, did_you_mean
from ..files import digest_of, open_regular, reading
from ..jsonfile import Struct, read, require
from ..runs.checkpoints import trainings
from ..runs.result import Data
from ..stop import poll
from ..train import checkpoint_folder as folders
from ..train.checkpoint import read_state, shape_mismatch
from ..train.device import Settings, applied
from .workload import OTHER_FEATURES, Workload, load

SCORES = ("score", "logit")
"""Columns that scoring adds: the probability of a positive label, and its log odds."""
BY_ID = "own id; a missing id has the entry `missing` where there is one, any other id the entry `other`"
"""How an embedding is found in a table with own ids."""
MOST_UNREAD = 20
"""Columns without a use that a message lists."""
FEW_ROWS = 100
"""Of more rows than these, at most half may have an unknown id in a column, unless that is allowed."""
BLOCK_ROWS = 1 << 16
"""Rows that are encoded at once, rounded down to whole batches."""


@dataclass(frozen=True)
class Encoded:
    """Rows as a model reads them."""

    inputs: Any
    unknown: Mapping[str, Unknown]
    """Rows with an id that the data of the model has never had, by role."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TableExport:
    """A table, with a row for each own id or, without ids, for each of its rows."""

    name: str
    weight_RW: Tensor
    ids: Any = None
    """Own ids, as an array of pyarrow. Null with row 0 is the entry of any other id, null with another row that of a
    missing one."""
    rows_I: Any = None
    """The row of each own id."""
    meaning: str

    @property
    def kind(self) -> str:
        return "row" if self.ids is None else "id"


@dataclass(frozen=True, kw_only=True, eq=False)
class Export:
    """What a model has to export."""

    tables: list[TableExport]
    program: nn.Module
    """In plain torch; its parameters are the dense part."""
    inputs: Mapping[str, Tensor]
    """Its arguments by name, for the example."""
    meanings: Mapping[str, str]
    example: Table
    logits_B: Tensor
    """Logits of the example, or vectors of its users, computed by the model itself."""
    output: str = "logits, one per sample; torch.sigmoid gives the probability of a positive label"
    """What the program returns."""
    vectors_IW: Tensor | None = None
    """Vectors of items whose product with a user's vector is the score, in the order of the first table; they are also
    written as an index."""
    more: Mapping[str, Table]
    """Further tables that an input needs, by the name of their file."""
    encoding: Mapping[str, Any] = field(default_factory=dict)
    """How a user's values become inputs, for the manifest."""


class Served(Protocol):
    """A model and the encodings of its data, as a workload builds them for `Workload.serve`. Inherit the defaults."""

    settings: Settings
    model: nn.Module
    batch_size: int
    """Rows of a forward pass, as many as in an evaluation: then scores equal its predictions bit for bit."""
    block_rows: int = BLOCK_ROWS
    roles: Mapping[str, tuple[str, ...]]
    """Spellings of the column of each role that rows must have, the preferred one first."""
    optional: Mapping[str, tuple[str, ...]] = {}
    """Spellings of the column of each role that rows may have."""
    users: Ids | None = None
    items: Ids | None = None
    """Own ids of users and items; None where the rows have no such column."""
    titles: Sequence[str | None] | None = None
    """Titles of `items`, where the data has some."""
    excludes_seen: bool = False
    """Whether recommendations leave out what a user has met, unless asked otherwise."""
    timed: bool = False
    """Whether recommendations depend on the time of the request."""
    request_time: int | None = None
    """When they are requested, in seconds since 1970; None: now."""
    pass_per_item: bool = False
    """Whether each item that is ranked takes a pass of the model over the user's history."""
    data_digest: str | None = None
    """Digest of the data that rows are encoded by; None where the config alone says how."""
    data_features: list[str] | None = None
    """Names of the numbers that are computed from ratings."""

    def names(self) -> set[str]:
        """Names of the columns that the model reads."""
        return {name for names in (*self.roles.values(), *self.optional.values()) for name in names}

    def known(self) -> Collection[str]:
        """Roles whose columns rows may leave out, since the data says what they are for each user or item."""
        return ()

    def encode(self, rows: Mapping[str, Any]) -> Encoded:
        """Encode columns, by role, as the training data was encoded."""

    def logits(self, inputs: Any) -> Tensor:
        """The logits of encoded rows, on the host."""

    def held_out(self, seed: int) -> Iterator[tuple[Table, Any]]:
        """The rows that the end of a training is scored on, in that order: their columns with `label`, which has
        another name where a feature has this one, and inputs."""

    def first(self, inputs: Any, rows: int) -> Any:
        """The first rows of encoded ones."""
        return inputs[:rows]

    def export(self, example: Table, inputs: Any) -> Export:
        """The model as tables and a program, with its logits of an example."""
        raise UsageError(f"a {type(self.model).__name__} cannot be exported", fix="recperf score scores rows with it")

    def why_no_ranking(self) -> str | None:
        """Why items cannot be ranked for a user; None if they can."""
        if self.users is None or self.items is None:
            return "its data has no list of users and items"
        return None

    def rank(self, users: Any) -> Tensor:
        """The logits of all items, in the order of `items`, for each user of a column of own ids, on the host."""

    def rank_items(self, user: Any, items_N: NDArray[np.int64]) -> Tensor:
        """The logits of some items, given as places in `items`, for a user in a column of own ids, on the host."""
        return self.rank(user)[0, torch.from_numpy(items_N)]

    def rank_histories(self, histories: Sequence[NDArray[np.int64]]) -> Tensor:
        """The logits of all items for histories, each of places in `items` with the newest last, on the host."""
        raise UsageError("this model ranks items for users of its data only", fix="--users, or a model of next items")

    def probabilities(self, logits_UI: Tensor) -> Tensor:
        """The score of each item: the probability of a positive label."""
        return torch.sigmoid(logits_UI)

    def item_events(self) -> NDArray[np.int64] | None:
        """How many training events each item of `items` has; None where that is not known."""
        return None

    def meeting(self) -> tuple[Tensor, str] | None:
        """Log probability that a user meets each item of `items`, and what it is computed from; None where labels say
        which items users meet."""
        return None

    def seen(self, user: int) -> Tensor:
        """Places in `items` of what a user, given as a place in `users`, has in the training rows or in the store."""
        return torch.zeros(0, dtype=torch.int64)


class ModelFacts(Struct, kw_only=True):
    """What a summary says of a model."""

    seed: int
    checkpoint: str
    step: int
    device: str


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A model with the weights of a checkpoint."""

    served: Served
    checkpoint: Path
    seed: int
    run: Path

    @property
    def digest(self) -> str:
        """Digest of the checkpoint."""
        path = self.checkpoint / folders.MANIFEST
        with reading(path), open(open_regular(path), "rb") as file:
            return digest_of(file)

    @property
    def facts(self) -> ModelFacts:
        step, device = folders.step_of(self.checkpoint), self.served.settings.device_name
        return ModelFacts(seed=self.seed, checkpoint=self.checkpoint.name, step=step, device=device)

    @cached_property
    def meeting(self) -> tuple[Tensor, str] | None:
        """Log probability that a user meets each item, and what it is computed from."""
        return self.served.meeting()

    def require_same_data(self, digest: str | None) -> None:
        """Refuse data that is not the run's: its ids would be looked up in the rows of others."""
        path = self.run / "data.json"
        trained = read(path)
        require(trained, Data, path, what="is damaged", fix="restore it from a copy, or train again")
        if digest not in (None, trained["digest"]):
            raise DataError(
                "the data changed since the model was trained",
                where={"run": self.run, "digest then": trained["digest"], "digest now": digest},
                fix="restore the old data, or train again",
            )
        if self.served.data_features != trained.get("features"):
            raise DataError(OTHER_FEATURES, where={"run": self.run}, fix="train again")

    def columns(self, names: Sequence[str]) -> dict[str, str]:
        """The column of rows with these names that serves each role."""
        served = self.served
        required = {role: find_column(role, named, names, required=False) for role, named in served.roles.items()}
        missing = [role for role, column in required.items() if column is None]
        if missing:
            known = served.known()
            for role in missing:
                find_column(role, served.roles[role], names, required=role not in known)
        more = {role: find_column(role, names_, names, required=False) for role, names_ in served.optional.items()}
        columns = {role: column for role, column in {**required, **more}.items() if column is not None}
        if len(set(columns.values())) < len(columns):
            # Names are also found in another case of letters.
            shared = next(column for column in columns.values() if [*columns.values()].count(column) > 1)
            raise DataError(f"column {shared!r} would serve two features", fix="name the columns as at the import")
        return columns

    def unread(self, names: Sequence[str]) -> str:
        """Says which columns of rows with these names the model does not read; empty if it reads all."""
        read = self.columns(names).values()
        others = [name for name in names if name not in read]
        more = f" and {len(others) - MOST_UNREAD:,} more" if len(others) > MOST_UNREAD else ""
        return f"not read by the model: {', '.join(others[:MOST_UNREAD])}{more}" if others else ""

    def score(self, rows: Table, columns: Mapping[str, str]) -> tuple[Tensor, dict[str, Unknown]]:
        """The logits of rows, and those with an unknown id, by column; `columns` are those that serve each role."""
        encoded = self.served.encode({role: rows[column] for role, column in columns.items()})
        return self.logits(encoded.inputs), {columns[role]: one for role, one in encoded.unknown.items()}

    @torch.no_grad()
    def logits(self, inputs: Any) -> Tensor:
        with applied(self.served.settings):
            return self.served.logits(inputs).float()

    @torch.no_grad()
    def rank(self, users: Any, histories: Sequence[NDArray[np.int64]] | None) -> Tensor:
        """The logits of all items, in the order of their ids, for each user of a column of own ids, or for histories of
        places in the model's items."""
        with applied(self.served.settings):
            ranked = self.served.rank(users) if histories is None else self.served.rank_histories(histories)
            return ranked.float()

    @torch.no_grad()
    def rank_items(self, user: Any, items_N: NDArray[np.int64]) -> Tensor:
        with applied(self.served.settings):
            return self.served.rank_items(user, items_N).float()


def score_columns(logits_N: Tensor, features: Collection[str]) -> dict[str, Any]:
    values = torch.sigmoid(logits_N).numpy(), logits_N.numpy()
    return {free_name(name, features): values_N for name, values_N in zip(SCORES, values)}


def free_name(name: str, features: Collection[str]) -> str:
    """The name of a column of an output, which never is that of a feature of the model."""
    while name in features:
        name = f"recperf_{name}"
    return name


def unknown_text(rows: Mapping[str, int]) -> str:
    """Says how many rows have an unknown id, by column; empty if none has."""
    counts = [f"{count:,} row{'s' * (count != 1)} with an unknown {column}" for column, count in rows.items() if count]
    return f"served by the row for unknown ids: {', '.join(counts)}" if counts else ""


def require_known(unknown: Mapping[str, Unknown], rows: int) -> None:
    """Refuse rows of which more than half have an unknown id: probably it is another column, or written otherwise."""
    for column, one in unknown.items():
        if rows > FEW_ROWS and 2 * one.rows > rows:
            raise DataError(
                f"column {column!r}: {one.rows / rows:.0%} of {rows:,} rows have an id that the data of this model has "
                f"never had, such as {', '.join(one.examples)}",
                fix="give ids as the imported file has them, or --allow-unknown (in Python, allow_unknown=True)",
            )


def open_model(
    workload: Workload,
    config: Any,
    run: Path,
    *,
    checkpoint: str = "last",
    seed: int | None = None,
    device: str = "auto",
    notice: Callable[[str], None] = lambda text: None,
) -> TrainedModel:
    """Build the model of a run and read its weights. `checkpoint` is last, best or the name of one."""
    if workload.serve is None:
        raise UsageError(f"workload {workload.name!r} cannot score rows: its data is random", fix="recperf show")
    path = find_checkpoint(run, checkpoint, seed)
    if not os.path.lexists(run / "seal.json"):
        notice(f"this run is not finished; its checkpoint of step {folders.step_of(path):,} is used")
    fault = folders.fault(path)
    if fault is not None:
        raise _damaged(path, fault)
    poll()
    served: Served = load(workload.serve)(replace(config, train=replace(config.train, device=device)))
    seed = int(path.parent.name.removeprefix("seed-"))
    trained = TrainedModel(served=served, checkpoint=path, seed=seed, run=run)
    trained.require_same_data(served.data_digest)
    if in_tiers(served.model):
        # A checkpoint has the rows that were trained; the others begin as this seed drew them.
        served.model.reset(seed)  # type: ignore[operator]
    restore(served.model, path)
    served.model.eval()
    return trained


def in_tiers(model: nn.Module) -> bool:
    """Whether its tables do not fit on the device."""
    return any(getattr(part, "tiers", None) is not None for part in model.modules())


def find_checkpoint(run: Path, which: str, seed: int | None = None) -> Path:
    """The checkpoint of a run that is last, best, or has a name; of the first seed if none is given."""
    by_seed = {int(folder.name.removeprefix("seed-")): folder for folder in trainings(run) if folders.saved(folder)}
    if not by_seed:
        raise DataError(
            "this run has no checkpoint", where={"run": run}, fix=f"recperf run --resume {run}, or train it again"
        )
    if seed is not None and seed not in by_seed:
        raise DataError(
            f"this run has no checkpoint of seed {seed}",
            where={"run": run, "seeds": ", ".join(map(str, by_seed))},
            fix=f"--seed {next(iter(by_seed))}",
        )
    folder = by_seed[min(by_seed) if seed is None else seed]
    saved = {path.name: path for path in folders.saved(folder)}
    if which == "best" and (fault := folders.index_fault(folder)):
        fix = f"recperf check {run} --prune writes it again; or --checkpoint with the name of one"
        raise DataError(f"which checkpoint is the best is not known: {fault}", where={"folder": folder}, fix=fix)
    best = folders.best_of(folder)
    special = {"last": next(iter(saved.values())), **({"best": best} if best else {})}
    path = {**saved, **special}.get(which)
    if path is None:
        raise UsageError(
            f"this run has no checkpoint {which!r}{did_you_mean(which, saved)}",
            where={"run": run, "checkpoints": ", ".join([*special, *saved])},
            fix=f"recperf check {run}",
        )
    return path


def restore(model: nn.Module, path: Path) -> None:
    """Read the weights of a model from a checkpoint whose digests hold."""
    into = model.state_dict()
    try:
        state = read_state(path, into, part=("trial", "model"))
    except folders.Damaged as damage:
        raise _damaged(path, str(damage)) from None
    lacking = [name for name in into if name not in state]
    mismatch = shape_mismatch(into, state) or (f"it has no {lacking[0]}" if lacking else None)
    if mismatch is None:
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            mismatch = " ".join(str(error).split())
    if mismatch is not None:
        raise DataError(
            f"the checkpoint does not fit the config of its run: {mismatch}",
            where={"checkpoint": path},
            fix="restore config.json, or another checkpoint",
        )


def _damaged(path: Path, fault: str) -> DataError:
    others = [other.name for other in folders.saved(path.parent) if other != path]
    return DataError(
        f"checkpoint {path.name} is damaged: {fault}",
        where={"folder": path},
        fix=f"--checkpoint {others[0]}" if others else "restore it from a copy, or train again",
    )
