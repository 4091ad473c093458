"""Which workload and which config a user means: by a name, a preset, a saved config, a run or a dataset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import from_json, to_json
from ..errors import DataError, UsageError, closest, did_you_mean
from ..execution.workload import Workload
from ..train.config import StartConfig
from . import able, find, proposed

if TYPE_CHECKING:
    from ..data.datasets import Dataset

DEFAULT = "micro-dlrm"


@dataclass(frozen=True, kw_only=True)
class Choice:
    workload: Workload
    config: Any
    resume: Path | None = None
    """The run to resume, whose saved config this is."""
    preset: str | None = None
    """The named preset, or the workload's default; None for a saved config."""


def choose(
    name: str | None = None,
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    resume: str | Path | None = None,
    start_from: str | Path | None = None,
    from_diagnosis: str | Path | None = None,
    data: Dataset | None = None,
    default: str = DEFAULT,
    planning: bool = False,
) -> Choice:
    """The workload and the config before any field is set. For planning, a workload without a source starts from the
    preset that it names for plans."""
    if from_diagnosis is not None:
        place = Path(str(from_diagnosis)).expanduser()
        place = place.parent if place.name == "diagnosis.json" else place
        from_diagnosis = place if (place / "diagnosis.json").exists() else place / "diagnosis"
    sources = {
        "--preset": preset,
        "--config": config,
        "--resume": resume,
        "--start-from": start_from,
        "--from-diagnosis": from_diagnosis,
    }
    named = [flag for flag, value in sources.items() if value is not None]
    if start_from is not None and data is None:
        fix = "recperf run --resume goes on with the same"
        raise UsageError("--start-from needs --data: the data to go on with", fix=fix)
    if len(named) > 1 or (resume is not None and data is not None):
        raise UsageError(f"{' and '.join(named if len(named) > 1 else ['--resume', '--data'])} exclude each other")
    if name is None and data is not None:
        # Where no workload is named: one made for the kind of data.
        default = proposed(data) or default
    if named and preset is None:
        path = Path(str(sources[named[0]])).expanduser()
        if config is None and not path.is_dir():
            raise DataError("there is no such run", where={"folder": path}, fix=f"recperf run {named[0]} runs/<name>")
        from .opened import read_saved

        workload, saved = read_saved(path)
        if name and find(name).name != workload.name:
            raise UsageError(f"the config is for workload {workload.name!r}, not {name!r}", where={"file": path})
        if start_from is not None:
            saved = replace(saved, start=StartConfig(run=path))
        choice = Choice(workload=workload, config=saved, resume=path if resume is not None else None)
    else:
        workload = find(name or default)
        planned = workload.plan_preset if planning and data is None else None
        preset = preset or planned or next(iter(workload.presets))
        if preset not in workload.presets:
            what = f"workload {workload.name!r} has no preset {preset!r}{did_you_mean(preset, workload.presets)}"
            raise UsageError(what, where={"known": ", ".join(workload.presets)})
        choice = Choice(workload=workload, config=workload.presets[preset](), preset=preset)
    return choice if data is None else replace(choice, config=_on(data, choice))


def _on(data: Dataset, choice: Choice) -> Any:
    """The config of a choice for a dataset."""
    workload = choice.workload
    if data.kind in workload.datasets:
        return workload.datasets[data.kind](choice.config, data)
    others = able(data.kind)
    log = data.folder / "u.data" if data.kind == "movielens" and data.folder is not None else None
    if log is not None and "events" in workload.datasets:
        fix = f"recperf data import {log} --user 1 --item 2 --rating 3 --time 4 --name NAME, then --data NAME"
    else:
        fix = f"recperf run {proposed(data)} --data {data.name}" if others else "recperf data list"
    can = f"these can: {', '.join(others)}" if others else "no workload can"
    raise UsageError(f"{workload.name} cannot train on {data.name}, which is a dataset of {data.kind}; {can}", fix=fix)


def with_fields(config: Any, fields: dict[str, Any]) -> Any:
    """The config with some fields replaced, in nested dicts by section as in config.json."""
    return from_json(type(config), _merged(to_json(config), _plain(fields)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return to_json(value)


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def resolved(choice: Choice, config: Any) -> Any:
    """The config once its fields are set: what stands for this machine is replaced by what the machine has."""
    path = getattr(getattr(config, "data", None), "path", None)
    if path is not None and len(Path(path).parts) == 1 and not Path(path).exists():
        from ..data import datasets

        if near := closest(str(path), datasets.names()):
            raise DataError(
                f"data.path is {str(path)!r}, which does not exist; datasets are named with --data",
                fix=f"recperf run {choice.workload.name} --data {near}",
            )
    return choice.workload.resolve(config)
