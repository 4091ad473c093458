"""A plan as text."""

from __future__ import annotations

from typing import Any

from ..measure.limits import TEXTS
from ..plan.predict import PARTS
from ..units import number, size
from .terminal import table


def as_text(plan: dict[str, Any]) -> str:
    points, currency = plan["points"], plan["currency"]
    lines = [f"{plan['workload']} on {plan['device']}, network {plan['network']}", ""]
    if len(points) == 1:
        return "\n".join([*lines, *_details(points[0], currency)])
    lines += [table(_overview(points, currency)), ""]
    if any(_extrapolated(point["target"]) for point in points):
        lines += ["  ~ samples to the target are extrapolated beyond the published batch sizes", ""]
    lines += [
        f"  {point['ranks']:,} ranks: {_verdict(point['memory'])}"
        for point in points
        if point["memory"]["verdict"] != "fits"
    ]
    shown = next((point for point in points if point["memory"]["verdict"] == "fits"), points[0])
    return "\n".join([*lines, "", f"details for {shown['ranks']:,} ranks", *_details(shown, currency)])


def _overview(points: list[dict[str, Any]], currency: str | None) -> list[list[str]]:
    rows = [["ranks", "global batch", "step", "samples/s", "scaling", "to target", "cost", "fullest rank", "memory"]]
    for point in points:
        reached = point["target"]
        rows.append(
            [
                f"{point['ranks']:,}",
                f"{point['global_batch']:,}",
                _time(point["seconds"]),
                f"{point['samples_per_s']:,.0f}",
                f"{point['scaling']:.0%}",
                f"{'~' if _extrapolated(reached) else ''}{reached['hours']:.2f} h" if reached else "-",
                _money(reached, currency),
                size(point["memory"]["bytes"]),
                point["memory"]["verdict"],
            ]
        )
    return rows


def _details(point: dict[str, Any], currency: str | None) -> list[str]:
    lines = [
        f"  {point['ranks']:,} ranks with {point['rank_batch']:,} samples each, global batch {point['global_batch']:,}"
        f": {_time(point['seconds'])} per step, {point['samples_per_s']:,.0f} samples/s steady",
        *_to_target(point["target"], currency),
        "",
        "one step",
        table(_parts(point)),
        f"  {_limit(point)}",
        "",
        f"memory: {_verdict(point['memory'])}",
        table(_memory(point["memory"])),
        *_tiers(point.get("tiers")),
        "",
        "tables",
        table(
            [["table", "sharding", "ranks", "size", "most on a rank", "why"]]
            + [
                [t["name"], t["kind"], f"{t['ranks']:,}", size(t["bytes"]), size(t["most_bytes_a_rank"]), t["why"]]
                for t in point["tables"]
            ]
        ),
    ]
    if "skew" in point:
        lines += _skew(point["skew"])
    if point["failures"]:
        lines += _failures(point["failures"])
    return [*lines, "", "sources of the figures", *(f"  {k:<14} {v}" for k, v in point["origins"].items())]


def _to_target(reached: dict[str, Any] | None, currency: str | None) -> list[str]:
    if reached is None:
        return ["  time to the quality target is not known: set --samples-to-target"]
    cost = f", {_money(reached, currency)}" if reached["cost"] is not None else ""
    return [
        f"  {number(reached['samples'])} samples to the quality target: {reached['hours']:.2f} h of training{cost}, "
        f"without start-up and evaluation",
        f"  ({reached['origin']})",
    ]


def _parts(point: dict[str, Any]) -> list[list[str]]:
    rows = [["part", "alone", "exposed", "share", "what"]]
    for name, seconds in point["parts"].items():
        left = point["exposed"][name]
        rows.append([name, _time(seconds), _time(left), f"{left / point['seconds']:.1%}", PARTS[name]])
    return rows


def _limit(point: dict[str, Any]) -> str:
    """What limits the step: the largest share, in the words of a profile."""
    limit = point["limit"]
    return f"{limit}: " + TEXTS[limit]["sentence"].format(share=f"{point['shares'][limit]:.0%}", detail="")


