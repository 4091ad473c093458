"""Claims about measured steps: what limits them, the rate and share of a component, and the ratio of a matched pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .contract import MEASURED_SAME, Claim, Derive, Finding, derived_from, finding, foreign_peaks, own_fingerprint
from .evidence import Evidence, NoEvidence
from .schemas import Component, PairArm

WORK_SAME = 0.01
"""Largest relative difference of the counted work of the two halves of a pair."""


def limit_is(*names: str, derive: Derive) -> Claim:
    """The verdict is one of these limits."""
    expected = " or ".join(names)

    def judged(verdict: Mapping[str, Any], shares: Mapping[str, float]) -> tuple[bool, str]:
        return verdict["limit"] in names, f"{verdict['limit']}, {verdict['share']:.0%} of the step"

    return _limit(f"limit: {expected}", f"{expected} limits training", judged, derive)


def limits_lead(*names: str, derive: Derive) -> Claim:
    """These limits together have a larger share than any other."""
    together = " with ".join(names)

    def judged(verdict: Mapping[str, Any], shares: Mapping[str, float]) -> tuple[bool, str]:
        own = sum(shares[name] for name in names)
        others = {name: share for name, share in shares.items() if name not in names}
        second = max(others, key=lambda name: others[name])
        return own > others[second], f"{together} {own:.0%} of the step, {second} {others[second]:.0%}"

    return _limit(f"limit: {together}", f"{together} takes the largest share of a step", judged, derive)


Judge = Callable[[Mapping[str, Any], Mapping[str, float]], tuple[bool, str]]


def _limit(name: str, text: str, judged: Judge, derive: Derive) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        stated = evidence.profile
        if stated.verdict is None:
            raise NoEvidence("profile.json has no verdict")
        # The stated verdict is left out: it must follow from the measurements alone.
        profile = {
            name: part for name, part in evidence.raw("profile.json").items() if name not in ("verdict", "shares")
        }
        derived = derived_from(derive, {"profile.json": profile, "peaks.json": evidence.peaks})
        verdict, shares = derived["verdict"], derived["shares"]
        objections = foreign_peaks(evidence, own_fingerprint("machine.json", evidence.raw("machine.json"))[0])
        if stated.verdict.limit != verdict["limit"]:
            objections.append(
                f"profile.json states {stated.verdict.limit!r}, its measurements give {verdict['limit']!r}"
            )
        for limit, share in shares.items():
            if not math.isclose(stated.shares.get(limit, 0.0), share, abs_tol=MEASURED_SAME):
                objections.append(
                    f"profile.json states a share of {stated.shares.get(limit, 0.0):.4f} for {limit}, its measurements "
                    f"give {share:.4f}"
                )
        fits, shown = judged(verdict, shares)
        return finding(objections if fits else [*objections, shown], shown)

    return Claim(name=name, text=text, holds=holds)


def _component(place: str, components: list[Component], name: str) -> Component:
    matching = [component for component in components if component.name == name]
    if len(matching) != 1:
        raise NoEvidence(f"{place} has {len(matching)} components {name!r}, not one")
    return matching[0]


def _positive(place: str, value: float | None) -> float:
    if value is None or value <= 0:
        raise NoEvidence(f"{place} should be a number above 0, is {value}")
    return value


def rate_below(component: str, bytes_per_s: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        part = _component("profile.json", evidence.profile.components, component)
        moved = _positive(f"profile.json: bytes of {component}", part.bytes)
        rate = moved / (_positive(f"profile.json: p50 of {component}", part.ms.p50) / 1e3)
        detail = f"{component} {rate / 1e9:,.4g} GB/s (below {bytes_per_s / 1e9:,.4g})"
        return Finding(holds=rate < bytes_per_s, detail=detail)

    text = f"{component} moves fewer than {bytes_per_s / 1e9:,.4g} GB/s"
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
        if min(part.ms.p50 for part in forward) < 0:
            raise NoEvidence("profile.json has a component with a negative time")
        own = sum(_positive(f"profile.json: p50 of {part.name}", part.ms.p50) for part in counted)
        measured = own / sum(part.ms.p50 for part in forward)
        return Finding(holds=measured >= share, detail=f"{label} {measured:.2f} of forward (at least {share:.2f})")

    text = f"{label} takes at least {share:.0%} of the forward pass"
    return Claim(name=f"share of {component}", text=text, holds=holds)


def pair_ratio_at_least(component: str, ratio: float) -> Claim:
    """`component` may be "step", the whole step."""

    def holds(evidence: Evidence) -> Finding:
        pair = evidence.pair
        measured = _ms("cold", pair.cold, component) / _ms("hot", pair.hot, component)
        stated = pair.ratio.get(component)
        objections = [*_unequal_work(pair.hot, pair.cold, component)]
        if pair.ids.cold <= pair.ids.hot:
            objections.append("pair.json: the cold arm draws from no more ids than the hot one")
        if stated is None or not math.isclose(stated, measured, rel_tol=MEASURED_SAME):
            objections.append(f"pair.json states a ratio of {stated}, its arms give {measured:.6g}")
        shown = f"{component} {measured:.2f} times as long cold as hot (at least {ratio:g})"
        return finding(objections if measured >= ratio else [*objections, shown], shown)

    text = f"{component} takes at least {ratio:g} times as long on cold rows, at equal work"
    return Claim(name=f"cold over hot: {component}", text=text, holds=holds)


def _ms(name: str, arm: PairArm, component: str) -> float:
    times = arm.step_ms if component == "step" else _component(f"pair.json: {name}", arm.components, component).ms
    return _positive(f"pair.json: {name}: p50 of {component}", times.p50)


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
