"""Measures steps of a workload: the window at the end of every run, and the matched pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..distributed.ranks import current
from ..measure.ceilings import ColdOverHot, cold_over_hot, hot_bytes
from ..measure.limits import verdict_of
from ..measure.observing import Observer
from ..measure.peaks import with_threads
from ..measure.peaks.other_work import DISTURBED, OtherWork, not_judged
from ..measure.profile import ClockedStep, ClockedSteps, Reading
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


MEASURED = ("profile.json", "pair.json", "peaks.json")
"""The files of a run that describe its machine's speed."""


def measure_run(prepared: Prepared, trial: Trial, run: Run, peaks: dict[str, Any] | None, report: Notices) -> None:
    """Write profile.json, the ceilings of the machine, and pair.json where the workload has a matched pair."""
    if peaks is not None:
        require_threads(peaks, report.notice)
        run.write("peaks.json", peaks)
    else:
        # Of an earlier start of this run: the profile would contradict them.
        run.remove("peaks.json")
    pair = measure_pair(prepared, trial, peaks)
    if pair is not None:
        run.write("pair.json", pair)
    profile, _ = measure_window(prepared, trial, trial.recipe, peaks, pair=pair, confirm=CONFIRM_SECONDS)
    cost = measuring_cost(profile["overhead"]["share"], profile["step_ms"])
    report.notice(f"measured the parts of {profile['steps']} more steps; measuring costs {cost}")
    if disturbance(profile) > DISTURBED:
        report.notice(f"claims about speed are {not_judged(disturbance(profile), 'the steps were measured')}")
    run.write("profile.json", profile)


def require_threads(peaks: dict[str, Any], say: Callable[[str], None]) -> None:
    """Measure and store the ceilings for the current number of threads where they are missing; ranks share those of
    all threads."""
    if current().choose(True, several=False):
        with_threads(peaks, torch.get_num_threads(), say)


STEPS = 48
CONFIRM_SECONDS = 2.0
"""Time limit of the experiments at the end of a run."""
SECONDS = 12.0
"""Time limit of a window: long steps are measured fewer times."""
REPEAT_SECONDS = 20.0
"""How long a window, and a pair, are measured again while other work takes much of the cores."""
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
    run: str | None = None,
) -> tuple[dict[str, Any], Observer | None]:
    """Measure steps after training, on batches that training did not use. They change the weights but no result.

    All ranks measure the same steps, and each gets the joined profile. `confirm` is the time limit of experiments; a
    measured pair is one of them. Beside much other work one process measures again, and the quietest window counts.
    Returns the profile and the observer, whose trace has more steps where the profile is that of a `run`.
    """
    ranks, alone = current().window(), current().choose(True, several=False)
    windows: list[tuple[dict[str, Any], Observer | None]] = []
    began = monotonic()
    while True:
        other_work = OtherWork()
        window = open_window(prepared, trial, recipe, ranks, later=len(windows))
        steps_taken = window.warm_up(steps, seconds=SECONDS)
        tiers = trial.tiers()
        before = replace(tiers.traffic) if tiers else None
        window.take(steps_taken)
        profile = close_window(window, prepared, ranks)
        if tiers and before:
            profile["tables"] = tiers.facts(tiers.traffic.since(before))
        observer = observe(profile, recipe, peaks, ranks, run)
        # One share for verdict, claims, fixes and trust; of ranks each saw the work of the others while it observed.
        shares = (share_of_others(other_work), profile["observed"]["other_work"] if alone else None)
        share = max((share for share in shares if share is not None), default=None)
        profile["other_work"] = profile["observed"]["other_work"] = share
        windows.append((profile, observer))
        # Without ceilings nothing is claimed about what limits a step.
        if not alone or peaks is None or disturbance(profile) <= DISTURBED or monotonic() - began > REPEAT_SECONDS:
            break
    profile, observer = min(windows, key=lambda window: disturbance(window[0]))
    profile["experiments"] = experiments(profile, recipe, peaks, pair, confirm)
    return profile | verdict_of(profile, peaks), observer


def disturbance(profile: dict[str, Any]) -> float:
    """The largest share of the cores that others took while any figure of a profile was measured."""
    return profile["other_work"] or 0.0


def share_of_others(other_work: OtherWork) -> float | None:
    """Share of the cores that others took since; ranks on one host are not others, on several it is not known."""
    world = current()
    used = world.total(other_work.own_seconds())
    return other_work.share(used) if world.on_one_host else None


