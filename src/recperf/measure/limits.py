"""Names what limits a step from its shares, says how sure that is and why. Torch-free."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from ..units import number, percent, size, time
from .attribution import TOO_LOW, attribute, divided_ms
from .ceilings import Ceilings, ceilings_of_profile
from .peaks.other_work import DISTURBED

TEXTS: dict[str, dict[str, str]] = tomllib.loads(files(__package__).joinpath("limits.toml").read_text(encoding="utf-8"))
UNCLEAR, NOT_JUDGED = "unclear", "not judged"
UNDECIDED = (UNCLEAR, NOT_JUDGED)
BY_DEVICE = ("transfer", "compute", "bandwidth", "latency", "cache", "operator")
"""Limits whose time the clock of a GPU tells, whatever else the processor does."""
CLEAR = 0.3
"""The largest share must reach this to be a verdict."""
LEAD = 0.2
"""By how much it must lead the second for a high confidence."""
NOTICEABLE = 0.1
"""Smaller shares are not mentioned."""
DRIFT = 1.5
"""Traced steps may take this many times the plain ones, or the other way round, for a high confidence."""


@dataclass(frozen=True)
class Verdict:
    """What limits a step."""

    limit: str
    """One of the limits, "unclear", or "not judged" beside too much other work."""
    share: float
    """Its share of the step; of an unclear step, or one that is not judged, the largest one."""
    confidence: str
    """high, medium or low."""
    because: list[str]
    """Sentences with the figures that led to it."""
    doubts: list[str] = field(default_factory=list)
    """What lowers the confidence."""
    second: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    attribution: dict[str, Any],
    observed: dict[str, Any],
    ceilings: Ceilings | None,
    experiments: list[dict[str, Any]] | None = None,
) -> Verdict:
    """The largest share is the verdict."""
    shares = attribution["shares"]
    ordered = sorted(shares, key=lambda limit: -shares[limit])
    first, second = ordered[0], ordered[1]
    doubts = _doubts(shares, first, second, observed, ceilings)
    by_name = sum(row["limits"].get(first, 0.0) for row in attribution["operators"] if row.get("by_name"))
    if first != "dispatch" and by_name > 0.5 * sum(row["limits"].get(first, 0.0) for row in attribution["operators"]):
        doubts.append("kernels of a CUDA graph have no counted work and are classed by their names")
    doubts += _contradictions(experiments or [])
    confidence = ("high", "medium", "low")[min(2, len(doubts))]
    because = [
        _sentence(limit, attribution, observed, ceilings) for limit in ordered[:3] if shares[limit] >= NOTICEABLE
    ]
    if experiments is not None and not any(_ran(row) for row in experiments):
        because.append("No experiment: the step was not run again.")
    others = observed.get("other_work") or 0.0
    if others > DISTURBED and not _preemption_removed(observed, first):
        known = [f"{limit} {percent(shares[limit])}" for limit in ("input", "blocked", "python")]
        reason = (
            f"Other work used {others:.0%} of the cores, so operators took longer than they do alone. Shares of the "
            f"step that do not depend on it: {', '.join(known)}."
        )
        reason += " Measure again while nothing else runs, or with one thread: how long one waits for a core is known."
        return Verdict(NOT_JUDGED, shares[first], "low", [reason], doubts, None)
    if observed["waits"].get("unknown") and first == "operator":
        reason = f"No step was traced: what takes {shares[first]:.0%} of the step is not known. A longer run may help."
        return Verdict(UNCLEAR, shares[first], "low", [reason, *because[1:]], doubts, None)
    if shares[first] < CLEAR:
        reason = (
            f"No limit reaches {CLEAR:.0%} of the step. The nearest are {first} ({shares[first]:.0%}) and "
            f"{second} ({shares[second]:.0%})."
        )
        return Verdict(UNCLEAR, shares[first], "low", [reason, *because], doubts, second)
    return Verdict(first, shares[first], confidence, because, doubts, second if shares[second] >= NOTICEABLE else None)


def _preemption_removed(observed: dict[str, Any], limit: str) -> bool:
    """Whether the share of a limit was measured without the time in which other work had the cores: by the clock of
    a GPU, or by those of the only thread that ran operators."""
    if observed.get("device", "cpu") != "cpu":
        return limit in BY_DEVICE
    return observed.get("threads") == 1 and observed.get("preempted") is not None


def _ran(experiment: dict[str, Any]) -> bool:
    return bool(experiment.get("outcome", "not run") != "not run")


def _contradictions(experiments: list[dict[str, Any]]) -> list[str]:
    """The doubts that experiments raise: one for each that disagrees, or one where none of those that ran agrees."""
    ran = [row for row in experiments if _ran(row)]
    doubts = [
        f'the experiment "{row["name"]}" disagrees: expected {row["expected"]}, measured {row["measured"]}'
        for row in ran
        if row["outcome"] == "disagrees"
    ]
    if ran and not doubts and not any(row["outcome"] == "agrees" for row in ran):
        doubts = ["no experiment told this limit from the next one"]
    return doubts


def verdict_of(profile: dict[str, Any], peaks: dict[str, Any] | None) -> dict[str, Any]:
    """`shares` and `verdict` of a profile of a workload, from what was observed; the same for anyone who has both."""
    observed, ceilings = profile["observed"], ceilings_of_profile(profile, peaks)
    attribution = attribute(observed, ceilings)
    verdict = decide(attribution, observed, ceilings, profile.get("experiments")).as_json()
    verdict["because"] += filter(None, [ranks_sentence(profile.get("communication")), tables_sentence(profile)])
    return {"shares": attribution["shares"], "verdict": verdict}


def ranks_sentence(communication: dict[str, Any] | None) -> str:
    """The slowest rank and what waiting costs; empty for a single rank."""
    if not communication or "each" not in communication:
        return ""
    own = {row["rank"]: row["own_ms"] for row in communication["each"]}
    slowest = own.pop(communication["slowest"])
    others = sum(own.values()) / len(own)
    exposed = percent(communication["exposed_share"])
    margin = ", by less than 5%" if slowest < 1.05 * others else ""
    split = ""
    if communication["late_ms"] is not None:
        late, moving = communication["late_ms"], communication["moving_ms"]
        split = f": {time(late)} for a late rank, {time(moving)} for data transfer"
    return (
        f"Rank {communication['slowest']} of {communication['ranks']} is the slowest{margin}: its own work takes "
        f"{time(slowest)} per step, that of the others {time(others)}. Exposed communication: ranks wait in "
        f"collectives for {exposed} of a step, {time(communication['exposed_ms'])}{split}."
    )


def tables_sentence(profile: dict[str, Any]) -> str:
    """What moved between the tiers of tables and how long steps waited for it; empty where they lie on the device."""
    tables = profile.get("tables")
    if not tables:
        return ""
    moved, seconds = tables["fetched_bytes"] + tables["written_back_bytes"], tables["placing_ms"] / 1e3
    rate = f", {size(moved / seconds)}/s" if moved and seconds else ""
    step = profile["step_ms"]["p50"]
    place = {"host": "host memory", "file": "files"}[tables["placement"]]
    text = (
        f"Tables in {place}: the cache of {size(tables['cache_bytes'])} held {tables['hit_rate']:.1%} of the "
        f"{tables['rows']:,.0f} rows of a batch; {size(tables['fetched_bytes'])} a step were fetched and "
        f"{size(tables['written_back_bytes'])} written back in {time(tables['placing_ms'])}{rate}, beside the step, "
        f"which waited {time(tables['exposed_ms'])} for its batch."
    )
    if min(tables["exposed_ms"], tables["placing_ms"]) > NOTICEABLE * step:
        text += " A larger cache (--tables.device-bytes, on a CPU --tables.resident) would move less."
    if process := tables.get("process"):
        own, files, peak = (size(process[name]) for name in ("own", "files", "peak"))
        text += f" The process has {own} of its own in memory and {files} of libraries; at its peak it had {peak}."
    return text


def _doubts(
    shares: dict[str, float], first: str, second: str, observed: dict[str, Any], ceilings: Ceilings | None
) -> list[str]:
    doubts = []
    step = observed["step_ms"]
    spread = (step["p80"] - step["p20"]) / (2 * step["p50"]) if step["p50"] else 0.0
    lead = shares[first] - shares[second] - spread * shares[first]
    if lead < LEAD:
        doubts.append(
            f"{first} leads {second} by only {shares[first] - shares[second]:.2f} of a step; steps vary by {spread:.0%}"
        )
    if "other_work" not in observed:
        doubts.append("a trace does not tell whether other work disturbed the steps")
    elif (observed["other_work"] or 0.0) > DISTURBED:
        doubts.append(f"other work used {observed['other_work']:.0%} of the cores")
    elif observed.get("crowded", 0.0) > DISTURBED:
        doubts.append(f"worker processes used {observed['crowded']:.0%} of the cores, which operators need as well")
    elif (observed.get("preempted") or 0.0) > DISTURBED:
        doubts.append(f"the thread of the step waited for a core for {observed['preempted']:.0%} of the time")
    if ceilings is None and observed["operators"]:
        doubts.append("the ceilings of this device were not measured")
    elif ceilings is not None and ceilings.other_work > DISTURBED:
        doubts.append(f"other work used {ceilings.other_work:.0%} of the cores while the ceilings were measured")
    scale = observed.get("scale")
    if scale and not 1 / DRIFT <= scale <= DRIFT:
        doubts.append(f"the machine changed while it was measured: plain steps took {scale:.2f} times the traced ones")
    return doubts


def _sentence(limit: str, attribution: dict[str, Any], observed: dict[str, Any], ceilings: Ceilings | None) -> str:
    share, native = attribution["shares"][limit], observed.get("native") or {}
    text = TEXTS[limit]["sentence"]
    if limit == "python" and native.get("share", 0.0) > 0.5:
        text = TEXTS[limit]["native"].replace("{modules}", ", ".join(native["modules"][:3]) or "of other libraries")
    return text.format(share=percent(share), detail=_detail(limit, attribution, observed, ceilings))


def _detail(limit: str, attribution: dict[str, Any], observed: dict[str, Any], ceilings: Ceilings | None) -> str:
    """A clause with the operator that matters most and its rate."""
    if limit in ("input", "blocked", "python", "launch", "sync", "transfer"):
        step = divided_ms(observed)
        return f": {time(attribution['shares'][limit] * step)} of {time(step)}"
    rows = [row for row in attribution["operators"] if row["limits"].get(limit)]
    if not rows:
        return ""
    if limit == "dispatch":
        kernels = sum(row.get("kernels") or 0 for row in attribution["operators"])
        if kernels and ceilings is not None:
            floor = time(ceilings.kernel_ns / 1e6)
            return f": {kernels:,.0f} kernels, each of which costs at least {floor} whatever it computes"
        calls = sum(row["calls"] for row in attribution["operators"])
        return f": {calls:,.0f} operator calls"
    row, share = _busiest(rows, limit)
    seconds = row["ms"] / 1e3
    text = f", {percent(share)} of it in {row['name']}"
    if ceilings is None or not seconds:
        return text
    if limit == "compute" and row["flops"]:
        precision = row["precision"] or "float32"
        ceiling = ceilings.flops.get(precision) or ceilings.flops["float32"]
        text += (
            f", which computes {number(row['flops'] / seconds)}FLOP/s where this machine reaches "
            f"{number(ceiling)}FLOP/s in {precision}{_threads(ceilings)}"
        )
        faster = [f"{number(ceilings.flops[name])}FLOP/s in {name}" for name in ceilings.faster(precision)[:1]]
        text += f", {faster[0]}" if faster else ", and no more in a lower precision"
    elif limit in ("bandwidth", "latency") and row["missed"]:
        width = row["row_bytes"]
        ceiling, share = ceilings.row_ns(width) / 1e6, ceilings.latency_share(width)
        text += (
            f": {row['missed']:,.0f} of {row['rows']:,.0f} random rows of {width} bytes come from memory, at "
            f"{time(row['ms'] / row['rows'])} a row (memory: {time(ceiling)}, of which {time(share * ceiling)} "
            f"whatever the width and {time((1 - share) * ceiling)} for the bytes)"
        )
    elif limit == "bandwidth" and row["bytes"]:
        text += f", at {number(row['bytes'] / seconds)}B/s where this machine streams {number(ceilings.stream)}B/s"
        text += f"; {TOO_LOW}" if TOO_LOW in row["note"] else ""
    elif limit == "operator":
        text += f" ({time(row['ms'])}, far below every ceiling)"
    return text


def _busiest(rows: list[dict[str, Any]], limit: str) -> tuple[dict[str, Any], float]:
    """The operator with most of a limit's time, over all of its rows that this limit explains, and its share."""
    by_name: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        by_name[row["name"]] += row["limits"][limit]
    name = max(by_name, key=lambda name: by_name[name])
    same = [row for row in rows if row["name"] == name and row["limits"][limit] >= 0.5 * row["ms"]]
    same = same or [max((row for row in rows if row["name"] == name), key=lambda row: row["limits"][limit])]
    largest = max(same, key=lambda row: row["ms"])
    alike = [row for row in same if all(row[fact] == largest[fact] for fact in ("precision", "row_bytes"))]
    summed = {key: sum(row[key] for row in alike) for key in ("ms", "calls", "flops", "bytes", "rows", "missed")}
    return {**largest, **summed}, by_name[name] / max(1e-12, sum(by_name.values()))


def _threads(ceilings: Ceilings) -> str:
    return f" with {ceilings.threads} thread{'s' if ceilings.threads > 1 else ''}" if ceilings.device == "cpu" else ""
