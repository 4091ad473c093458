"""The record of a diagnosis: experiments with the config of a run, and how they divide the distance in its metric.
Torch-free."""

from __future__ import annotations

from typing import Any

from ..jsonfile import Number, Struct
from .curve import LearningCurve
from .gains import Gain
from .records import QualityLimit

SCHEMA = 1
FILE = "diagnosis.json"


class Tried(Struct, omit_defaults=True):
    """An experiment: a config with one change more than those that were kept before it."""

    name: str
    limit: str
    change: str
    """The options of a command that make it."""
    fields: dict[str, Any]
    screened: bool
    """Whether it had a quarter of the steps, and is compared with the run after as many."""
    chosen: Number
    """What it gained in the choosing metric, on rows that choose the epoch."""
    gain: Gain
    """In the leading metric, on the scored rows."""
    kept: bool = False
    on_top: tuple[str, ...] = ()
    """The changes that were kept before."""
    confirmed: bool = False
    """Whether the gain is there with Holm's correction for all experiments."""


class Sum(Struct, kw_only=True):
    """The best config's log-odds with those of something else, both with the same weight."""

    name: str
    gain: Gain
    """Over the better of the two."""
    simple: bool
    """Whether the other one is a baseline."""


class Share(Struct):
    """A part of the distance."""

    limit: str
    """A limit, or `baseline` for what lies between the best baseline and the run."""
    name: str
    gain: Gain
    removed: Gain | None = None
    """What the best config loses without this change alone; None: it was not tried."""


class Diagnosis(Struct, kw_only=True):
    """What limits the quality of a run: the distance from the best baseline to the run, and from there to the best
    that an experiment reached, divided."""

    schema: int = SCHEMA
    run: str
    folder: str
    """Of the run; that of the diagnosis lies in it."""
    workload: str
    task: str
    metric: str
    """The leading metric."""
    verdict: QualityLimit
    baseline: Number | None
    """The best baseline's score; None: there is none."""
    baseline_name: str
    score: Number
    """Of the run, the mean over its seeds and two more."""
    best: Number
    """The best that an experiment reached, or the run."""
    possible: Number | None = None
    """An upper bound; None: not known."""
    shares: list[Share]
    tried: list[Tried]
    left_out: list[str]
    """Experiments for which there was no time."""
    advice: str
    """The options of a command that reach the best; empty: none gained."""
    advised: Gain | None
    """What they gain."""
    seeds: int
    """Seeds of the unchanged run."""
    seconds: Number
    curve: LearningCurve | None = None
    """Of the best config; None: there was no time, or its data cannot be divided so."""
    sums: list[Sum]
    """The best config added to another model."""
    free: QualityLimit | None = None
    """What the run itself named."""
