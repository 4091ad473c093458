"""Measures steps of a workload at the end of every run: clocked ones, then observed ones, then experiments, and what
limits them; and as a matched pair."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

import torch
from msgspec.structs import asdict

from ..distributed.ranks import current
from ..jsonfile import sealed
from ..machine import machine_facts
from ..measure.attribution import attribute
from ..measure.ceilings import Ceilings, cache_sizes_of, ceilings_of_profile, hot_bytes, ranks_sharing
from ..measure.clocks import Counts, spread
from ..measure.evidence import kernel_works, observed
from ..measure.experiments import confirm as run_experiments
from ..measure.experiments import hot_ids
from ..measure.fixes import Fix, Predictor
from ..measure.limits import part_ms, ranks_sentence, tables_sentence
from ..measure.observing import Observer
from ..measure.operators import CallWork
from ..measure.peaks import with_threads
from ..measure.peaks.other_work import DISTURBED, OtherWork, not_judged
from ..measure.peaks.records import Peaks
from ..measure.profile import StepProfile, build_profile
from ..measure.profile_records import (
    NARROWER_PAIR,
    PAIR_SCHEMA,
    ColdOverHot,
    MeasuringCost,
    Missing,
    Pair,
    PairIds,
    PairLookups,
    StepBudget,
    TableTraffic,
    WorkloadFigures,
)
from ..measure.records import Experiment, Observed, ObservedSteps
from ..measure.trace.analyse import analyse
from ..measure.trace.records import StepTables
from ..runs.evidence import profile_of
from ..runs.record import MEASURED, Run
from ..units import too_wide, wide_range
from .clocked_steps import ClockedSteps, TrainingSteps, endless
from .workload import Prepared, Trial

STEPS = 48
SECONDS = 12.0
"""Time limit of the clocked steps: long ones are measured fewer times."""
OBSERVED_SECONDS = 0.8
"""Time of all observed steps together, without what tracing and counting add; long steps take longer."""
REPEAT_SECONDS = 20.0
"""How long steps take at most for which they are measured a second time beside much other work, and how long a pair is
measured again."""
EAGER = Counts(warm=1, plain=1, traced=1, counted=2)
"""Steps of a CUDA graph that are taken without it, to know the work of its kernels."""
TRACED = 8
"""Steps under torch.profiler for a table of operators: enough for means, few enough for a trace a browser opens."""
ROUNDS, STEPS_PER_ROUND = 6, 4
PAIR_LATER, OBSERVED_LATER, EXPERIMENTS_LATER = 1000, 5000, 6000
"""Epochs after training whose batches nothing else that is measured uses."""
CONFIRM_SECONDS = 2.0
"""Time limit of the experiments at the end of a run."""
SINGLE_PROCESS = "fixes are predicted and tried in a single process only"


def measure_run(
    run: Run, prepared: Prepared, trial: Trial | None, peaks: Peaks | None, notice: Callable[[str], None]
) -> None:
    """Write profile.json, the ceilings of the machine, and pair.json where the workload has a matched pair; nothing
    where an earlier process of the run did so."""
    if profile_of(run) is not None:
        return
    if peaks is not None:
        require_threads(peaks, notice)
    trial = trial or prepared.trial(prepared.config.seed)
    measured = measure_window(prepared, trial, peaks, confirm=CONFIRM_SECONDS)
    advise(prepared, measured, peaks)
    # Files of an earlier start of this run would contradict the profile.
    run.remove(*MEASURED)
    contents = {"peaks.json": peaks, "pair.json": measured.pair, "profile.json": sealed(measured.profile)}
    for name, content in contents.items():
        if content is not None:
            run.write(name, content)


def tables_of(observer: Observer | None) -> StepTables | None:
    """Tables from the trace of the observed steps; None where there is none."""
    return analyse(observer.trace) if observer is not None and observer.trace and observer.traced else None


def require_threads(peaks: Peaks, say: Callable[[str], None]) -> None:
    """Measure and store the ceilings for the current number of threads where they are missing; ranks share those of
    all threads."""
    if current().choose(True, several=False):
        with_threads(peaks, torch.get_num_threads(), say)


class MeasuredSteps(NamedTuple):
    profile: StepProfile
    figures: WorkloadFigures
    """Those of the profile."""
    seen: Observed
    """What the profile follows from."""
    pair: Pair | None
    """The matched pair, where there is one."""
    observer: Observer | None
    """None where observing failed."""


def advise(prepared: Prepared, measured: MeasuredSteps, peaks: Peaks | None) -> list[Fix]:
    """Advise the fixes of a workload by their predicted gain or, where it has none, a larger batch if that helps.
    Returns the fixes."""
    if not current().choose(True, several=False):
        measured.figures.no_advice = Missing(SINGLE_PROCESS)
        return []
    predictor = Predictor(measured.seen, measured.profile, measured.figures, peaks)
    fixes, advice = predictor.suggest(prepared.fixes())
    larger = None if advice else predictor.larger_batch()
    measured.profile.advice = advice if larger is None else [larger]
    return fixes


def measure_window(
    prepared: Prepared,
    trial: Trial,
    peaks: Peaks | None,
    *,
    steps: int = STEPS,
    confirm: float = 0.0,
    run: str | None = None,
) -> MeasuredSteps:
    """Measure some steps after training, of which those of a `run` are traced more often.

    All ranks measure the same steps, and each gets the joined profile. `confirm` is the time limit of experiments, of
    which a matched pair is one. Beside much other work one process measures again, and the quietest steps count.
    """
    pair = measure_pair(prepared, trial, peaks) if confirm else None
    subject = TrainingSteps(prepared, trial, trial.recipe)
    measured: list[tuple[Observed, WorkloadFigures, Observer | None]] = []
    began = monotonic()
    while True:
        other_work = OtherWork()
        clocked = ClockedSteps(subject, later=len(measured))
        count = clocked.warm_up(steps, seconds=SECONDS)
        tiers = subject.tiers()
        before = replace(tiers.traffic) if tiers else None
        clocked.take(count)
        budget = clocked.result()
        tables = TableTraffic(**tiers.facts(tiers.traffic.since(before))) if tiers and before else None
        seen, observer = _observe(subject, budget, peaks, run)
        # One share for verdict, claims, fixes and trust; of ranks each saw the work of the others while it observed.
        shares = (share_of_others(subject, other_work), seen.other_work if subject.alone else None)
        seen.other_work = max((share for share in shares if share is not None), default=None)
        plain_ms, clocked_ms = seen.step_ms.p50, budget.step_ms.p50
        cost = MeasuringCost(plain_ms, clocked_ms, clocked_ms / plain_ms - 1)
        measured.append((seen, WorkloadFigures(**asdict(budget), overhead=cost, tables=tables), observer))
        # Without ceilings nothing is claimed about what limits a step.
        quiet = peaks is None or (seen.other_work or 0.0) <= DISTURBED
        # A machine that was busy twice is busy.
        if not subject.alone or quiet or len(measured) > 1 or monotonic() - began > REPEAT_SECONDS:
            break
    seen, figures, observer = min(measured, key=lambda one: one[0].other_work or 0.0)
    ceilings = ceilings_of_profile(figures, peaks)
    experiments = _experiments(subject, seen, ceilings, peaks, pair, confirm)
    profile = build_profile(seen, ceilings, None, experiments, machine_facts())
    profile.verdict.because += filter(None, [ranks_sentence(figures.communication), tables_sentence(figures)])
    profile.workload = figures
    return MeasuredSteps(profile, figures, seen, pair, observer)


def share_of_others(subject: TrainingSteps, other_work: OtherWork) -> float | None:
    """Share of the cores that others took since; ranks on one host are not others, on several it is not known."""
    used = subject.world.total(other_work.own_seconds())
    return other_work.share(used) if subject.world.on_one_host else None


def _observe(
    subject: TrainingSteps, budget: StepBudget, peaks: Peaks | None, run: str | None
) -> tuple[Observed, Observer | None]:
    """Observe steps; the observer is None where that failed.

    All ranks take the same steps; the figures are those of the slowest rank.
    """
    counts = Counts.within(budget.step_ms.p50, OBSERVED_SECONDS)
    works: dict[str, CallWork] = {}
    notes, observer = [], None

    def cache_sizes(device: str) -> tuple[int, int]:
        return cache_sizes_of(peaks, device, threads=torch.get_num_threads(), ranks=ranks_sharing(budget))

    if subject.eager is not None:
        try:
            eager = Observer(cache_sizes=cache_sizes, counts=EAGER, spans=True)
            works = kernel_works(_observed(subject, eager, subject.eager))
        except Exception as error:  # Without it, kernels of the graph have no counted work.
            notes.append(f"the step without its graph could not be observed: {type(error).__name__}: {error}")
    try:
        if run is None:
            observer = Observer(cache_sizes=cache_sizes, counts=counts, spans=True)
        else:
            # As many steps as a table of operators needs, in traces that can be merged.
            counts = replace(counts, traced=TRACED)
            observer = Observer(
                cache_sizes=cache_sizes, counts=counts, spans=True, about=subject.world.trace_facts(run)
            )
        figures = observed(_observed(subject, observer, subject.step), works)
    except Exception as error:
        # What was trained must not be lost because the steps after it cannot be observed; ranks would wait forever.
        if not subject.alone:
            raise
        observer = None
        waits = {"unknown": budget.step_ms.p50}
        figures = Observed(budget.device, budget.threads, budget.step_ms, waits, [], steps=ObservedSteps(0, 0, 0))
        notes.insert(0, f"the steps could not be observed: {type(error).__name__}: {error}")
    figures.notes += notes
    slowest = budget.communication.slowest if budget.communication else 0
    return subject.world.broadcast(figures, slowest), observer


def _observed(subject: TrainingSteps, observer: Observer, step: Callable[[Iterator[Any]], object]) -> Observer:
    batches = endless(subject.order, subject.first_epoch + OBSERVED_LATER)
    try:
        with subject.ranks.watch():
            while not observer.done:
                step(batches)
                observer.end_step()
    finally:
        observer.close()
    return observer


def _experiments(
    subject: TrainingSteps,
    seen: Observed,
    ceilings: Ceilings | None,
    peaks: Peaks | None,
    pair: Pair | None,
    seconds: float,
) -> list[Experiment]:
    """Experiments that confirm the verdict: those that a step allows, and its matched pair."""
    attribution = attribute(seen, ceilings)
    rows = []
    if pair is not None:
        rows.append(hot_ids(pair.hot.step_ms, pair.cold.step_ms, attribution.random))
    # A CUDA graph takes batches of one size only.
    if not seconds or not subject.alone or subject.eager or not seen.operators:
        return rows
    # The iterator has to live: rows of a batch in tiers may leave their cache once it is closed.
    batches = endless(subject.order, subject.first_epoch + EXPERIMENTS_LATER)
    batch = next(batches)
    step = lambda batch: subject.step(iter([batch]))  # noqa: E731
    return rows + run_experiments(step, batch, True, attribution, seen, seconds, peaks=peaks)


def measure_pair(prepared: Prepared, trial: Trial, peaks: Peaks | None) -> Pair | None:
    """Measure one model with ids whose rows fit a cache (hot) and with ids from the whole table (cold); None where it
    has no such pair. No workload with a pair runs on several ranks.

    Shapes are equal, so the ratio shows the cost of memory. What is expected follows from lookups of random rows of the
    same table, outside a step. All of them take turns. A turn beside much other work is repeated while the time allows,
    and the quietest turns count.
    """
    pair = prepared.pair(trial, hot_bytes(peaks, prepared.settings.device_name, torch.get_num_threads()))
    if pair is None:
        return None
    windows = {
        name: ClockedSteps(TrainingSteps(prepared, trial, arm.recipe), later=PAIR_LATER) for name, arm in pair.items()
    }
    equally_likely = all(arm.lookups for arm in pair.values())
    others: list[float] = []
    began = monotonic()
    while len(others) < ROUNDS or (sorted(others)[ROUNDS - 1] > DISTURBED and monotonic() - began < REPEAT_SECONDS):
        other_work = OtherWork()
        for name, window in windows.items():
            window.warm(1)
            window.take(STEPS_PER_ROUND)
            if equally_likely and (draw := pair[name].lookups):
                window.take_lookups(draw, STEPS_PER_ROUND)
        others.append(other_work.share() or 0.0)
    quietest = sorted(sorted(range(len(others)), key=lambda turn: others[turn])[:ROUNDS])
    for window in windows.values():
        window.keep([step for turn in quietest for step in range(turn * STEPS_PER_ROUND, (turn + 1) * STEPS_PER_ROUND)])
    hot, cold = windows["hot"].result(), windows["cold"].result()
    ratio = {part: part_ms(cold, part).p50 / part_ms(hot, part).p50 for part in ("embedding", "step")}
    counted = {"hot": hot.ids, "cold": cold.ids}
    rows = {
        name: arm.rows or round(counted[name].touched_bytes / counted[name].row_bytes) for name, arm in pair.items()
    }
    lookups = PairLookups(**{name: spread(one.lookup_ns) for name, one in windows.items()}) if equally_likely else None
    expected = None if lookups is None else lookups.cold_over_hot()
    other = max(others[turn] for turn in quietest)
    return Pair(
        schema=PAIR_SCHEMA,
        hot=hot,
        cold=cold,
        ids=PairIds(rows["hot"], rows["cold"]),
        ratio=ratio,
        lookups=lookups,
        expected=expected,
        other_work=other,
        verdict=pair_sentence(ratio["embedding"], expected, other),
    )


def pair_sentence(ratio: float, expected: ColdOverHot | None, other_work: float) -> str:
    """The sentence about the ratio of cold to hot lookups."""
    text = f"Lookups of cold ids take {ratio:.2f} times as long as those of hot ids"
    if other_work > DISTURBED:
        return f"{text}; {not_judged(other_work, 'they were measured')}."
    if expected is None:
        return f"{text}; no ratio is expected, because the ids are not equally likely."
    if too_wide(expected.low, expected.high):
        return f"{text}; {wide_range(f'{expected.low:.2f}', f'{expected.high:.2f}', NARROWER_PAIR)}."
    return (
        f"{text}. From rows of the same table, outside a step, {expected.expected:.2f} is expected "
        f"({expected.low:.2f} to {expected.high:.2f})."
    )
