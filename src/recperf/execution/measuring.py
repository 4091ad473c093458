"""Measuring a workload's steps: the window every run ends with, and the matched pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ..distributed.ranks import current
from ..measure.explain import explain, part_ms
from ..measure.profile import ClockedStep, Reading, Window
from ..runs.record import Run
from ..train.loop import Recipe, take_step
from .workload import Prepared, Trial

if TYPE_CHECKING:
    from ..distributed.window import SharedWindow, SingleWindow


class Notices(Protocol):
    def notice(self, text: str) -> None: ...


def measure_run(prepared: Prepared, trial: Trial, run: Run, peaks: dict[str, Any] | None, report: Notices) -> None:
    """Write profile.json, the ceilings it is read against, and pair.json where the workload has a matched pair."""
    if peaks is not None:
        run.write("peaks.json", peaks)
    pair = measure_pair(prepared, trial, peaks)
    if pair is not None:
        run.write("pair.json", pair)
    found = measure_window(prepared, trial, trial.recipe, peaks)
    cost = found["overhead"]["share"]
    shown = f"{cost:.1%}" if cost > 0 else "less than the steps vary"
    report.notice(f"measured {found['steps']} further steps part by part; measuring itself cost {shown}")
    run.write("profile.json", found)


STEPS = 48
SECONDS = 12.0
"""What a window may take: a step of seconds is read fewer times."""
ROUNDS, STEPS_A_ROUND = 6, 4
PAIR_EPOCHS = 1000


def measure_window(
    prepared: Prepared, trial: Trial, recipe: Recipe, peaks: dict[str, Any] | None, *, steps: int = STEPS
) -> dict[str, Any]:
    """A window of steps after training, with batches it has not seen; they change the weights but no result.

    Every rank takes the same one, and gets the window of all of them.
    """
    ranks = current().window()
    window = open_window(prepared, trial, recipe, ranks)
    steps = window.warm_up(steps, seconds=SECONDS)
    window.take(steps)
    return close_window(window, prepared, peaks, ranks)


def open_window(
    prepared: Prepared, trial: Trial, recipe: Recipe, ranks: SharedWindow | SingleWindow, *, later: int = 0
) -> Window:
    """A window on the epochs after training, or on some `later` ones, so that two windows share no ids."""

    def step(batches: Iterator[Any], _: int) -> Any:
        # The last rate of the schedule: the update does its full work and hardly moves anything.
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
        clocked_step=_inside(recipe, ranks),
        agree=current().maximum,
        meet=ranks.meet,
        watch=ranks.watch,
    )


def _inside(recipe: Recipe, ranks: SharedWindow | SingleWindow) -> ClockedStep | None:
    """How to clock a step that is one piece; none where spans tell its parts apart."""
    whole = recipe.whole_step
    if whole is None:
        return None

    def clocked(batches: Iterator[Any]) -> Reading:
        with ranks.step():
            return whole.clocked(batches, recipe.learning_rate(recipe.steps - 1))

    return clocked


def close_window(
    window: Window, prepared: Prepared, peaks: dict[str, Any] | None, ranks: SharedWindow | SingleWindow
) -> dict[str, Any]:
    row_bytes, all_bytes = prepared.table_bytes()
    device = prepared.settings.device_name
    found = window.result(device=device, row_bytes=row_bytes, working_set_bytes=all_bytes)
    found["precision"] = prepared.settings.precision
    found = ranks.join(found, window.clocked, window.plain, queued=prepared.settings.sync is not None)
    found["regime"] = explain(found, peaks)
    return found


def measure_pair(prepared: Prepared, trial: Trial, peaks: dict[str, Any] | None) -> dict[str, Any] | None:
    """One model twice, all shapes equal, only the range of ids hot or cold; the ratio is the verdict.

    The arms take turns, so that other work on the machine hits both.
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
            window.take(STEPS_A_ROUND)
    arms = {name: close_window(window, prepared, peaks, ranks) for name, window in windows.items()}
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
    """What the ratio of the lookups says."""
    if ratio >= 1.5:
        return f"Cold ids make the same lookups {ratio:.1f} times slower: memory beyond the caches sets their pace."
    return f"Cold ids change the same lookups by a factor of {ratio:.2f} only: memory beyond the caches hardly shows."
