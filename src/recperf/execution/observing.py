"""Observes some steps of a workload, and tests by experiments what limits them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.ranks import current
from ..measure.attribution import attribute
from ..measure.ceilings import ceilings_of, ceilings_of_profile
from ..measure.evidence import kernel_works, observed
from ..measure.experiments import confirm, hot_ids
from ..measure.observing import Counts, Observer
from ..measure.operator_rows import compact
from ..measure.profile import endless
from ..measure.spans import StepClock, budget_part
from ..measure.trace.work import CallWork
from ..train.graph import GraphStep
from ..train.loop import Recipe, take_step

if TYPE_CHECKING:
    from ..distributed.window import SharedWindow, SingleWindow

SECONDS = 0.8
"""Time of all observed steps together, without what tracing and counting add; long steps take longer."""
EAGER = Counts(warm=1, plain=1, traced=1, counted=2)
"""Steps of a CUDA graph that are taken without it, to know the work of its kernels."""
TRACED = 8
"""Steps under torch.profiler for a table of operators: enough for means, few enough for a trace a browser opens."""
LATER = 5000
"""Epochs after training whose batches nothing else in a profile uses."""


def observe(
    profile: dict[str, Any],
    recipe: Recipe,
    peaks: dict[str, Any] | None,
    ranks: SharedWindow | SingleWindow,
    run: str | None = None,
) -> Observer | None:
    """Observe steps of the recipe and add `observed` to the profile; None where that failed.

    All ranks take the same steps; the figures are those of the slowest rank. The traces of a `run` have as many steps
    as a table of operators needs, and can be merged.
    """
    communication = profile.get("communication") or {}
    counts = Counts.within(profile["overhead"]["plain_ms"], SECONDS)
    if run is not None:
        counts = replace(counts, traced=TRACED)
    sharing = communication.get("sharing", 1)
    works: dict[str, CallWork] = {}
    notes, observer = [], None
    if isinstance(recipe.whole_step, GraphStep):
        try:
            works = kernel_works(_observed(recipe, EAGER, peaks, ranks, sharing, eager=True))
        except Exception as error:  # Without it, kernels of the graph have no counted work.
            notes.append(f"the step without its graph could not be observed: {type(error).__name__}: {error}")
    try:
        observer = _observed(recipe, counts, peaks, ranks, sharing, run=run)
        figures = compact(observed(observer, works))
    except Exception as error:
        # What was trained must not be lost because the steps after it cannot be observed; ranks would wait forever.
        if not current().choose(True, several=False):
            raise
        figures = _unobserved(profile, f"the steps could not be observed: {type(error).__name__}: {error}")
    figures["notes"] += notes
    profile["observed"] = current().broadcast(figures, communication.get("slowest", 0))
    return observer


def _unobserved(profile: dict[str, Any], why: str) -> dict[str, Any]:
    step = profile["step_ms"]
    names = ("device", "threads", "step_ms")
    steps = {"seen": 0, "plain": 0, "traced": 0}
    empty: dict[str, Any] = {"operators": [], "parts": [], "other_work": None, "steps": steps}
    return {**{name: profile[name] for name in names}, **empty, "waits": {"unknown": step["p50"]}, "notes": [why]}


def _observed(
    recipe: Recipe,
    counts: Counts,
    peaks: dict[str, Any] | None,
    ranks: SharedWindow | SingleWindow,
    sharing: int,
    *,
    eager: bool = False,
    run: str | None = None,
) -> Observer:
    def knees(device: str) -> tuple[int, int]:
        ceilings = ceilings_of(peaks, device=device, threads=torch.get_num_threads(), ranks=sharing)
        if ceilings:
            return ceilings.knee, ceilings.stream_knee
        from .step_profile import UNKNOWN_KNEE

        return UNKNOWN_KNEE, UNKNOWN_KNEE

    batches = endless(recipe.order, recipe.epochs + LATER)
    whole, rate = recipe.whole_step, recipe.learning_rate(recipe.steps - 1)
    meet = current().trace_barrier() if run is not None else None
    about = current().trace_facts(run) if run is not None else None
    observer = Observer(knees=knees, counts=counts, spans=True, about=about, meet=meet)
    try:
        with ranks.watch() if ranks.watch else nullcontext():
            while not observer.done:
                if eager and isinstance(whole, GraphStep):
                    whole.eager(batches, rate)
                else:
                    take_step(recipe, batches, recipe.steps - 1)
                observer.end_step()
    finally:
        observer.close()
    return observer


class LimitSoFar:
    """Divides the time of a few training steps among their spans, to show where it goes before the verdict: the 2nd,
    4th, 8th and so on, then one in 64. For a CPU: a GPU would have to be waited for."""

    EVERY = 64

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self._clock = StepClock()
        self._open = False
        self._parts: dict[str, int] = {}
        self._steps = 0

    def begin(self, step: int) -> None:
        if step % self.EVERY == self.EVERY // 2 or step & (step - 1) == 0:
            self._open = True
            self._clock.begin()

    def end(self) -> None:
        if not self._open:
            return
        self._open = False
        for name, ns in self._clock.end()[1].items():
            part = budget_part(name)
            self._parts[part] = self._parts.get(part, 0) + ns
        self._steps += 1
        largest = sorted(self._parts.items(), key=lambda item: -item[1])[:3]
        whole = sum(self._parts.values())
        listed = ", ".join(f"{name} {ns / whole:.0%}" for name, ns in largest)
        self.show(f"{listed} of the time of {self._steps} steps; verdict after training")


def experiments(
    profile: dict[str, Any],
    recipe: Recipe,
    peaks: dict[str, Any] | None,
    pair: dict[str, Any] | None,
    seconds: float,
) -> list[dict[str, Any]]:
    """Experiments that confirm the verdict: those that a step of a workload allows, and its matched pair."""
    attribution = attribute(profile["observed"], ceilings_of_profile(profile, peaks))
    rows = []
    if pair is not None:
        hot, cold = (pair[name]["step_ms"]["p50"] for name in ("hot", "cold"))
        rows.append(hot_ids(hot, cold, attribution["random"]))
    alone = current().choose(True, several=False)
    # A CUDA graph takes batches of one size only.
    graph = recipe.whole_step is not None and profile["device"] != "cpu"
    if not seconds or not alone or graph or not profile["observed"]["operators"]:
        return rows
    # The iterator has to live: rows of a batch in tiers may leave their cache once it is closed.
    batches = endless(recipe.order, recipe.epochs + LATER + 1000)
    batch = next(batches)

    def step(batch: Any) -> object:
        return take_step(recipe, iter([batch]), recipe.steps - 1)

    # Operators inside a step that runs as one piece are not seen: its clocks tell how long the optimizer takes.
    updates = sum(part["share"] for part in profile["components"] if part["phase"] == "update")
    clocked = updates if recipe.whole_step is not None else 0.0
    return rows + confirm(step, batch, True, attribution, profile["observed"], seconds, clocked_update=clocked)
