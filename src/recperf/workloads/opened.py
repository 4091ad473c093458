"""The folder of a run, opened to use its model: `recperf.open`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from ..config import from_json
from ..errors import ConfigError, DataError, RecperfWarning, UsageError
from ..execution.workload import Workload
from ..jsonfile import read, require
from ..runs.evidence import START
from ..runs.record import read_config
from ..runs.result import StartedFrom
from . import find, names

if TYPE_CHECKING:
    from ..data.rows import Unknown
    from ..execution.serving import TrainedModel


def read_saved(path: Path) -> tuple[Workload, Any]:
    """The workload and the config of a saved config: a file, or the folder of a run."""
    name, values = read_config(path)
    file = path / "config.json" if path.is_dir() else path
    if name not in names():
        raise DataError(
            f"the config names an unknown workload {name!r}",
            where={"file": file, "known": ", ".join(names())},
            fix="install the package that has this workload, or restore the file",
        )
    workload = find(name)
    try:
        return workload, from_json(workload.config, values)
    except ConfigError as error:
        raise ConfigError(error.what, where={**error.where, "file": file}, fix=error.fix) from None


class OpenRun:
    """A run and its model, which is built and read when it is first used.

    `checkpoint` is "last", "best" or the name of one; `device` is "auto", "cpu" or "cuda"; `seed` is one of the run's
    seeds, by default the first. Frames are those of pandas or polars, tables of pyarrow, or dicts of arrays; the same
    kind is returned.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checkpoint: str = "last",
        device: str = "auto",
        seed: int | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise DataError(
                "there is no such run", where={"folder": self.folder}, fix="name the folder of a run: runs/<name>"
            )
        self.workload, self.config = read_saved(self.folder)
        self._options: dict[str, Any] = {"checkpoint": checkpoint, "device": device, "seed": seed}
        self._notice = notice

    def __repr__(self) -> str:
        return f"<run of {self.workload.name} in {self.folder}>"

    @property
    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        path = self.folder / "result.json"
        if not path.is_file():
            raise DataError(
                "this run has no result yet", where={"run": self.folder}, fix=f"recperf run --resume {self.folder}"
            )
        result: dict[str, Any] = read(path)
        return result

    @cached_property
    def model(self) -> TrainedModel:
        from ..errors import notice_once
        from ..execution.serving import open_model

        notice = self._notice or notice_once
        return open_model(self.workload, self.config, self.folder, notice=notice, **self._options)

    def score(self, frame: Any, *, allow_unknown: bool = False) -> Any:
        """The frame with two more columns: `score`, the probability of a positive label, and `logit`, its log odds.
        They have other names where a feature of the model has one of these.

        Ids that the data of the model has never had give a RecperfWarning; if more than half of over 100 rows have one
        in a column it is an error, unless `allow_unknown`.
        """
        import torch

        from ..data.rows import add_unknown, in_blocks
        from ..execution.scoring import columns_of, to_table, whole_batches, with_columns
        from ..execution.serving import score_columns

        given = columns_of(frame)
        columns, logits = self.model.columns(list(given)), [torch.empty(0)]
        table = to_table(given, columns.values())
        unknown: dict[str, Unknown] = {}
        for block in in_blocks([table], whole_batches(self.model)):
            logits_N, of_block = self.model.score(block, columns)
            logits.append(logits_N)
            unknown = add_unknown(unknown, of_block)
        _say_unknown(unknown, len(table), allow_unknown)
        return with_columns(frame, score_columns(torch.cat(logits), columns.values()))

    def recommend(
        self, users: Any, k: int = 10, *, exclude_seen: bool | None = None, allow_unknown: bool = False
    ) -> Any:
        """The k items of all that each user most likely meets and likes, or takes next: columns user, rank, item, title
        if the data has titles, score, logit, and rank_score, which orders them.

        `users` are own ids, as a list or as a column of a frame. For next-item models they may be lists of own item
        ids, the newest last: histories of users that need not be in the data; the column `history` counts them from 1.
        With `exclude_seen`, items that a user has in the training rows are left out; models of events leave out those
        of any event of the store or of the history. Next-item models do so by default where users take no item twice.
        Unknown users and items are as in `score`.
        """
        from ..data.rows import pyarrow
        from ..execution.recommending import Requests, recommend
        from ..execution.scoring import array_of, as_frame, kind_of

        if isinstance(users, (list, tuple)) and any(isinstance(one, (list, tuple)) for one in users):
            requests = Requests.of_histories(self.model, users)
        else:
            requests = Requests.of_users(self.model, array_of(users, "users"))
        _say_unknown(requests.unknown, len(requests), allow_unknown)
        tables = list(recommend(self.model, requests, k, exclude_seen=exclude_seen))
        if not tables:
            raise UsageError("no user is given", fix="recommend([1, 2, 3])")
        return as_frame(pyarrow().concat_tables(tables), kind_of(users))

    def export(self, folder: str | Path, *, since: str | Path | None = None) -> dict[str, Any]:
        """Write the model to a new folder as files that need no recperf; returns the content of its manifest.json.

        With `since`, the folder of another run of the workload, tables have only the rows that are new or differ.
        """
        from ..errors import notice_once
        from ..execution.exporting import export

        facts, earlier = {"workload": self.workload.name, "run": self.folder.resolve().name}, None
        if since is not None:
            facts["since"], path = Path(since).expanduser().resolve().name, self.folder / START
            start = require(read(path), StartedFrom, path, what="is damaged") if path.is_file() else None
            which: dict[str, Any] = {}
            if start is not None and start.run == facts["since"]:
                which = {"checkpoint": start.checkpoint, "seed": start.seed}
            other = OpenRun(since, device=self._options["device"], notice=self._notice, **which)
            if other.workload.name != self.workload.name:
                what = f"{facts['since']} is a run of {other.workload.name}, this one of {self.workload.name}"
                raise UsageError(what, fix="--since the run that this one started from")
            earlier = other.model
        return export(self.model, Path(folder), facts, self._notice or notice_once, earlier=earlier)


def _say_unknown(unknown: Mapping[str, Unknown], rows: int, allowed: bool) -> None:
    """Warn of rows with unknown ids; refuse them if they are most of the rows, unless that is allowed."""
    from ..execution.serving import require_known, unknown_text

    require_known(unknown, 0 if allowed else rows)
    if text := unknown_text({column: one.rows for column, one in unknown.items()}):
        warn(text, RecperfWarning, stacklevel=3)
