"""What a workload claims about itself, worked out again from a run's files.

A claim whose evidence is missing or damaged fails; nothing is skipped. Nothing here imports torch, so that checking a
run costs no more than reading it.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..machine import fingerprint
from ..measure.spans import budget_part
from .result import faults
from .seal import Evidence, NoEvidence, Part, broken, present, printable

__all__ = ["Claim", "Evidence", "Finding", "NoEvidence", "Part", "check_run"]

Derive = Callable[[dict[str, Any], dict[str, Any]], Mapping[str, Any]]

SAME = 1e-9
"""Two numbers that should be one differ at most by this, relatively: the order of a sum may change its last bits."""
MEASURED_SAME = 1e-6
"""The same for shares of a step and for ratios, made of times that were rounded to the nanosecond."""
WORK_SAME = 0.01
"""How far the counted work of two arms may differ."""
LOSS_ENDS = 0.05
"""The share of the steps at either end whose losses are averaged."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    holds: bool
    found: str
    """What the evidence says, in a line."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    name: str
    """Short, unlike the others of its workload."""
    text: str
    """The claim in one plain sentence."""
    holds: Callable[[Evidence], Finding]


def check_run(folder: Path, claims: Sequence[Claim]) -> list[tuple[str, Finding]]:
    """The text of every claim and what was found: first what holds of every run, then the workload's own."""
    evidence = Evidence(folder)
    return [(claim.text, judge(claim, evidence)) for claim in (*ALWAYS, *claims)]


def judge(claim: Claim, evidence: Evidence) -> Finding:
    """What a claim finds. One that cannot be worked out does not hold, whatever stood in its way."""
    try:
        finding = claim.holds(evidence)
    except NoEvidence as lack:
        finding = Finding(holds=False, found=f"no evidence: {lack}")
    except Exception as error:
        finding = Finding(holds=False, found=f"cannot be worked out: {type(error).__name__}: {error}")
    return Finding(holds=finding.holds, found=printable(finding.found))


def _finding(against: Iterable[str], found: str) -> Finding:
    """What speaks against a claim, or, where nothing does, what was found."""
    reasons = list(against)
    more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return Finding(holds=not reasons, found="; ".join(reasons[:3]) + more if reasons else found)


def _intact(evidence: Evidence) -> Finding:
    return _finding(broken(evidence.folder), f"{len(present(evidence.folder))} files match seal.json")


def _fits(evidence: Evidence) -> Finding:
    try:
        return _finding(faults(evidence.result.value), "every field is there and of its type")
    except (TypeError, ArithmeticError) as error:
        return Finding(holds=False, found=f"result.json holds a value of the wrong type: {error}")


def _belongs(evidence: Evidence) -> Finding:
    """Files of another run are evidence of another run."""
    config, origin, progress = evidence.config, evidence.result["provenance"], evidence.file("progress.json")
    data = evidence.file("data.json")
    pairs = [
        (evidence.result["workload"], config["workload"]),
        (evidence.result["data"], Part(data.value, "data.json", "all of it")),
        (origin["data_digest"], data["digest"]),
        (origin["seed"], config["config"]["seed"]),
        (origin["started"], progress["started"]),
        (origin["resumes"], progress["resumes"]),
    ]
    against = [f"{one.place} differs from {other.place}" for one, other in pairs if one.value != other.value]
    seeds = evidence.seeds()
    for event in evidence.events():
        if "seed" in event.value and event["seed"].whole() not in seeds:
            against.append(f"{event.file} is of seed {event['seed'].value}, which the config does not ask for")
    return _finding(against, f"{len(evidence.events()):,} events, data, config and result agree")


ALWAYS = (
    Claim(name="intact", text="evidence is intact", holds=_intact),
    Claim(name="described", text="result fits its description", holds=_fits),
    Claim(name="own", text="files belong to one run", holds=_belongs),
)
"""What every run has to show, whatever its workload claims."""


def quality_target(target: Derive | None = None) -> Claim:
    """`target`, from the config's fields and data.json, gives the bounds that must stand in the result."""

    def holds(evidence: Evidence) -> Finding:
        quality, trials = evidence.result["quality"], evidence.trials()
        against = [text for trial in trials for text in _against_trial(trial, evidence)]
        if quality["seeds"].value != [trial.value for trial in trials]:
            against.append("result.json: quality.seeds differs from the trials' files")
        metrics, spread = _mean_and_spread([trial["metrics"].numbers() for trial in trials])
        against += _unlike(quality["metrics"], metrics, "the trials give")
        against += _unlike(quality["spread"], spread, "the trials give")
        baselines = evidence.file("baselines.json")
        if quality["baselines"].value != baselines.value:
            against.append("result.json: quality.baselines differs from baselines.json")
        against += _against_target(evidence, target)
        bounds, missed = _bounds(quality["target"], metrics, baselines)
        if quality["met"].flag() != (not missed):
            against.append(f"result.json: quality.met is {quality['met'].value}, the trials say otherwise")
        against += [f"missed: {text}" for text in missed]
        return _finding(against, f"{', '.join(bounds) or 'no bound was set'}; log and trials agree ({len(trials)})")

    return Claim(name="quality", text="the quality target is met by what was logged", holds=holds)


