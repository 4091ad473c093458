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
from typing import Any, TypeVar

from ..errors import DataError
from ..jsonfile import Struct, as_json, shorten
from ..measure.ceilings import cache_holds, measured_beside
from ..measure.peaks.other_work import DISTURBED, not_judged
from ..measure.profile_records import NARROWER_PAIR
from ..units import size, too_wide, wide_range
from .derive import bounds, compared, result_again
from .evidence import Evidence, differences, present
from .report.formats import printable
from .result import Target

__all__ = ["Claim", "Evidence", "Finding", "check_run"]

Derive = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]
T = TypeVar("T")

SAME = 1e-9
"""Largest relative difference of two numbers that should be equal: the order of a sum may change its last bits."""
LOSS_ENDS = 0.05
"""The share of the steps at either end whose losses are averaged."""
HOW_TO_MEASURE = {
    "profile.json": "recperf run",
    "pair.json": "recperf pair",
    "peaks.json": "recperf peaks, then recperf run",
}
"""The commands that write evidence which training alone does not write."""


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
    except DataError as lack:
        finding = Finding(holds=False, detail=f"no evidence: {lack.what}")
    except Exception as error:
        finding = Finding(holds=False, detail=f"cannot be evaluated: {type(error).__name__}: {error}")
    return Finding(holds=finding.holds, detail=printable(str(finding.detail)))


def finding(objections: Iterable[str], detail: str) -> Finding:
    """The objections against a claim or, if there are none, the detail."""
    reasons = list(objections)
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Finding(holds=not reasons, detail="; ".join(reasons[:3]) + more if reasons else detail)


def _result(evidence: Evidence) -> Finding:
    """result.json is computed again from the other files."""
    result = evidence.result
    # Results from before they named their task have the same without its name.
    stated = {"task": result.task, **evidence.file("result.json", dict[str, Any])}
    derived = as_json(result_again(evidence))
    steady, verified = result.performance.steady, result.provenance.data_verified
    shown = f"{steady.samples_per_s:,.0f} samples/s over {steady.steps:,} steady steps" if steady else "no steps"
    if verified:
        shown += f"; {size(verified.bytes)} of the data's {size(verified.of)} matched its digests"
    return finding(_differences("", stated, derived), shown)


def _differences(place: str, stated: Any, derived: Any) -> Iterator[str]:
    """The places at which a result is not what the other files give."""
    if isinstance(stated, dict) and isinstance(derived, dict):
        for name in {**stated, **derived}:
            yield from _differences(f"{place}.{name}".lstrip("."), stated.get(name), derived.get(name))
    elif isinstance(stated, list) and isinstance(derived, list | tuple) and len(stated) == len(derived):
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
    """`target` computes the bounds that the workload claims, from the config's fields and data.json. The result must
    state those that the user set."""

    def holds(evidence: Evidence) -> Finding:
        task, quality = evidence.task, evidence.result.quality
        asked = target(evidence.config.config, as_json(evidence.data))
        own = evidence.config.config.get("target", {})
        if own.get("beat") != "auto":
            own = {name: None if own.get(name) == "none" else own.get(name) for name in asked}
        objections = [
            f"result.json: quality.target.{name} is {getattr(quality.target, name)!r}, the config gives {bound!r}"
            for name, bound in (asked if own.get("beat") == "auto" else own).items()
            if getattr(quality.target, name) != bound
        ]
        claimed = Target(**asked)
        reached = list(bounds(task, quality.metrics, quality.baselines, claimed, compared(task, quality)))
        objections += [f"missed: {text}" for text, met in reached if not met]
        return finding(objections, ", ".join(text for text, _ in reached) or "no target set")

    return Claim(name="quality", text="the metrics meet the quality target", holds=holds)


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


def needed(measured: T | None, name: str) -> T:
    """What a run measured, for a claim that rests on it."""
    if measured is None:
        raise DataError(f"{name} is missing (measure it with {HOW_TO_MEASURE[name]})")
    return measured


def in_cpu_memory(claim: Claim) -> Claim:
    """A claim about tables in the memory of a CPU, which says nothing about GPUs and tables in files."""

    def holds(evidence: Evidence) -> Finding:
        device = needed(evidence.profile, "profile.json").device
        placement = evidence.result.performance.settings.get("tables", "device").partition(":")[0]
        if device != "cpu":
            return Finding(holds=None, detail=f"not judged: this is claimed of a CPU, the run used {device}")
        if placement != "device":
            return Finding(holds=None, detail=f"not judged: the table lies elsewhere, by tables.placement {placement}")
        return claim.holds(evidence)

    return replace(claim, text=f"on a CPU, {claim.text}", holds=holds)


