"""The claims that a workload makes about its runs, recomputed from the files of a run.

A claim whose evidence is missing or damaged fails; nothing is skipped. A claim about speed is not judged if it was
measured beside too much other work. Nothing here imports torch, so that checking a run costs no more than reading it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..jsonfile import Struct, as_json, shorten
from ..measure.ceilings import cache_holds, cold_over_hot, measured_beside
from ..measure.peaks.other_work import DISTURBED, not_judged
from ..measure.peaks.records import Peaks
from ..measure.profile_records import Component, StepBudget, StepFigures
from ..measure.records import Percentiles, Verdict
from ..units import size
from .derive import Stated, bounds, quality_of, result_of
from .evidence import Evidence, NoEvidence, differences, own_fingerprint, present
from .quality import compared
from .report.formats import printable
from .result import fault
from .schemas import Event, Step, Timing

__all__ = ["Claim", "Evidence", "Finding", "NoEvidence", "check_run"]

Derive = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]
Judge = Callable[[StepFigures, Peaks | None], tuple[dict[str, float], Verdict]]

SAME = 1e-9
"""Largest relative difference of two numbers that should be equal: the order of a sum may change its last bits."""
LOSS_ENDS = 0.05
"""The share of the steps at either end whose losses are averaged."""
MEASURED_SAME = 1e-6
"""Largest relative difference of shares of a step and of ratios: they come from times rounded to the nanosecond."""
WORK_SAME = 0.01
"""Largest relative difference of the counted work of the two halves of a pair."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    holds: bool | None
    """None: not judged, because the evidence neither supports nor contradicts the claim."""
    detail: str
    """What the evidence shows, in one line."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    name: str
    """Short, and unique within its workload."""
    text: str
    """The claim in one plain sentence."""
    holds: Callable[[Evidence], Finding]


class JudgedClaim(Struct):
    name: str
    text: str
    holds: bool | None
    """None: not judged."""
    found: str
    """What the evidence shows."""


def check_run(folder: Path, claims: Sequence[Claim]) -> list[JudgedClaim]:
    """Judges every claim: first those of every run, then those of the workload."""
    evidence, judged = Evidence(folder), []
    for claim in (*ALWAYS, *claims):
        finding = judge(claim, evidence)
        judged.append(JudgedClaim(claim.name, claim.text, finding.holds, finding.detail))
    return judged


def judge(claim: Claim, evidence: Evidence) -> Finding:
    """Whether a claim holds. One that cannot be evaluated does not hold, whatever the reason."""
    try:
        finding = claim.holds(evidence)
        if not isinstance(finding, Finding):
            raise TypeError(f"the claim must return a Finding, not {finding!r}")
    except NoEvidence as lack:
        finding = Finding(holds=False, detail=f"no evidence: {lack.what}")
    except Exception as error:
        finding = Finding(holds=False, detail=f"cannot be evaluated: {type(error).__name__}: {error}")
    return Finding(holds=finding.holds, detail=printable(str(finding.detail)))


def finding(objections: Iterable[str], detail: str) -> Finding:
    """The objections against a claim or, if there are none, the detail."""
    reasons = list(objections)
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Finding(holds=not reasons, detail="; ".join(reasons[:3]) + more if reasons else detail)


def _foreign_events(evidence: Evidence) -> Iterator[str]:
    """The events that do not fit the config of the run, or each other."""
    seeds = evidence.seeds()
    strangers = {event.seed for event in evidence.events(Event) if event.seed is not None} - set(seeds)
    if strangers:
        yield f"events.jsonl has events of seed {min(strangers)}, which the config does not ask for"
    for seed in seeds:
        logged = len(evidence.events(Step, seed=seed))
        timed = sum(event.steps for event in evidence.events(Timing, seed=seed))
        if logged != timed:
            yield f"events.jsonl has {logged:,} steps of seed {seed}, its stretches {timed:,}"


def _foreign_peaks(evidence: Evidence) -> list[str]:
    own = evidence.fingerprint
    theirs = own_fingerprint("peaks.json", evidence.peaks.machine) if evidence.has("peaks.json") else own
    return [] if theirs == own else [f"peaks.json has the ceilings of another machine: {theirs}, not {own}"]


def _result(evidence: Evidence) -> Finding:
    """result.json is computed again from the other files, which must belong to the same run and machine."""
    wrong = fault(evidence.file("result.json", dict[str, Any]))
    if wrong:
        return Finding(holds=False, detail=f"result.json: {wrong}")
    foreign = [*_foreign_events(evidence), *_foreign_peaks(evidence)]
    if foreign:
        return finding(foreign, "")
    result = evidence.result
    derived = as_json(result_of(evidence, Stated.of(result)))
    steady, verified = result.performance.steady, result.provenance.data_verified
    shown = f"{steady.samples_per_s:,.0f} samples/s over {steady.steps:,} steady steps" if steady else "no steps"
    if verified:
        shown += f"; {size(verified.bytes)} of the data's {size(verified.of)} matched its digests"
    return finding(_differences("", as_json(result), derived), shown)


def _differences(place: str, stated: Any, derived: Any) -> Iterator[str]:
    """The places at which a result is not what the other files give."""
    if isinstance(stated, dict) and isinstance(derived, dict):
        for name in {**stated, **derived}:
            yield from _differences(f"{place}.{name}".lstrip("."), stated.get(name), derived.get(name))
    elif isinstance(stated, list) and isinstance(derived, list) and len(stated) == len(derived):
        for index, pair in enumerate(zip(stated, derived)):
            yield from _differences(f"{place}.{index}", *pair)
    elif isinstance(stated, float) and isinstance(derived, float):
        if not math.isclose(stated, derived, rel_tol=SAME, abs_tol=SAME**2):
            yield f"result.json: {place} is {stated:.6g}, the other files give {derived:.6g}"
    elif stated != derived:
        yield f"result.json: {place} is {shorten(stated)}, the other files give {shorten(derived)}"


ALWAYS = (
    Claim(
        name="intact",
        text="evidence is intact",
        holds=lambda evidence: finding(
            differences(evidence.folder).values(), f"{len(present(evidence.folder))} files match seal.json"
        ),
    ),
    Claim(name="result", text="the result follows from the other files", holds=_result),
)
"""The claims of every run, whatever its workload claims."""


def quality_target(target: Derive) -> Claim:
    """`target` computes the bounds that the result must state, from the config's fields and data.json."""

    def holds(evidence: Evidence) -> Finding:
        stated = evidence.result.quality.target
        asked = target(evidence.config.config, as_json(evidence.data))
        objections = [
            f"result.json: quality.target.{name} is {getattr(stated, name)!r}, the config gives {bound!r}"
            for name, bound in asked.items()
            if getattr(stated, name) != bound
        ]
        quality = quality_of(evidence, stated)
        reached = list(bounds(quality.metrics, quality.baselines, stated, compared(quality)))
        objections += [f"missed: {text}" for text, met in reached if not met]
        return finding(objections, ", ".join(text for text, _ in reached) or "no target set")

    return Claim(name="quality", text="the logged metrics meet the quality target", holds=holds)