def _against_trial(trial: Part, evidence: Evidence) -> Iterator[str]:
    """How a trial differs from the evaluations in the log."""
    history = evidence.history(trial["seed"].whole())
    if trial.file != f"trial-{trial['seed'].value}.json":
        yield f"{trial.file} is of seed {trial['seed'].value}"
    if trial["metrics"].value != history[-1]["metrics"]:
        yield f"{trial.file}: metrics differ from the last evaluation in events.jsonl"
    if trial["best"].value != max(history, key=lambda entry: float(entry["metrics"]["auc"])):
        yield f"{trial.file}: best is not the best evaluation in events.jsonl"


def _mean_and_spread(trials: list[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    if any(trial.keys() != trials[0].keys() for trial in trials):
        raise NoEvidence("the trials do not have the same metrics")
    values = {name: [trial[name] for trial in trials] for name in trials[0]}
    spread = {name: statistics.stdev(v) for name, v in values.items()} if len(trials) > 1 else {}
    return {name: statistics.fmean(v) for name, v in values.items()}, spread


def _unlike(stated: Part, derived: dict[str, float], who: str) -> Iterator[str]:
    said = stated.numbers()
    for name in sorted(said.keys() | derived.keys()):
        if name not in said or name not in derived:
            yield f"{stated.place}.{name} is not on both sides"
        elif not math.isclose(said[name], derived[name], rel_tol=SAME, abs_tol=SAME):
            yield f"{stated.place}.{name} is {said[name]:.6g}, {who} {derived[name]:.6g}"


def _against_target(evidence: Evidence, derive: Derive | None) -> Iterator[str]:
    """A target that was lowered after the fact is no target."""
    stated, config = evidence.result["quality"]["target"], evidence.config["config"]
    if derive is not None:
        wanted = _derived(derive, config, evidence.file("data.json")).value
    else:
        asked = config.object().get("target", Part({}, "config.json")).object()
        wanted = {name: asked[name].value for name in ("accuracy", "auc") if name in asked}
        wanted = {name: bound for name, bound in wanted.items() if bound is not None}
    for name, bound in wanted.items():
        if stated[name].value != bound:
            yield f"{stated.place}.{name} is {stated[name].value!r}, the config gives {bound!r}"


def _bounds(target: Part, metrics: dict[str, float], baselines: Part) -> tuple[list[str], list[str]]:
    """Every bound beside what was reached, and those that were missed."""
    bounds, missed = [], []
    if target["beat"].value is not None:
        bound = baselines[target["beat"].text()]["auc"].number()
        bounds.append(f"auc {metrics.get('auc', math.nan):.4f} (above {bound:.4f}, {target['beat'].value})")
        missed += [] if metrics.get("auc", math.nan) > bound else bounds[-1:]
    for name in ("accuracy", "auc"):
        if target[name].value is not None:
            bound = target[name].number()
            bounds.append(f"{name} {metrics.get(name, math.nan):.4f} (at least {bound:g})")
            missed += [] if metrics.get(name, math.nan) >= bound else bounds[-1:]
    return bounds, missed


def budget_sums() -> Claim:
    def holds(evidence: Evidence) -> Finding:
        performance = evidence.result["performance"]
        if performance["budget"].value is None:
            raise NoEvidence("result.json has no budget: too few steps were clocked")
        shares = {"data": performance["budget"]["data"].number(), **performance["budget"].numbers()}
        count, spans = performance["steps_in_budget"].whole(), evidence.events("span")
        resumed = evidence.file("progress.json")["resumes"].whole() > 0
        if not 0 < count <= len(spans) or (count < len(spans) and not resumed):
            raise NoEvidence(f"the budget is of {count} clocked steps, events.jsonl holds {len(spans)}")
        # The speed of a resumed run is that of its last process, whose clocked steps end the log.
        against = _against_budget(shares, _mean_parts(spans[-count:], shares))
        last = ", the last process of a resumed run" if resumed else ""
        return _finding(against, f"sums to 1 over {count} clocked steps{last}")

    return Claim(name="budget", text="the budget of a step is that of its spans and sums to 1", holds=holds)


def _mean_parts(spans: Sequence[Part], shares: Mapping[str, float]) -> dict[str, float]:
    """Mean ms of each part of the budget, as the spans have it."""
    mean = dict.fromkeys([*shares, "data", "other"], 0.0)
    for span in spans:
        parts = span["ms"].numbers()
        step = span["ms"]["step"].positive()
        del parts["step"]
        if min(parts.values(), default=-1.0) < 0 or not math.isclose(sum(parts.values()), step, rel_tol=MEASURED_SAME):
            raise NoEvidence(f"{span.file}: the parts do not make up the step")
        for name, ms in parts.items():
            part = budget_part(name, default=name)
            mean[part if part in mean else "other"] += ms / len(spans)
    return mean


def _against_budget(shares: Mapping[str, float], mean: Mapping[str, float]) -> Iterator[str]:
    if abs(sum(shares.values()) - 1) > MEASURED_SAME:
        yield f"it sums to {sum(shares.values()):.6g}"
    # Shuffling is booked to data and stands in no span: data may be more than the spans say, never less, and the
    # others share what it leaves.
    whole = sum(mean.values())
    scale = (1 - shares["data"]) / max(whole - mean["data"], 1e-12)
    if shares["data"] < mean["data"] / whole - MEASURED_SAME:
        yield f"data is {shares['data']:.6f} of a step, its spans alone are {mean['data'] / whole:.6f}"
    for name, ms in mean.items():
        if name != "data" and not math.isclose(shares.get(name, 0.0), ms * scale, abs_tol=MEASURED_SAME):
            yield f"{name} is {shares.get(name, 0.0):.6f} of a step, its spans give {ms * scale:.6f}"


def known_machine() -> Claim:
    def holds(evidence: Evidence) -> Finding:
        own, against = _fingerprint(evidence.machine)
        stated = evidence.result["provenance"]["machine"].text()
        if stated != own:
            against.append(f"result.json is from machine {stated!r}, machine.json describes {own}")
        against += _foreign_peaks(evidence, own)
        peaks = ", and so do its ceilings" if evidence.has("peaks.json") else ""
        return _finding(against, f"{own} follows from the facts of machine.json{peaks}")

    return Claim(name="machine", text="the run is from the machine it describes", holds=holds)


def _fingerprint(machine: Part) -> tuple[str, list[str]]:
    """The fingerprint that follows from a machine's facts, and what is said against it if it states another."""
    derived = fingerprint({name: fact.value for name, fact in machine.object().items() if name != "fingerprint"})
    stated = machine["fingerprint"].text()
    return derived, [] if stated == derived else [f"{machine.place} states {stated!r}, its facts give {derived}"]


def _foreign_peaks(evidence: Evidence, own: str) -> list[str]:
    if not evidence.has("peaks.json"):
        return []
    theirs, against = _fingerprint(evidence.peaks["machine"])
    return against + ([] if theirs == own else [f"peaks.json has the ceilings of another machine: {theirs}, not {own}"])


def _derived(derive: Derive, *parts: Part) -> Part:
    """What a function of a workload makes of evidence; it gets copies, and may find them unusable."""
    try:
        found = derive(*(copy.deepcopy(part.value) for part in parts))
    except Exception as error:
        read = " and ".join(part.file for part in parts)
        raise NoEvidence(f"{read} cannot be made sense of: {type(error).__name__}: {error}") from error
    return Part(found, "what was derived")


def regime_is_not(name: str, derive: Derive) -> Claim:
    return _regime(f"not {name}", lambda found: found != name, derive)


def regime_is(*names: str, derive: Derive) -> Claim:
    return _regime(" or ".join(names), lambda found: found in names, derive)


def _regime(wanted: str, fits: Callable[[str], bool], derive: Derive) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        stated = evidence.profile["regime"]["name"].text()
        # Without what it states: the regime must follow from the measurements, not from its own name.
        bare = {name: part.value for name, part in evidence.profile.object().items() if name != "regime"}
        derived = _derived(derive, Part(bare, "profile.json"), evidence.peaks)["name"].text()
        against = _foreign_peaks(evidence, _fingerprint(evidence.machine)[0])
        if stated != derived:
            against.append(f"profile.json states {stated!r}, its measurements give {derived!r}")
        if not fits(derived):
            against.append(derived)
        return _finding(against, derived)

    return Claim(name=f"regime: {wanted}", text=f"training is {wanted}", holds=holds)


def _component(profile: Part, name: str) -> Part:
    found = [part for part in profile["components"].array() if part["name"].value == name]
    if len(found) != 1:
        raise NoEvidence(f"{profile.place} has {len(found)} components {name!r}, not one")
    return found[0]


def rate_below(component: str, bytes_per_s: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        part = _component(evidence.profile, component)
        rate = part["bytes"].positive() / (part["ms"]["p50"].positive() / 1e3)
        found = f"{component} {rate / 1e9:,.4g} GB/s (below {bytes_per_s / 1e9:,.4g})"
        return Finding(holds=rate < bytes_per_s, found=found)

    text = f"{component} moves fewer than {bytes_per_s / 1e9:,.4g} GB/s"
    return Claim(name=f"rate of {component}", text=text, holds=holds)


def share_of_forward_at_least(component: str, share: float, with_: tuple[str, ...] = ()) -> Claim:
    """`with_` names further components of the forward pass that are counted with it."""
    label = " with ".join(filter(None, (component, " and ".join(with_))))

    def holds(evidence: Evidence) -> Finding:
        forward = [p for p in evidence.profile["components"].array() if p["phase"].value == "forward"]
        counted = [_component(evidence.profile, name) for name in dict.fromkeys((component, *with_))]
        outside = [part["name"].text() for part in counted if part["phase"].value != "forward"]
        if outside:
            raise NoEvidence(f"profile.json has {', '.join(outside)} outside the forward pass")
        times = [p["ms"]["p50"].number() for p in forward]
        if min(times) < 0:
            raise NoEvidence("profile.json has a component that took less than no time")
        found = sum(p["ms"]["p50"].positive() for p in counted) / sum(times)
        return Finding(holds=found >= share, found=f"{label} {found:.2f} of forward (at least {share:.2f})")

    text = f"{label} takes at least {share:.0%} of the forward pass"
    return Claim(name=f"share of {component}", text=text, holds=holds)


def pair_ratio_at_least(component: str, ratio: float) -> Claim:
    """`component` may be "step", the whole of it."""

    def holds(evidence: Evidence) -> Finding:
        pair = evidence.pair
        hot, cold = pair["hot"], pair["cold"]
        found = _ms(cold, component) / _ms(hot, component)
        stated = pair["ratio"][component].number()
        against = [*_unequal_work(hot, cold, component)]
        if pair["ids"]["cold"].positive() <= pair["ids"]["hot"].positive():
            against.append("pair.json: the cold arm draws from no more ids than the hot one")
        if not math.isclose(stated, found, rel_tol=MEASURED_SAME):
            against.append(f"pair.json states a ratio of {stated:.6g}, its arms give {found:.6g}")
        shown = f"{component} {found:.2f} times as long cold as hot (at least {ratio:g})"
        return _finding(against if found >= ratio else [*against, shown], shown)

    text = f"{component} takes at least {ratio:g} times as long on cold rows, at equal work"
    return Claim(name=f"cold over hot: {component}", text=text, holds=holds)


def _ms(profile: Part, component: str) -> float:
    return (profile["step_ms"] if component == "step" else _component(profile, component)["ms"])["p50"].positive()


def _unequal_work(hot: Part, cold: Part, component: str) -> Iterator[str]:
    if hot["device"].text() != cold["device"].text():
        yield "the arms ran on different devices"
    counts = [(hot["batch_size"], cold["batch_size"]), (hot["ids"]["lookups"], cold["ids"]["lookups"])]
    if component != "step":
        # Not the bytes: they count different rows, and how many of those there are is what the arms differ in.
        one, other = _component(hot, component)["flops"], _component(cold, component)["flops"]
        if (one.value, other.value) == (None, None):
            raise NoEvidence(f"pair.json counts no work of {component}")
        counts.append((one, other))
    for here, there in counts:
        if not math.isclose(here.number(), there.number(), rel_tol=WORK_SAME):
            yield f"{here.place} is {here.value}, cold it is {there.value}"


def loss_falls(by: float) -> Claim:
    def holds(evidence: Evidence) -> Finding:
        falls = {seed: _fall(evidence.losses(seed)) for seed in evidence.seeds()}
        least = min(falls, key=lambda seed: falls[seed])
        found = f"by {falls[least]:.4g} in seed {least}, the least of {len(falls)} (at least {by:g})"
        return Finding(holds=falls[least] >= by, found=found)

    return Claim(name="loss", text=f"the loss falls by at least {by:g} with every seed", holds=holds)


def _fall(losses: list[float]) -> float:
    ends = max(1, round(LOSS_ENDS * len(losses)))
    return statistics.fmean(losses[:ends]) - statistics.fmean(losses[-ends:])
