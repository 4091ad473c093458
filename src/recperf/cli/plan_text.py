"""A plan as plain values and as text."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..plan.advice import Arrivals, Limit
from ..plan.predict import PARTS, Choices, Prediction
from ..units import number, size
from .terminal import table


def prediction(found: Prediction, choices: Choices) -> dict[str, Any]:
    memory = found.memory
    rank = memory.fullest
    return {
        "ranks": found.ranks,
        "rank_batch": found.rank_batch,
        "global_batch": found.global_batch,
        "seconds": found.seconds,
        "samples_per_s": found.samples_per_s,
        "parts": found.parts,
        "exposed": found.exposed,
        "memory": {
            "verdict": memory.verdict,
            "fullest_rank": rank,
            "moment": memory.moment,
            "blamed": memory.blamed,
            "bytes": memory.most,
            "apart_bytes": memory.apart,
            "limit_bytes": memory.limit,
            "device_bytes": memory.device_bytes,
            "parts": {name: float(bytes_R[rank]) for name, bytes_R in memory.parts_R.items()},
            "parts_least": {name: float(bytes_R.min()) for name, bytes_R in memory.parts_R.items()},
            "parts_mean": {name: float(bytes_R.mean()) for name, bytes_R in memory.parts_R.items()},
            "by_rank": [float(bytes_) for bytes_ in memory.total_R],
        },
        "tables": [
            {
                "name": one.table.name,
                "kind": one.kind,
                "ranks": int(np.count_nonzero(one.width_R)),
                "bytes": one.table.bytes,
                "most_bytes_a_rank": int(one.weight_R.max()),
                "why": one.why,
            }
            for one in found.placed
        ],
        "choices": {
            "a2a": choices.wire,
            "codec": choices.codec,
            "dedup": choices.dedup,
            "pipelined": choices.pipelined,
            "overlapped": choices.overlapped,
        },
        "origins": found.origins,
    }


def skew(arrivals: list[Arrivals], limits: list[Limit], ranks: int) -> dict[str, Any]:
    return {
        "arrivals": [{**vars(one), "ratio": one.ratio} for one in arrivals],
        "limits": [{**vars(one), "global_batch": one.rank_batch * ranks} for one in limits],
    }


def with_scaling(point: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """With what a device does beside what it does at the first number of ranks."""
    each, of_first = (one["samples_per_s"] / one["ranks"] for one in (point, first))
    return {**point, "scaling": each / of_first}


def as_text(found: dict[str, Any]) -> str:
    points = found["points"]
    lines = [f"{found['workload']} on {found['device']}, network {found['network']}", ""]
    if len(points) > 1:
        lines += [table(_overview(found)), ""]
        if any(_doubt(point["target"]) for point in points):
            lines += ["  ~ samples to the target are extrapolated beyond the published batch sizes", ""]
        unfit = [point for point in points if point["memory"]["verdict"] != "fits"]
        for point in unfit:
            lines += [f"  {point['ranks']:,} ranks: {_verdict(point['memory'])}"]
        told = next((p for p in points if p["memory"]["verdict"] == "fits"), points[0])
        lines += ["", f"in detail, at {told['ranks']:,} ranks"]
    else:
        told = points[0]
    return "\n".join([*lines, *_detail(told, found["currency"])])


def _overview(found: dict[str, Any]) -> list[list[str]]:
    rows = [["ranks", "global batch", "step", "samples/s", "scaling", "to target", "cost", "fullest rank", "memory"]]
    for point in found["points"]:
        reached = point["target"]
        rows.append(
            [
                f"{point['ranks']:,}",
                f"{point['global_batch']:,}",
                _ms(point["seconds"]),
                f"{point['samples_per_s']:,.0f}",
                f"{point['scaling']:.0%}",
                f"{_doubt(reached)}{reached['hours']:.2f} h" if reached else "-",
                _money(reached, found["currency"]),
                size(point["memory"]["bytes"]),
                point["memory"]["verdict"],
            ]
        )
    return rows


def _detail(point: dict[str, Any], currency: str | None) -> list[str]:
    lines = [
        f"  {point['ranks']:,} ranks, {point['rank_batch']:,} samples each, {point['global_batch']:,} in all: "
        f"{_ms(point['seconds'])} a step, {point['samples_per_s']:,.0f} samples/s",
        *_reached(point["target"], currency),
        "",
        "one step",
        table(_parts(point)),
        "",
        f"memory: {_verdict(point['memory'])}",
        table(_memory(point["memory"])),
        "",
        "tables",
        table(
            [["table", "sharding", "ranks", "bytes", "most on a rank", "why"]]
            + [
                [t["name"], t["kind"], f"{t['ranks']:,}", size(t["bytes"]), size(t["most_bytes_a_rank"]), t["why"]]
                for t in point["tables"]
            ]
        ),
    ]
    if "skew" in point:
        lines += _skewed(point["skew"])
    if point["failures"]:
        lines += _failing(point["failures"])
    return [*lines, "", "where the figures come from", *(f"  {k:<14} {v}" for k, v in point["origins"].items())]


def _reached(reached: dict[str, Any] | None, currency: str | None) -> list[str]:
    if reached is None:
        return ["  samples to the quality target are not known here: --samples-to-target"]
    paid = f", {_money(reached, currency)}" if reached["cost"] is not None else ""
    return [
        f"  {number(reached['samples'])} samples to the target ({reached['origin']}): {reached['hours']:.2f} h of "
        f"training{paid}, evaluations and starting up not counted"
    ]


def _parts(point: dict[str, Any]) -> list[list[str]]:
    rows = [["part", "by itself", "exposed", "share", "what"]]
    for name, seconds in point["parts"].items():
        left = point["exposed"][name]
        rows.append([name, _ms(seconds), _ms(left), f"{left / point['seconds']:.1%}", PARTS[name]])
    return rows


def _memory(memory: dict[str, Any]) -> list[list[str]]:
    rows = [["part", f"rank {memory['fullest_rank']}, the fullest", "mean", "least"]]
    for name, bytes_ in memory["parts"].items():
        rows.append([name, size(bytes_), size(memory["parts_mean"][name]), size(memory["parts_least"][name])])
    totals = memory["by_rank"]
    rows.append(["total", size(memory["bytes"]), size(sum(totals) / len(totals)), size(min(totals))])
    return rows


def _verdict(memory: dict[str, Any]) -> str:
    said = (
        f"{memory['verdict']}: rank {memory['fullest_rank']} holds {size(memory['bytes'])} in its fullest moment "
        f"({memory['moment']}), {size(memory['apart_bytes'])} if nothing is used twice; "
        f"{size(memory['limit_bytes'])} of {size(memory['device_bytes'])} may be used"
    )
    if memory["verdict"] == "fits":
        return said
    said += f"; most of it {memory['blamed']}"
    helps = [f"{one['words']} ({size(one['bytes'])}, {size(one['apart_bytes'])})" for one in memory["remedies"]]
    return said + (f"\n  would fit: {'; or '.join(helps)}" if helps else "\n  no override of sharding helps")


def _skewed(found: dict[str, Any]) -> list[str]:
    rows = [["table", "sharding", "dedup", "mean of ranks", "worst rank, worst batch", "worst / mean", "rank"]]
    for one in found["arrivals"]:
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
    ends = [["tables with the data's ids", "global batch that fits", "then too much of"]]
    for one in found["limits"]:
        more = "" if one["table"] else "more than "
        ends.append([one["words"], f"{more}{one['global_batch']:,}", one["table"] or "-"])
    return ["", "skew: bytes that reach a rank, each way", table(rows), "", "where memory ends", table(ends)]


def _failing(found: dict[str, Any]) -> list[str]:
    rows = [["interval", "goodput", "p20 to p80", "by the formula", "failures"]]
    for name in ("chosen", "best"):
        one = found[name]
        rows.append(
            [
                f"{one['interval_s']:,.0f} s {'(best found)' if name == 'best' else '(planned)'}",
                f"{one['mean']:.1%}",
                f"{one['low']:.1%} to {one['high']:.1%}",
                f"{one['expected']:.1%}",
                f"{one['failures']:,.1f}",
            ]
        )
    return [
        "",
        f"failures: one in {found['mtbf_s'] / 3600:,.2f} h, checkpoints of {found['checkpoint_s']:g} s, restarts of "
        f"{found['restart_s']:g} s, {found['work_s'] / 3600:,.2f} h of work, {found['seeds']} seeds; "
        f"sqrt(2 C M) is {found['young_s']:,.0f} s",
        table(rows),
    ]


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:,.1f} ms" if ms >= 0.05 or not ms else f"{ms:.2g} ms"


def _doubt(reached: dict[str, Any] | None) -> str:
    return "~" if reached and "extrapolated" in reached["origin"] else ""


def _money(reached: dict[str, Any] | None, currency: str | None) -> str:
    if not reached or reached["cost"] is None:
        return "-"
    return f"{reached['cost']:,.2f}{' ' + currency if currency else ''}"
