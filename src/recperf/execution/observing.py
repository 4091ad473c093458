"""Observes some steps of a workload and names what limits them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.ranks import current
from ..measure.ceilings import ceilings_of
from ..measure.evidence import compact, observed
from ..measure.limits import verdict_of
from ..measure.observing import Counts, Observer
from ..measure.profile import endless
from ..train.loop import Recipe, take_step
from .step_profile import UNKNOWN_KNEE

if TYPE_CHECKING:
    from ..distributed.window import SharedWindow, SingleWindow

SECONDS = 0.8
"""Time of all observed steps together, without what tracing and counting add; long steps take longer."""
LATER = 5000
"""Epochs after training whose batches nothing else in a profile uses."""


def observe(
    profile: dict[str, Any],
    recipe: Recipe,
    peaks: dict[str, Any] | None,
    ranks: SharedWindow | SingleWindow,
) -> None:
    """Observe steps of the recipe and add `observed`, `shares` and `verdict` to the profile.

    All ranks take the same steps; the figures are those of the slowest rank.
    """
    communication = profile.get("communication") or {}
    counts = Counts.within(profile["overhead"]["plain_ms"], SECONDS)
    figures = _figures(recipe, counts, peaks, ranks, communication.get("sharing", 1))
    profile["observed"] = current().broadcast(figures, communication.get("slowest", 0))
    profile |= verdict_of(profile, peaks)


def _figures(
    recipe: Recipe,
    counts: Counts,
    peaks: dict[str, Any] | None,
    ranks: SharedWindow | SingleWindow,
    sharing: int,
) -> dict[str, Any]:
    def knees(device: str) -> tuple[int, int]:
        ceilings = ceilings_of(peaks, device=device, threads=torch.get_num_threads(), ranks=sharing)
        return (ceilings.knee, ceilings.stream_knee) if ceilings else (UNKNOWN_KNEE, UNKNOWN_KNEE)

    batches = endless(recipe.order, recipe.epochs + LATER)
    observer = Observer(knees=knees, counts=counts, spans=True)
    try:
        with ranks.watch() if ranks.watch else nullcontext():
            while not observer.done:
                take_step(recipe, batches, recipe.steps - 1)
                observer.end_step()
    finally:
        observer.close()
    return compact(observed(observer))