def _memory(memory: dict[str, Any]) -> list[list[str]]:
    rows = [["part", f"rank {memory['fullest_rank']} (fullest)", "mean", "least"]]
    for name, bytes_ in memory["parts"].items():
        rows.append([name, size(bytes_), size(memory["parts_mean"][name]), size(memory["parts_least"][name])])
    totals = memory["by_rank"]
    rows.append(["total", size(memory["bytes"]), size(sum(totals) / len(totals)), size(min(totals))])
    return rows


def _verdict(memory: dict[str, Any]) -> str:
    text = (
        f"{memory['verdict']}: rank {memory['fullest_rank']} peaks at {size(memory['bytes'])} ({memory['phase']}), "
        f"{size(memory['without_reuse_bytes'])} if no memory is reused; {size(memory['limit_bytes'])} of "
        f"{size(memory['device_bytes'])} can be used"
    )
    if memory["verdict"] == "fits":
        return text
    text += f"; the largest table there is {memory['largest_table']}"
    options = [
        f"{one['options']} ({size(one['bytes'])}, {size(one['without_reuse_bytes'])} without reuse)"
        for one in memory["remedies"]
    ]
    return text + (f"\n  fits with: {'; or '.join(options)}" if options else "\n  no other sharding makes it fit")


def _tiers(tiers: dict[str, Any] | None) -> list[str]:
    if tiers is None:
        return []
    room = f"{size(tiers['table_bytes'])} of rows beside a cache of {size(tiers['cache_bytes'])} on the device"
    lines = [
        "",
        f"tables in tiers: {room}, which serves {tiers['served']:.1%} of {tiers['rows_per_step']:,.0f} rows a step",
        f"  ({tiers['origin']})",
    ]
    rows = [["tables in", "moved each way", "time", "step", "samples/s", "limited by"]]
    for name, one in tiers["stores"].items():
        moving = max(seconds for part, seconds in one["parts"].items() if part != "the device")
        step = (_time(one["seconds"]), f"{one['samples_per_s']:,.0f}", one["limit"])
        rows.append([name, size(one["bytes_each_way"]), _time(moving), *step])
    return [*lines, table(rows)] if tiers["stores"] else lines


def _skew(skew: dict[str, Any]) -> list[str]:
    rows = [["table", "sharding", "dedup", "mean of ranks", "worst rank and batch", "worst / mean", "rank"]]
    for one in skew["arrivals"]:
        rows.append(
            [
                one["table"],
                one["kind"],
                "on" if one["dedup"] else "off",
                size(one["mean"]),
                size(one["worst"]),
                f"{one['ratio']:.1f} x",
                str(one["rank"]),
            ]
        )
    limits = [["tables with skewed ids", "largest global batch that fits", "limited by"]]
    for one in skew["limits"]:
        more = "" if one["table"] else "more than "
        limits.append([one["sharding"], f"{more}{one['global_batch']:,}", one["table"] or "-"])
    return ["", "skew: data received by a rank in a step", table(rows), "", "largest batch", table(limits)]


def _failures(failures: dict[str, Any]) -> list[str]:
    rows = [["checkpoint every", "goodput", "p20 to p80", "by the formula", "failures"]]
    for name, label in (("chosen", "planned"), ("best", "best found")):
        one = failures[name]
        rows.append(
            [
                f"{_time(one['interval_s'])} ({label})",
                f"{one['mean']:.1%}",
                f"{one['low']:.1%} to {one['high']:.1%}",
                f"{one['expected']:.1%}",
                f"{one['failures']:,.1f}",
            ]
        )
    return [
        "",
        f"failures: one per {_time(failures['mtbf_s'])}, checkpoints of {_time(failures['checkpoint_s'])}, restarts of "
        f"{_time(failures['restart_s'])}, {_time(failures['work_s'])} of training, {failures['seeds']} simulated runs; "
        f"sqrt(2 C M) is {_time(failures['young_s'])}",
        table(rows),
    ]


def _time(seconds: float) -> str:
    """Seconds in the unit a person would use."""
    for unit, least in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{seconds / least:,.1f} {unit}"
    return f"{seconds * 1e6:,.1f} µs" if seconds else "0"


def _extrapolated(reached: dict[str, Any] | None) -> bool:
    return reached is not None and "extrapolated" in reached["origin"]


def _money(reached: dict[str, Any] | None, currency: str | None) -> str:
    if not reached or reached["cost"] is None:
        return "-"
    return f"{reached['cost']:,.2f}{' ' + currency if currency else ''}"
