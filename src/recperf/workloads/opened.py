"""The folder of a run, opened to use its model: `recperf.open`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from ..config import from_json
from ..errors import ConfigError, DataError, RecperfWarning, UsageError
from ..execution.workload import Workload
from ..jsonfile import read, require
from ..runs.evidence import START
from ..runs.record import read_config
from ..runs.result import SCHEMA, Result, StartedFrom
from ..runs.schemas import read_file
from . import find, names

if TYPE_CHECKING:
    from ..data.tables import Unknown
    from ..execution.serving import TrainedModel
    from ..runs.diagnosis_report import DiagnosisReport


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
    _refuse_earlier_split(name, values, path)
    try:
        return workload, from_json(workload.config, values)
    except ConfigError as error:
        raise ConfigError(error.what, where={**error.where, "file": file}, fix=error.fix) from None


def _refuse_earlier_split(name: str, values: dict[str, Any], path: Path) -> None:
    """Refuse the config of an earlier version that divided own data by rules of its own; another one loses the field
    that only such a version had."""
    data = values.get("data", {})
    share = data.pop("validation_share", None)
    if share is None or not (share or data.get("source") == "clicks" or data.get("holdout_windows") == 0):
        return
    facts = path / "data.json"
    dataset = read(facts).get("name", "NAME") if facts.is_file() else "NAME"
    what = "this config is of an earlier version of recperf, which held out other rows of the data"
    raise DataError(what, where={"file": path}, fix=f"train anew: recperf run {name} --data {dataset}")


class OpenRun:
    """A run and its model, which is built and read when it is first used.

    `checkpoint` is "last", "best" or the name of one; `device` is "auto", "cpu" or "cuda"; `seed` is one of the run's
    seeds, by default the first. Frames are those of pandas or polars, tables of pyarrow, or dicts of arrays; the same
    kind is returned. For what is no frame, such as a list of users, `frames` names the library: by default that of the
    frame which `recperf.dataset` was given, else the first that is installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checkpoint: str = "last",
        device: str = "auto",
        seed: int | None = None,
        notice: Callable[[str], None] | None = None,
        frames: str = "",
    ) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise DataError(
                "there is no such run", where={"folder": self.folder}, fix="name the folder of a run: runs/<name>"
            )
        self.workload, self.config = read_saved(self.folder)
        self._options: dict[str, Any] = {"checkpoint": checkpoint, "device": device, "seed": seed}
        self._notice = notice
        self._frames = frames or next((name for name in ("pandas", "polars") if find_spec(name)), "dict")

    def __repr__(self) -> str:
        return f"<run of {self.workload.name} in {self.folder}>"

    @property
    def finished(self) -> bool:
        """Whether the training has ended; `recperf.run(resume=run.folder)` goes on with one that has not."""
        return (self.folder / "seal.json").is_file() and (self.folder / "result.json").is_file()

    @property
    def result(self) -> Result:
        """The content of result.json, with its fields as attributes."""
        path = self.folder / "result.json"
        if not path.is_file():
            raise DataError(
                "this run has no result yet", where={"run": self.folder}, fix=f"recperf run --resume {self.folder}"
            )
        return read_file(path, Result, SCHEMA)

    def diagnose(self, minutes: float | None = None) -> DiagnosisReport:
        """Say what limits the quality of the run, by experiments with its config, as `recperf diagnose` does."""
        from ..execution.diagnosing import Diagnosing, Quiet
        from ..runs.diagnosis_report import DiagnosisReport

        quiet: Any = Quiet()
        diagnosing = Diagnosing(
            workload=self.workload, config=self.config, folder=self.folder, report=quiet, minutes=minutes
        )
        return DiagnosisReport.of(diagnosing.run())

    def page(self, path: str | Path | None = None, *, force: bool = False) -> Path:
        """Write the page of the run, by default report.html in its folder."""
        from ..runs.report import page

        return page.save(self._report(), Path(path or self.folder / "report.html"), force=force)

    def __str__(self) -> str:
        """What the command prints of a finished run."""
        from ..runs.report.blocks import render

        return render(self._report()) if self.finished else repr(self)

    def _repr_html_(self) -> str | None:
        """The page in a notebook."""
        from ..runs.report import page

        return page.framed(self._report()) if self.finished else None

    def _report(self) -> Any:
        from ..runs.evidence import Evidence
        from ..runs.report import run_report

        return run_report.report(Evidence(self.folder), "r1")

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
        in a column it is an error, unless `allow_unknown`. For an array, whose fields have the columns' names or whose
        columns are those that the model needs, in their order, the scores are returned as an array.
        """
        import torch

        from ..data.tables import add_unknown, in_blocks
        from ..errors import notice_once
        from ..execution.scoring import columns_of, to_table, whole_batches, with_columns
        from ..execution.serving import score_columns

        given = columns_of(self._columns_of_array(frame) if is_array(frame) else frame)
        columns, logits = self.model.columns(list(given)), [torch.empty(0)]
        if unread := self.model.unread(list(given)):
            (self._notice or notice_once)(unread)
        table = to_table(given, columns.values())
        unknown: dict[str, Unknown] = {}
        for block in in_blocks([table], whole_batches(self.model)):
            logits_N, of_block = self.model.score(block, columns)
            logits.append(logits_N)
            unknown = add_unknown(unknown, of_block)
        _say_unknown(unknown, len(table), allow_unknown)
        if is_array(frame):
            return next(iter(score_columns(torch.cat(logits), columns.values()).values()))
        return with_columns(frame, score_columns(torch.cat(logits), columns.values()))

    def _columns_of_array(self, array: Any) -> dict[str, Any]:
        if array.dtype.names:
            return {name: array[name] for name in array.dtype.names}
        roles = [names[0] for names in self.model.served.roles.values()]
        if array.ndim != 2 or array.shape[1] != len(roles):
            what = f"the array has shape {array.shape}; the model needs the columns {', '.join(roles)}"
            raise UsageError(what, fix="give an array of rows with these columns, or a frame")
        return dict(zip(roles, array.T))

    def recommend(
        self,
        users: Any,
        k: int = 10,
        *,
        exclude_seen: bool | None = None,
        time: int | None = None,
        allow_unknown: bool = False,
    ) -> Any:
        """The k items of all that each user most likely sees and likes, or takes next: columns of the user, rank, the
        item, title if the data has titles, score, logit, and rank_score, which orders them. User and item have the
        names of the import.

        `users` are own ids, as a list or as a column of a frame. For next-item models they may be lists of own item
        ids, the newest last: histories of users that need not be in the data; the column `history` counts them from 1.
        With `exclude_seen`, items that a user has in the training rows are left out; models of events leave out those
        of any event of the store or of the history. Next-item models do so by default where users take no item twice;
        where events have times, they read those before the `time` of the request, in seconds since 1970; None: now.
        Unknown users and items are as in `score`.
        """
        from ..data.tables import pyarrow
        from ..execution.recommending import Requests, recommend
        from ..execution.scoring import array_of, as_frame, kind_of

        if isinstance(users, (list, tuple)) and any(isinstance(one, (list, tuple)) for one in users):
            requests = Requests.of_histories(self.model, users)
        else:
            requests = Requests.of_users(self.model, array_of(users, "users"))
        _say_unknown(requests.unknown, len(requests), allow_unknown)
        tables = list(recommend(self.model, requests, k, exclude_seen=exclude_seen, time=time))
        if not tables:
            raise UsageError("no user is given", fix="recommend([1, 2, 3])")
        kind = self._frames if isinstance(users, (list, tuple)) or is_array(users) else kind_of(users)
        return as_frame(pyarrow().concat_tables(tables), kind)

    def export(self, folder: str | Path, *, since: str | Path | None = None, compiled: bool = False) -> dict[str, Any]:
        """Write the model to a new folder as files that need no recperf; returns the content of its manifest.json.

        With `since`, the folder of another run of the workload, tables have only the rows that are new or differ. With
        `compiled` the program is also written as AOTInductor compiles it for this processor.
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
        notice = self._notice or notice_once
        return export(self.model, Path(folder), facts, notice, earlier=earlier, compiled=compiled)


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy, which this does not import."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _say_unknown(unknown: Mapping[str, Unknown], rows: int, allowed: bool) -> None:
    """Warn of rows with unknown ids; refuse them if they are most of the rows, unless that is allowed."""
    from ..execution.serving import require_known, unknown_text

    require_known(unknown, 0 if allowed else rows)
    if text := unknown_text({column: one.rows for column, one in unknown.items()}):
        warn(text, RecperfWarning, stacklevel=3)
