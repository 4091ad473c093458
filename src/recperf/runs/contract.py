"""The claims that a workload makes about its runs, recomputed from the files of a run.

A claim whose evidence is missing or damaged fails; nothing is skipped. A claim about speed is not judged if it was
measured beside too much other work. Nothing here imports torch, so that checking a run costs no more than reading it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..jsonfile import as_json, shorten
from ..units import size
from .derive import Stated, bounds, quality_of, result_of
from .evidence import Evidence, NoEvidence, own_fingerprint
from .report.formats import printable
from .result import fault
from .seal import broken, present

__all__ = ["Claim", "Evidence", "Finding", "NoEvidence", "check_run"]

Derive = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]

SAME = 1e-9
"""Largest relative difference of two numbers that should be equal: the order of a sum may change its last bits."""
LOSS_ENDS = 0.05
"""The share of the steps at either end whose losses are averaged."""


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


def check_run(folder: Path, claims: Sequence[Claim]) -> list[tuple[str, Finding]]:
    """The text and the finding of every claim: first those of every run, then those of the workload."""
    evidence = Evidence(folder)
    return [(claim.text, judge(claim, evidence)) for claim in (*ALWAYS, *claims)]


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


def _intact(evidence: Evidence) -> Finding:
    return finding(broken(evidence.folder), f"{len(present(evidence.folder))} files match seal.json")


def _one_run(evidence: Evidence) -> Finding:
    """The log has the steps and seeds of this run, and its ceilings are of its machine."""
    seeds, objections = evidence.seeds(), []
    strangers = {event["seed"] for event in evidence.events() if event.get("seed") is not None} - set(seeds)
    if strangers:
        objections.append(f"events.jsonl has events of seed {min(strangers)}, which the config does not ask for")
    for seed in seeds:
        logged = len(evidence.events("step", seed=seed))
        timed = sum(event.get("steps", 0) for event in evidence.events("timing", seed=seed))
        if logged != timed:
            objections.append(f"events.jsonl has {logged:,} steps of seed {seed}, its stretches {timed:,}")
    objections += foreign_peaks(evidence)
    return finding(objections, f"{len(evidence.events()):,} events, seeds {seeds[0]} to {seeds[-1]}, one machine")


def foreign_peaks(evidence: Evidence) -> list[str]:
    own = evidence.fingerprint
    theirs = own_fingerprint("peaks.json", evidence.peaks.get("machine")) if evidence.has("peaks.json") else own
    return [] if theirs == own else [f"peaks.json has the ceilings of another machine: {theirs}, not {own}"]


def _result(evidence: Evidence) -> Finding:
    """result.json is computed again from the other files."""
    wrong = fault(evidence.raw("result.json"))
    if wrong:
        return Finding(holds=False, detail=f"result.json: {wrong}")
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
    Claim(name="intact", text="evidence is intact", holds=_intact),
    Claim(name="own", text="files belong to one run", holds=_one_run),
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
        reached = list(bounds(quality.metrics, quality.baselines, stated))
        objections += [f"missed: {text}" for text, met in reached if not met]
        return finding(objections, ", ".join(text for text, _ in reached) or "no target set")

    return Claim(name="quality", text="the logged metrics meet the quality target", holds=holds)


def loss_falls(by: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        falls = {seed: _fall(evidence.losses(seed)) for seed in evidence.seeds()}
        least = min(falls, key=lambda seed: falls[seed])
        detail = f"by {falls[least]:.4g} in seed {least}, the least of {len(falls)} (at least {by:g})"
        return Finding(holds=falls[least] >= by, detail=detail)

    return Claim(name="loss", text=f"the loss falls by at least {by:g} with every seed", holds=holds)


def _fall(losses: list[float]) -> float:
    ends = max(1, round(LOSS_ENDS * len(losses)))
    return statistics.fmean(losses[:ends]) - statistics.fmean(losses[-ends:])