def _undisturbed(fits: bool, shown: str, **other_work: float | None) -> Finding:
    """What readings show: nothing if other work took too much of the cores meanwhile, by what was measured."""
    what, share = max(other_work.items(), key=lambda item: item[1] or 0.0)
    if (share or 0.0) > DISTURBED:
        return Finding(holds=None, detail=f"{not_judged(share or 0.0, f'{what} were measured')} ({shown})")
    return Finding(holds=fits, detail=shown)


def limits_lead(*names: str, cached_rows: bool = False, called: str = "") -> Claim:
    """These limits together have a larger share than any other; not judged if they differ by less than the steps do.

    With `cached_rows`, work in the cache counts too where the cache, by its measured knee, holds the rows of one step:
    there a step reads its rows from memory, but finds them in the cache when it updates them. `called` names the limits
    together.
    """
    together = called or " with ".join(names)

    def holds(evidence: Evidence) -> Finding:
        profile, peaks = needed(evidence.profile, "profile.json"), needed(evidence.peaks, "peaks.json")
        ids = needed(evidence.figures, "profile.json").ids
        held = cached_rows and cache_holds(peaks, profile.device, ids.unique_rows * ids.row_bytes)
        counted = (*names, "cache") if held else names
        own = sum(profile.shares.get(name, 0.0) for name in counted)
        second, other = max(
            ((name, share) for name, share in profile.shares.items() if name not in counted), key=lambda row: row[1]
        )
        shown = f"{called or ' with '.join(counted)} {own:.0%} of the step, {second} {other:.0%}"
        if held:
            shown += "; the cache holds the rows of a step"
        ceilings, step = measured_beside(peaks, profile.device, profile.threads), profile.step_ms
        vary = (step.p80 - step.p20) / (2 * step.p50) if step.p50 else 0.0
        if abs(own - other) < vary * own:
            return Finding(holds=None, detail=f"not judged: steps vary by {vary:.0%} ({shown})")
        return _undisturbed(own > other, shown, steps=profile.other_work, ceilings=ceilings)

    cache = ", with cache where it holds the rows of a step," if cached_rows else ""
    return Claim(name=f"limit: {together}", text=f"{together}{cache} takes the largest share of a step", holds=holds)


def pair_ratio_as_measured(component: str) -> Claim:
    """The ratio of a component's time with cold and with hot ids is the one that rows of the same table give outside a
    step: those of the whole table come from memory, those of the hot ids from the cache.

    Both are ranges, since the readings spread. They contradict each other if they have nothing in common; a range wider
    than a factor of 2 would contain nearly anything, so that nothing is judged by it.
    """

    def holds(evidence: Evidence) -> Finding:
        pair = needed(evidence.pair, "pair.json")
        hot, cold = (
            next((part.ms for part in arm.components if part.name == component and part.ms.p20 > 0), None)
            for arm in (pair.hot, pair.cold)
        )
        if hot is None or cold is None:
            raise DataError(f"pair.json has no times of {component}")
        if pair.lookups is None or not pair.lookups.hot.p20 > 0:
            raise DataError("pair.json has no lookups outside a step (measure them with recperf pair)")
        expected, low, high = pair.lookups.cold_over_hot(), cold.p20 / hot.p80, cold.p80 / hot.p20
        shown = (
            f"{component} {cold.p50 / hot.p50:.2f} times as long cold as hot ({low:.2f} to {high:.2f}); rows outside a "
            f"step give {expected.expected:.2f} ({expected.low:.2f} to {expected.high:.2f})"
        )
        for ends in ((low, high), (expected.low, expected.high)):
            if too_wide(*ends):
                why = wide_range(f"{ends[0]:.2f}", f"{ends[1]:.2f}", NARROWER_PAIR)
                return Finding(holds=None, detail=f"{why} ({shown})")
        fits = low <= expected.high and high >= expected.low
        return _undisturbed(fits, shown, lookups=pair.other_work)

    text = f"{component} takes as much longer on cold rows as memory is slower than the cache, at equal work"
    return Claim(name=f"cold over hot: {component}", text=text, holds=holds)