def open_window(
    prepared: Prepared, trial: Trial, recipe: Recipe, ranks: SharedWindow | SingleWindow, *, later: int = 0
) -> ClockedSteps:
    """A window on the first epoch after training, or `later` epochs after that, so that two windows share no ids."""

    def step(batches: Iterator[Any], _: int) -> Any:
        # With the last learning rate of the schedule the update does its full work and hardly changes the weights.
        return take_step(recipe, batches, recipe.steps - 1)

    row_bytes, all_bytes = prepared.table_bytes()
    return ClockedSteps(
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


def close_window(window: ClockedSteps, prepared: Prepared, ranks: SharedWindow | SingleWindow) -> dict[str, Any]:
    row_bytes, all_bytes = prepared.table_bytes()
    device = prepared.settings.device_name
    profile = window.result(device=device, row_bytes=row_bytes, working_set_bytes=all_bytes)
    # Batches that were prepared ahead may hold rows of tables in a cache.
    window.batches.close()
    profile["precision"] = prepared.settings.precision
    return ranks.join(profile, window.clocked, window.plain, queued=prepared.settings.sync is not None)


def measure_pair(prepared: Prepared, trial: Trial, peaks: dict[str, Any] | None) -> dict[str, Any] | None:
    """Measure one model with ids whose rows fit a cache (hot) and with ids from the whole table (cold).

    Shapes are equal, so the ratio shows the cost of memory. The two take turns. A turn beside much other work is
    repeated while the time allows, and the quietest turns count.
    """
    arms = prepared.pair(trial, hot_bytes(peaks, prepared.settings.device_name, torch.get_num_threads()))
    if arms is None:
        return None
    # No workload with a pair runs on several ranks.
    ranks = current().window()
    windows = {name: open_window(prepared, trial, arm.recipe, ranks, later=PAIR_EPOCHS) for name, arm in arms.items()}
    others: list[float] = []
    began = monotonic()
    while len(others) < ROUNDS or (sorted(others)[ROUNDS - 1] > DISTURBED and monotonic() - began < REPEAT_SECONDS):
        other_work = OtherWork()
        for window in windows.values():
            window.warm(2)
            window.take(STEPS_PER_ROUND)
        others.append(other_work.share() or 0.0)
    quietest = sorted(sorted(range(len(others)), key=lambda turn: others[turn])[:ROUNDS])
    for window in windows.values():
        window.keep([step for turn in quietest for step in range(turn * STEPS_PER_ROUND, (turn + 1) * STEPS_PER_ROUND)])
    profiles = {name: close_window(window, prepared, ranks) for name, window in windows.items()}
    ratio = {part: _ratio(profiles, part) for part in ("embedding", "step")}
    counted = {name: round(one["ids"]["touched_bytes"] / one["ids"]["row_bytes"]) for name, one in profiles.items()}
    rows = {name: arm.rows or counted[name] for name, arm in arms.items()}
    equally_likely = all(arm.rows for arm in arms.values())
    hot = profiles["hot"]
    expected = cold_over_hot(peaks, hot, part_ms(hot, "embedding")["p50"], rows) if equally_likely else None
    other = max(others[turn] for turn in quietest)
    return {
        "schema": 1,
        **profiles,
        "ids": rows,
        "ratio": ratio,
        "expected": expected and asdict(expected),
        "other_work": other,
        "verdict": verdict(ratio["embedding"], expected, other, equally_likely=equally_likely),
    }


def _ratio(profiles: dict[str, Any], part: str) -> float:
    cold, hot = (part_ms(profiles[name], part)["p50"] for name in ("cold", "hot"))
    return cold / hot


def verdict(ratio: float, expected: ColdOverHot | None, other_work: float, *, equally_likely: bool) -> str:
    """The sentence about the ratio of cold to hot lookups."""
    text = f"Lookups of cold ids take {ratio:.2f} times as long as those of hot ids"
    if other_work > DISTURBED:
        return f"{text}; {not_judged(other_work, 'they were measured')}."
    if not equally_likely:
        return f"{text}; no ratio is expected, because the ids are not equally likely."
    if expected is None:
        return f"{text}; what is expected here was not measured (recperf peaks)."
    return (
        f"{text}. From this machine's memory and cache {expected.expected:.2f} is expected "
        f"({expected.low:.2f} to {expected.high:.2f})."
    )
