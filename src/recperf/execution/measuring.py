"""Measures steps of a workload: the window at the end of every run, and the matched pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..distributed.ranks import current
from ..errors import MachineError
from ..measure.limits import verdict_of
from ..measure.peaks import add_threads, has_threads, save
from ..measure.profile import ClockedStep, Reading, Window
from ..measure.sections import part_ms
from ..runs.record import Run
from ..runs.report.formats import measuring_cost
from ..train.loop import Recipe, take_step
from .observing import experiments, observe
from .workload import Prepared, Trial

if TYPE_CHECKING:
    from ..distributed.window import SharedWindow, SingleWindow


class Notices(Protocol):
    def notice(self, text: str) -> None: ...


def measure_run(prepared: Prepared, trial: Trial, run: Run, peaks: dict[str, Any] | None, report: Notices) -> None:
    """Write profile.json, the ceilings of the machine, and pair.json where the workload has a matched pair."""
    if peaks is not None:
        require_threads(peaks, report.notice)
        run.write("peaks.json", peaks)
    pair = measure_pair(prepared, trial)
    if pair is not None:
        run.write("pair.json", pair)
    profile = measure_window(prepared, trial, trial.recipe, peaks, pair=pair, confirm=CONFIRM_SECONDS)
    cost = measuring_cost(profile["overhead"]["share"])
    report.notice(f"measured the parts of {profile['steps']} more steps; measuring costs {cost}")
    run.write("profile.json", profile)


def require_threads(peaks: dict[str, Any], say: Callable[[str], None]) -> None:
    """Measure and store the ceilings for the current number of threads where they are missing."""
    threads = torch.get_num_threads()
    if current().choose(has_threads(peaks, threads), several=True):
        return
    say(f"measuring the ceilings for {threads} threads quickly, once")
    add_threads(peaks, threads)
    try:
        save(peaks)
    except MachineError as error:
        say(f"the ceilings are not stored: {error.what}")


STEPS = 48
CONFIRM_SECONDS = 2.0
"""Time limit of the experiments at the end of a run."""
SECONDS = 12.0
"""Time limit of a window: long steps are measured fewer times."""
ROUNDS, STEPS_PER_ROUND = 6, 4
PAIR_EPOCHS = 1000
"""Epochs after training whose batches the matched pair uses."""


def measure_window(
    prepared: Prepared,
    trial: Trial,
    recipe: Recipe,
    peaks: dict[str, Any] | None,
    *,
    steps: int = STEPS,
    pair: dict[str, Any] | None = None,
    confirm: float = 0.0,
) -> dict[str, Any]:
    """Measure steps after training, on batches that training did not use. They change the weights but no result.

    All ranks measure the same steps, and each gets the joined profile. `confirm` is the time limit of experiments; a
    measured pair is one of them.
    """
    ranks = current().window()
    window = open_window(prepared, trial, recipe, ranks)
    steps = window.warm_up(steps, seconds=SECONDS)
    window.take(steps)
    profile = close_window(window, prepared, ranks)
    observe(profile, recipe, peaks, ranks)
    profile["experiments"] = experiments(profile, recipe, peaks, pair, confirm)
    return profile | verdict_of(profile, peaks)


def open_window(
    prepared: Prepared, trial: Trial, recipe: Recipe, ranks: SharedWindow | SingleWindow, *, later: int = 0
) -> Window:
    """A window on the first epoch after training, or `later` epochs after that, so that two windows share no ids."""

    def step(batches: Iterator[Any], _: int) -> Any:
        # With the last learning rate of the schedule the update does its full work and hardly changes the weights.
        return take_step(recipe, batches, recipe.steps - 1)

    row_bytes, all_bytes = prepared.table_bytes()
    return Window(
        step=step,
        order=recipe.order,
        first_epoch=recipe.epochs + later,
        rows=all_bytes // row_bytes,
        rows_of=trial.rows_of,
        cost_of=prepared.step_cost,
        sync=prepared.settings.sync,
        clocked_step=_clocked_step(recipe, ranks),
        agree=current().maximum,
        meet=ranks.meet,
        watch=ranks.watch,
    )


def _clocked_step(recipe: Recipe, ranks: SharedWindow | SingleWindow) -> ClockedStep | None:
    """Times the parts of a step that runs as one piece; None where spans can time them."""
    whole = recipe.whole_step
    if whole is None:
        return None

    def clocked(batches: Iterator[Any]) -> Reading:
        with ranks.step():
            return whole.clocked(batches, recipe.learning_rate(recipe.steps - 1))

    return clocked


def close_window(window: Window, prepared: Prepared, ranks: SharedWindow | SingleWindow) -> dict[str, Any]:
    row_bytes, all_bytes = prepared.table_bytes()
    device = prepared.settings.device_name
    profile = window.result(device=device, row_bytes=row_bytes, working_set_bytes=all_bytes)
    profile["precision"] = prepared.settings.precision
    return ranks.join(profile, window.clocked, window.plain, queued=prepared.settings.sync is not None)


def measure_pair(prepared: Prepared, trial: Trial) -> dict[str, Any] | None:
    """Measure one model with ids whose rows fit a cache (hot) and with ids from the whole table (cold).

    Shapes are equal, so the ratio shows the cost of memory. The two take turns, so that other work on the machine
    affects both.
    """
    recipes = prepared.pair(trial)
    if recipes is None:
        return None
    # No workload with a pair runs on several ranks.
    ranks = current().window()
    windows = {name: open_window(prepared, trial, recipe, ranks, later=PAIR_EPOCHS) for name, recipe in recipes.items()}
    for _ in range(ROUNDS):
        for window in windows.values():
            window.warm(2)
            window.take(STEPS_PER_ROUND)
    arms = {name: close_window(window, prepared, ranks) for name, window in windows.items()}
    ratio = {
        part: part_ms(arms["cold"], part)["p50"] / part_ms(arms["hot"], part)["p50"] for part in ("embedding", "step")
    }
    return {
        "schema": 1,
        **arms,
        "ids": {name: round(arm["ids"]["touched_bytes"] / arm["ids"]["row_bytes"]) for name, arm in arms.items()},
        "ratio": ratio,
        "verdict": verdict(ratio["embedding"]),
    }


def verdict(ratio: float) -> str:
    """The sentence about the ratio of cold to hot lookups."""
    if ratio >= 1.5:
        return f"Lookups of cold ids take {ratio:.1f} times as long: they are limited by memory beyond the caches."
    return f"Lookups of cold ids take {ratio:.2f} times as long: memory beyond the caches hardly limits them."