def loss_falls(by: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        falls = {}
        for seed in evidence.seeds():
            losses = evidence.losses(seed)
            ends = max(1, round(LOSS_ENDS * len(losses)))
            falls[seed] = statistics.fmean(losses[:ends]) - statistics.fmean(losses[-ends:])
        least = min(falls, key=lambda seed: falls[seed])
        detail = f"by {falls[least]:.4g} in seed {least}, the least of {len(falls)} (at least {by:g})"
        return Finding(holds=falls[least] >= by, detail=detail)

    return Claim(name="loss", text=f"the loss falls by at least {by:g} with every seed", holds=holds)


def in_cpu_memory(claim: Claim) -> Claim:
    """A claim about tables in the memory of a CPU, which says nothing about GPUs and tables in files."""

    def holds(evidence: Evidence) -> Finding:
        device = evidence.profile.device
        placement = evidence.result.performance.settings.get("tables", "device").partition(":")[0]
        if device != "cpu":
            return Finding(holds=None, detail=f"not judged: this is claimed of a CPU, the run used {device}")
        if placement != "device":
            return Finding(holds=None, detail=f"not judged: the table lies elsewhere, by tables.placement {placement}")
        return claim.holds(evidence)

    return replace(claim, text=f"on a CPU, {claim.text}", holds=holds)


def _undisturbed(objections: list[str], fits: bool, shown: str, **other_work: float | None) -> Finding:
    """What readings show: nothing if other work took too much of the cores meanwhile, by what was measured."""
    what, share = max(other_work.items(), key=lambda item: item[1] or 0.0)
    if not objections and (share or 0.0) > DISTURBED:
        return Finding(holds=None, detail=f"{not_judged(share or 0.0, f'{what} were measured')} ({shown})")
    return finding(objections if fits else [*objections, shown], shown)


def limits_lead(*names: str, derive: Judge, cached_rows: bool = False, called: str = "") -> Claim:
    """These limits together have a larger share than any other; not judged if they differ by less than the steps do.

    With `cached_rows`, work in the cache counts too where the cache, by its measured knee, holds the rows of one step:
    there a step reads its rows from memory, but finds them in the cache when it updates them. `called` names the limits
    together.
    """
    together = called or " with ".join(names)

    def holds(evidence: Evidence) -> Finding:
        stated, peaks = evidence.profile, evidence.peaks
        # The stated verdict is left out: it must follow from the measurements alone.
        shares, verdict = derive(evidence.file("profile.json", StepFigures), peaks)
        limit = verdict.limit
        objections = _foreign_peaks(evidence)
        if stated.verdict.limit != limit:
            objections.append(f"profile.json states {stated.verdict.limit!r}, its measurements give {limit!r}")
        for name, share in shares.items():
            if not math.isclose(stated.shares.get(name, 0.0), share, abs_tol=MEASURED_SAME):
                objections.append(
                    f"profile.json states a share of {stated.shares.get(name, 0.0):.4f} for {name}, its measurements "
                    f"give {share:.4f}"
                )
        held = cached_rows and cache_holds(peaks, stated.device, stated.ids.unique_rows * stated.ids.row_bytes)
        counted = (*names, "cache") if held else names
        own = sum(shares[name] for name in counted)
        others = {name: share for name, share in shares.items() if name not in counted}
        second = max(others, key=lambda name: others[name])
        shown = f"{called or ' with '.join(counted)} {own:.0%} of the step, {second} {others[second]:.0%}"
        if held:
            shown += "; the cache holds the rows of a step"
        ceilings, step = measured_beside(peaks, stated.device, stated.observed.threads), stated.observed.step_ms
        vary = (step.p80 - step.p20) / (2 * step.p50) if step.p50 else 0.0
        if not objections and abs(own - others[second]) < vary * own:
            return Finding(holds=None, detail=f"not judged: steps vary by {vary:.0%} ({shown})")
        return _undisturbed(objections, own > others[second], shown, steps=stated.other_work, ceilings=ceilings)

    cache = ", with cache where it holds the rows of a step," if cached_rows else ""
    return Claim(name=f"limit: {together}", text=f"{together}{cache} takes the largest share of a step", holds=holds)


def _component(place: str, components: list[Component], name: str) -> Component:
    matching = [component for component in components if component.name == name]
    if len(matching) != 1:
        raise NoEvidence(f"{place} has {len(matching)} components {name!r}, not one")
    return matching[0]


def pair_ratio_as_measured(component: str) -> Claim:
    """The ratio of a component's time with cold and with hot ids is the one that the ceilings of memory and cache give.

    Both are ranges: the readings spread, and implementations differ. They contradict each other if they have nothing in
    common.
    """

    def holds(evidence: Evidence) -> Finding:
        pair = evidence.pair
        cold, hot = _ms("cold", pair.cold, component), _ms("hot", pair.hot, component)
        measured, stated = cold.p50 / hot.p50, pair.ratio.get(component)
        objections = [*_unequal_work(pair.hot, pair.cold, component)]
        if pair.ids.cold <= pair.ids.hot:
            objections.append("pair.json: the cold arm draws from no more ids than the hot one")
        if stated is None or not math.isclose(stated, measured, rel_tol=MEASURED_SAME):
            objections.append(f"pair.json states a ratio of {stated}, its arms give {measured:.6g}")
        expected = cold_over_hot(evidence.peaks, pair.hot, hot.p50, pair.ids)
        if expected is None:
            raise NoEvidence("peaks.json has no random rows by implementation for this device and number of threads")
        low, high = cold.p20 / hot.p80, cold.p80 / hot.p20
        shown = (
            f"{component} {measured:.2f} times as long cold as hot ({low:.2f} to {high:.2f}); memory over cache gives "
            f"{expected.expected:.2f} ({expected.low:.2f} to {expected.high:.2f})"
        )
        fits = low <= expected.high and high >= expected.low
        ceilings = measured_beside(evidence.peaks, pair.cold.device, pair.cold.threads)
        return _undisturbed(objections, fits, shown, lookups=pair.other_work, ceilings=ceilings)

    text = f"{component} takes as much longer on cold rows as memory is slower than the cache, at equal work"
    return Claim(name=f"cold over hot: {component}", text=text, holds=holds)


def _ms(name: str, arm: StepBudget, component: str) -> Percentiles:
    times = _component(f"pair.json: {name}", arm.components, component).ms
    if min(times.p20, times.p50, times.p80) <= 0:
        raise NoEvidence(f"pair.json: {name}: times of {component} should be above 0")
    return times


def _unequal_work(hot: StepBudget, cold: StepBudget, component: str) -> Iterator[str]:
    if hot.device != cold.device:
        yield "the arms ran on different devices"
    # Bytes are not compared: they count distinct rows, whose number is what the arms differ in.
    flops = (_component("pair.json", arm.components, component).flops for arm in (hot, cold))
    counts: dict[str, tuple[float | None, ...]] = {
        "batch_size": (hot.batch_size, cold.batch_size),
        "ids.lookups": (hot.ids.lookups, cold.ids.lookups),
        f"{component} flops": tuple(flops),
    }
    for name, (one, other) in counts.items():
        if one is None or other is None:
            raise NoEvidence(f"pair.json does not count {name}")
        if not math.isclose(one, other, rel_tol=WORK_SAME):
            yield f"pair.json: {name} is {one:g} hot and {other:g} cold"
