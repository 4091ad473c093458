"""Claims about measured steps: what limits them, the rate and share of a component, and the ratio of a matched pair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..measure.ceilings import cache_holds, cold_over_hot, copy_rate, measured_beside
from ..measure.peaks.other_work import DISTURBED, not_judged
from .contract import Claim, Derive, Finding, finding, foreign_peaks
from .evidence import Evidence, NoEvidence
from .result import Percentiles
from .schemas import Component, PairArm, Profile

MEASURED_SAME = 1e-6
"""Largest relative difference of shares of a step and of ratios: they come from times rounded to the nanosecond."""
WORK_SAME = 0.01
"""Largest relative difference of the counted work of the two halves of a pair."""


def on_cpu(claim: Claim) -> Claim:
    """A claim about a CPU, which says nothing about a run on a GPU."""

    def holds(evidence: Evidence) -> Finding:
        device = evidence.profile.device
        if device == "cpu":
            return claim.holds(evidence)
        return Finding(holds=None, detail=f"not judged: this is claimed of a CPU, the run used {device}")

    return replace(claim, text=f"on a CPU, {claim.text}", holds=holds)


def in_memory(claim: Claim) -> Claim:
    """A claim about tables in the memory of the device, which says nothing about tables in host memory or files."""

    def holds(evidence: Evidence) -> Finding:
        placement = evidence.result.performance.settings.get("tables", "device").partition(":")[0]
        if placement == "device":
            return claim.holds(evidence)
        return Finding(holds=None, detail=f"not judged: the table lies elsewhere, by tables.placement {placement}")

    return replace(claim, holds=holds)


def _undisturbed(objections: list[str], fits: bool, shown: str, **other_work: float | None) -> Finding:
    """What readings show: nothing if other work took too much of the cores meanwhile, by what was measured."""
    what, share = max(other_work.items(), key=lambda item: item[1] or 0.0)
    if not objections and (share or 0.0) > DISTURBED:
        return Finding(holds=None, detail=f"{not_judged(share or 0.0, f'{what} were measured')} ({shown})")
    return finding(objections if fits else [*objections, shown], shown)


def limits_lead(*names: str, derive: Derive, cached_rows: bool = False) -> Claim:
    """These limits together have a larger share than any other.

    With `cached_rows`, work in the cache counts too where the cache, by its measured knee, holds the rows of one step:
    there a step reads its rows from memory, but finds them in the cache when it updates them.
    """
    together = " with ".join(names)

    def holds(evidence: Evidence) -> Finding:
        stated, peaks = evidence.profile, evidence.peaks
        if stated.verdict is None:
            raise NoEvidence("profile.json has no verdict")
        # The stated verdict is left out: it must follow from the measurements alone.
        raw = evidence.raw("profile.json")
        derived = derive({name: part for name, part in raw.items() if name not in ("verdict", "shares")}, peaks)
        limit, shares = derived["verdict"]["limit"], derived["shares"]
        objections = foreign_peaks(evidence)
        if stated.verdict.limit != limit:
            objections.append(f"profile.json states {stated.verdict.limit!r}, its measurements give {limit!r}")
        for name, share in shares.items():
            if not math.isclose(stated.shares.get(name, 0.0), share, abs_tol=MEASURED_SAME):
                objections.append(
                    f"profile.json states a share of {stated.shares.get(name, 0.0):.4f} for {name}, its measurements "
                    f"give {share:.4f}"
                )
        held = cached_rows and _step_in_cache(stated, peaks)
        counted = (*names, "cache") if held else names
        own = sum(shares[name] for name in counted)
        others = {name: share for name, share in shares.items() if name not in counted}
        second = max(others, key=lambda name: others[name])
        shown = f"{' with '.join(counted)} {own:.0%} of the step, {second} {others[second]:.0%}"
        if held:
            shown += "; the cache holds the rows of a step"
        ceilings = measured_beside(peaks, stated.device, stated.observed.threads)
        return _undisturbed(objections, own > others[second], shown, steps=stated.other_work, ceilings=ceilings)

    cache = ", with cache where it holds the rows of a step," if cached_rows else ""
    return Claim(name=f"limit: {together}", text=f"{together}{cache} takes the largest share of a step", holds=holds)


def _step_in_cache(profile: Profile, peaks: dict[str, Any]) -> bool:
    ids = profile.ids
    if ids is None or ids.unique_rows is None or ids.row_bytes is None:
        raise NoEvidence("profile.json counts no rows")
    return cache_holds(peaks, profile.device, ids.unique_rows * ids.row_bytes)


def _component(place: str, components: list[Component], name: str) -> Component:
    matching = [component for component in components if component.name == name]
    if len(matching) != 1:
        raise NoEvidence(f"{place} has {len(matching)} components {name!r}, not one")
    return matching[0]


def _positive(place: str, value: float | None) -> float:
    if value is None or value <= 0:
        raise NoEvidence(f"{place} should be a number above 0, is {value}")
    return value


def slower_than_copies(component: str) -> Claim:
    """A component moves its bytes at a lower rate than this device copies memory: memory is not what limits it."""

    def holds(evidence: Evidence) -> Finding:
        profile = evidence.profile
        part = _component("profile.json", profile.components, component)
        moved = _positive(f"profile.json: bytes of {component}", part.bytes)
        rate = moved / (_positive(f"profile.json: p50 of {component}", part.ms.p50) / 1e3)
        copies = copy_rate(evidence.peaks, profile.device, profile.observed.threads)
        if copies is None:
            raise NoEvidence("peaks.json has no copies on this device with this number of threads")
        shown = f"{component} {rate / 1e9:,.4g} GB/s, copies {copies / 1e9:,.4g}"
        return _undisturbed([], rate < copies, shown, steps=evidence.profile.other_work)

    text = f"{component} moves fewer bytes a second than copies of memory do"
    return Claim(name=f"rate of {component}", text=text, holds=holds)


def share_of_forward_at_least(component: str, share: float, with_: tuple[str, ...] = ()) -> Claim:
    """`with_` names further components of the forward pass that are counted with it."""
    label = " with ".join(filter(None, (component, " and ".join(with_))))

    def holds(evidence: Evidence) -> Finding:
        components = evidence.profile.components
        forward = [part for part in components if part.phase == "forward"]
        counted = [_component("profile.json", components, name) for name in dict.fromkeys((component, *with_))]
        outside = [part.name for part in counted if part.phase != "forward"]
        if outside:
            raise NoEvidence(f"profile.json has {', '.join(outside)} outside the forward pass")
        own = sum(_positive(f"profile.json: p50 of {part.name}", part.ms.p50) for part in counted)
        measured = own / sum(part.ms.p50 for part in forward)
        shown = f"{label} {measured:.2f} of forward (at least {share:.2f})"
        return _undisturbed([], measured >= share, shown, steps=evidence.profile.other_work)

    text = f"{label} takes at least {share:.0%} of the forward pass"
    return Claim(name=f"share of {component}", text=text, holds=holds)


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
        arm, rows = evidence.raw("pair.json")["hot"], {"hot": pair.ids.hot, "cold": pair.ids.cold}
        expected = cold_over_hot(evidence.peaks, arm, hot.p50, rows)
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


def _ms(name: str, arm: PairArm, component: str) -> Percentiles:
    times = arm.step_ms if component == "step" else _component(f"pair.json: {name}", arm.components, component).ms
    for quantile in (times.p20, times.p50, times.p80):
        _positive(f"pair.json: {name}: time of {component}", quantile)
    return times


def _unequal_work(hot: PairArm, cold: PairArm, component: str) -> Iterator[str]:
    if hot.ids is None or cold.ids is None:
        raise NoEvidence("pair.json counts no ids")
    if hot.device != cold.device:
        yield "the arms ran on different devices"
    counts: list[tuple[str, float | None, float | None]] = [
        ("batch_size", hot.batch_size, cold.batch_size),
        ("ids.lookups", hot.ids.lookups, cold.ids.lookups),
    ]
    if component != "step":
        # Bytes are not compared: they count distinct rows, whose number is what the arms differ in.
        one, other = (_component("pair.json", arm.components, component).flops for arm in (hot, cold))
        counts.append((f"{component} flops", one, other))
    for name, one, other in counts:
        if one is None or other is None:
            raise NoEvidence(f"pair.json does not count {name}")
        if not math.isclose(one, other, rel_tol=WORK_SAME):
            yield f"pair.json: {name} is {one:g} hot and {other:g} cold"
