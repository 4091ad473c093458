"""Listening events: get, prepare, check, info, make, import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ...data.yambda.config import Strategy
from ...data.yambda.imports.options import ImportOptions
from ...errors import DataError, Interrupted, UsageError
from ..terminal import Terminal
from .progress import BARS, Bar
from .words import say_filled

if TYPE_CHECKING:
    from ...data.yambda.catalogue import Bars, Unit

MADE_UP = "yambda-like"


@dataclass(frozen=True, kw_only=True)
class Get:
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m or yambda-5b."""
    offline: bool = False
    """Use only what was downloaded before; no network."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m or yambda-5b."""
    path: Path | None = None
    """Folder of the raw files; none means what `recperf data get` downloaded."""
    store: Path | None = None
    """Folder of the event store; none means one in the cache folder."""
    memory_mib: int = 1024
    """Resident memory to stay below."""
    reference_layout: Path | None = None
    """Also write the files and the cache of the MLPerf reference into this folder."""
    history_length: int = 4086
    """History length the reference's cache is named after."""
    min_history: int | None = None
    """Events before an anchor in the reference's cache; none means the history length."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class Check:
    name: tyro.conf.Positional[str]
    """Dataset: yambda-50m, yambda-500m, yambda-5b, yambda-like, or one you imported."""
    path: Path | None = None
    """Raw files, a store, or a cache of the MLPerf reference; none means what is in the cache folder."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class Info(Check):
    min_history: int | None = None
    """Events a user must have before an anchor; none means the history's length."""
    history_length: int | None = None
    """Length of a history; none means 4086, or 100 where users' streams are short."""
    strategy: Strategy = "interleaved"
    """Which events make a history: a third each of listen-plus, like and skip, or the last ones (two spellings)."""
    window_seconds: int = 86_400
    """Length of a window of time."""
    plot: Path | None = None
    """Draw what is found into this file: .svg, .png or .pdf."""


@dataclass(frozen=True, kw_only=True)
class Make:
    name: tyro.conf.Positional[str]
    """Dataset: yambda-like."""
    path: Path | None = None
    """Folder to write; what exists is left alone."""
    events: int | None = None
    """About how many events; none means the embedded default, about 300,000."""
    form: Literal["store", "raw"] = "store"
    """An event store, or parquet files laid out as the real ones."""
    seed: int = 7
    """Seed of what is made up."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


@dataclass(frozen=True, kw_only=True)
class Import(ImportOptions):
    store: Path | None = None
    """Folder of the event store; none means one in the cache folder, found again by its name."""
    json: bool = False
    """Print one JSON object on stdout, everything else on stderr."""
    quiet: bool = False
    """Say nothing but errors."""


OPTIONS: dict[str, Any] = {
    "get": Get,
    "prepare": Prepare,
    "check": Check,
    "info": Info,
    "make": Make,
    "import": Import,
}


def perform(action: str, options: Any, terminal: Terminal) -> dict[str, Any]:
    from ...data.yambda import catalogue

    with _bars(terminal, kept=action in ("prepare", "make", "get")) as bar:
        if action == "get":
            return catalogue.get(options.name, offline=options.offline, bars=terminal.live, say=terminal.say)
        if action == "prepare":
            return catalogue.prepare(
                options.name,
                path=options.path,
                store=options.store,
                memory=options.memory_mib << 20,
                reference_layout=options.reference_layout,
                history_length=options.history_length,
                min_history=options.min_history,
                progress=bar,
                say=terminal.notice,
            )
        if action == "check":
            return catalogue.check(options.name, path=options.path, progress=bar, say=terminal.say)
        if action == "info":
            return _info(options, terminal)
        if action == "make":
            return _make(options, bar("making"))
        given = {one.name: getattr(options, one.name) for one in fields(ImportOptions)}
        return catalogue.import_events(ImportOptions(**given), store=options.store, progress=bar)


def _info(options: Info, terminal: Terminal) -> dict[str, Any]:
    from ...data.yambda import catalogue
    from ...data.yambda.config import HistoryConfig, WindowConfig

    store = catalogue.find(options.name, path=options.path, say=terminal.say)
    length = catalogue.usual_length(store) if options.history_length is None else options.history_length
    least = length if options.min_history is None else options.min_history
    return catalogue.info(
        store,
        windows=WindowConfig(seconds=options.window_seconds, min_history=least),
        history=HistoryConfig(length=length, strategy=options.strategy),
        plot=options.plot,
    )


def _make(options: Make, progress: Callable[[int, int], None]) -> dict[str, Any]:
    from ...data.yambda import catalogue
    from ...data.yambda.synthesize import config as synthesize_config

    if options.name != MADE_UP:
        raise UsageError(f"{options.name} is real data and cannot be made", fix=f"recperf data get {options.name}")
    if options.path is None:
        raise UsageError(
            "data make needs --path, the folder to write", fix=f"recperf data make {options.name} --path DIR"
        )
    if options.events is None:
        config = synthesize_config.default(options.seed)
    else:
        config = synthesize_config.of_size(options.events, seed=options.seed)
    return catalogue.make(config, path=options.path, form=options.form, progress=progress)


@contextmanager
def _bars(terminal: Terminal, *, kept: bool) -> Iterator[Bars]:
    """Progress bars that are taken away at the end, and Ctrl-C said in one line."""
    made: list[Bar] = []

    def bar(label: str, unit: Unit = "events") -> Callable[..., None]:
        own = BARS[unit](terminal, label)
        made.append(own)

        def show(*progress: int) -> None:
            # A terminal has room for one at a time.
            for other in made:
                if other is not own:
                    other.close()
            own(*progress)

        return show

    try:
        yield bar
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; what is done is kept" if kept else "interrupted",
            fix="the same command goes on where it stopped" if kept else None,
        ) from None
    finally:
        for one in made:
            one.close()


def not_intact(name: str, found: dict[str, Any]) -> DataError:
    return DataError(f"{name} is damaged", where={"folder": found.get("folder", "-")})


def say(found: dict[str, Any], terminal: Terminal) -> None:
    lengths = found.pop("user_lengths", None)
    for part in ("raw", "store"):
        if isinstance(found.get(part), dict):
            found |= {f"{part}_{name}": value for name, value in found.pop(part).items()}
    say_filled(found, terminal)
    if lengths:
        terminal.say("users by length of their stream")
        widest = max(lengths.values())
        for label, users in lengths.items():
            terminal.say(f"  {label:>22} {'█' * max(1, round(40 * users / widest))} {users:,}")
