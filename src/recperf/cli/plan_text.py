"""A plan as text: what to do, then the numbers of ranks, then the details."""

from __future__ import annotations

import re
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from ..measure.limits import TEXTS
from ..plan.predict import PARTS
from ..units import number, size
from .terminal import table

WIDTH = 110
"""Longest text of a line of the advice."""


def as_text(plan: dict[str, Any]) -> str:
    """Advice and the rest are two empty lines apart."""
    points, currency = plan["points"], plan["currency"]
    preset = f" --preset {plan['preset']}" if plan["preset"] else ""
    lines = [f"{plan['workload']}{preset} on {plan['device']}, network {plan['network']}", "", *_advice(plan), "", ""]
    lines += [table(_overview(points, currency))]
    if any(point["target"] and point["target"]["extrapolated"] for point in points):
        lines += ["  ~ samples to the target are extrapolated beyond the published batch sizes"]
    shown = plan["advice"]["configuration"] or points[-1]
    lines += ["", f"details for {_count(shown['ranks'], 'rank')}", *_details(shown, plan["advice"]["tiers"])]
    return "\n".join(lines)


def _advice(plan: dict[str, Any]) -> list[str]:
    advice = plan["advice"]
    advised = advice["configuration"]
    lines = [_too_few(plan)] if advised is None else [_smallest(plan, advised), *_rows(_facts(plan, advised))]
    return lines + _rows(_alternative(plan) if advice["tiers"] and advice["tiers"]["stores"] else {})


def _device(plan: dict[str, Any], count: int) -> str:
    """What there are several of: devices, or ranks that share one."""
    if plan["device"] == "cpu":
        return "rank" if count == 1 else "ranks"
    return str(plan["device"])


def _too_few(plan: dict[str, Any]) -> str:
    """What to do where no number of ranks fits."""
    points = plan["points"]
    text = f"No number of {_device(plan, 2)} up to {plan['advice']['tried_ranks']:,} is enough"
    smaller = next((point for point in points if point["memory"]["largest_global_batch"]), None)
    if smaller is None:
        return f"{text}: choose a device with more memory."
    options = f"--train.batch-size {smaller['memory']['largest_global_batch']}"
    return f"{text} for {smaller['rank_batch']:,} samples on each; {smaller['ranks']:,} are with {options}."


def _alternative(plan: dict[str, Any]) -> dict[str, str]:
    """One device, with its tables elsewhere."""
    tiers = plan["advice"]["tiers"]
    host, file = (tiers["stores"][name] for name in ("host", "file"))
    target = f", {_reached(host['target'], plan['currency'])} to the target" if host["target"] else ""
    memory = f"{size(tiers['table_bytes'])} of host memory"
    return {
        "or": f"1 {plan['device']} with its tables in {memory}: {_band_time(host['step'])} a step{target}; "
        f"in files {_band_time(file['step'])} a step",
        "": f"recperf {plan['command']} --train.batch-size {tiers['rank_batch']} --tables.placement host",
    }


def _smallest(plan: dict[str, Any], advised: dict[str, Any]) -> str:
    """Which number of devices to use."""

    def devices(ranks: int, what: str, name: str = "") -> str:
        return f"{ranks:,}{name} {'is' if ranks == 1 else 'are'} {what}"

    tried = [point["ranks"] for point in plan["points"]]
    fewer = max((ranks for ranks in tried if ranks < advised["ranks"]), default=None)
    name = f" {_device(plan, advised['ranks'])}" + (f" on {advised['nodes']:,} nodes" if advised["nodes"] > 1 else "")
    options = f" with {advised['options']}" if advised["options"] else ""
    enough = devices(advised["ranks"], f"enough{options}{_if_ids_repeat(plan, advised)}", name)
    return f"{enough}." if fewer is None else f"{enough}; {devices(fewer, 'too few')}."


def _if_ids_repeat(plan: dict[str, Any], advised: dict[str, Any]) -> str:
    """What the number of devices depends on."""
    advice = plan["advice"]
    if advice["fits_worse_ids"] is not False:
        return ""
    more = advice["worse_ranks"] or 0
    return " if ids repeat as published" + (f", {more:,} if they do not" if more > advised["ranks"] else "")


def _facts(plan: dict[str, Any], advised: dict[str, Any]) -> dict[str, str]:
    step, reached, memory = advised["step"], advised["target"], advised["memory"]
    facts = {
        "run": _command(plan, advised),
        "step": f"{_band_time(step)}, {_rate(advised)} samples/s",
        "memory": f"{_memory_band(memory)} of {size(memory['limit_bytes'])} on the fullest rank",
        **_worse_ids(plan, advised),
        "target": "not known: set --samples-to-target",
        "cost": "not known: set --price, for example 4USD for one device and hour",
    }
    if reached:
        samples = _band_number(reached["samples"])
        parts = [f"{_time(reached['steps_seconds'])} of steps"]
        if reached["evaluations"]:
            evaluations = _count(round(reached["evaluations"]), "evaluation")
            parts.append(f"{_time(reached['evaluations_seconds'])} of {evaluations}")
        parts.append(f"{_time(reached['startup_seconds'])} of start-up")
        data = f" of {plan['published_data']}" if plan["published_data"] else ""
        facts["target"] = f"{_band_time(reached['seconds'])} for {samples} samples{data}: {', '.join(parts)}"
        if reached["cost"]:
            facts["cost"] = _money(reached["cost"], plan["currency"])
    limit, exposed = step["limit"], step["exposed"]
    longest = max(exposed, key=lambda name: exposed[name])
    sentence = TEXTS[limit]["sentence"].format(share=f"{step['shares'][limit]:.0%}", detail="")
    facts["limit"] = f"{limit}: {sentence} The longest part is {longest}, {_time(exposed[longest])}."
    faster = [
        f"{one['options']}: {one['samples_per_s'] / step['samples_per_s']:.2f} times the samples/s, "
        f"{_band_time(one['step'])} a step"
        for one in plan["advice"]["changes"]
    ]
    tried = ", ".join(plan["advice"]["tried_options"])
    none = [f"none of {tried} makes it 2 % faster"] if tried else []
    changes = [*(faster or none), *_more_devices(plan, advised)]
    return {**facts, "change": "; ".join(changes)} if changes else facts


def _more_devices(plan: dict[str, Any], advised: dict[str, Any]) -> list[str]:
    """What the next larger number of devices brings."""
    larger = next((one for one in plan["points"] if one["ranks"] > advised["ranks"] and one["fits"]), None)
    if larger is None:
        return []
    if larger["step"]["samples_per_s"] < 1.02 * advised["step"]["samples_per_s"]:
        return [f"{larger['ranks']:,} {_device(plan, 2)} are no faster"]
    takes = f"train {larger['step']['samples_per_s']:,.0f} samples/s"
    if larger["target"]:
        takes = f"take {_reached(larger['target'], plan['currency'])} to the target"
    return [f"{larger['ranks']:,} {_device(plan, 2)} {takes}"]


def _rate(point: dict[str, Any]) -> str:
    """Samples per second and their range, to three digits."""
    rates = (point["global_batch"] / point["step"][bound] for bound in ("value", "high", "low"))
    value, low, high = (f"{float(f'{rate:.3g}'):,.0f}" for rate in rates)
    return f"{value} ({low} to {high})"


def _worse_ids(plan: dict[str, Any], advised: dict[str, Any]) -> dict[str, str]:
    if plan["advice"]["fits_worse_ids"] is not False:
        return {}
    enough, ranks = plan["advice"]["worse_ranks"], advised["ranks"]
    if enough is None:
        needs = f"no number up to {plan['advice']['tried_ranks']:,} would be enough"
    elif enough > ranks:
        needs = f"{ranks:,} would not be enough, {enough:,} would"
    else:
        needs = f"{ranks:,} would need another batch or sharding"
    independent = f"if they were drawn independently (--skew zipf:{plan['popularity']:g})"
    return {"ids": f"most repeat within a batch, as published; {independent}, {needs}"}


def _command(plan: dict[str, Any], advised: dict[str, Any]) -> str:
    """What starts this configuration."""
    run, ranks, nodes = plan["command"], advised["ranks"], advised["nodes"]
    for flag in re.findall(r"--[\w.-]+", advised["options"]):
        run = re.sub(rf" {re.escape(flag)}[ =]\S+", "", run)
    options = f" {advised['options']}" if advised["options"] else ""
    end = f" --train.batch-size {advised['global_batch']}{options}"
    if nodes > 1:
        # torchrun starts equally many ranks on each node.
        torchrun = f"torchrun --nnodes {nodes} --nproc-per-node {-(-ranks // nodes)}"
        return f"on each node (docs/launching.md): {torchrun} -m recperf {run}{end}"
    return f"recperf {run}{f' --ranks {ranks}' if ranks > 1 else ''}{end}"


def _rows(facts: dict[str, str]) -> list[str]:
    """A line each, and more where it is long; commands stay whole."""
    lines = []
    for name, text in facts.items():
        whole = name in ("run", "")
        parts = [text] if whole else wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += [f"  {label:<7} {part}" for label, part in zip_longest((name,), parts, fillvalue="")]
    return lines


def _overview(points: list[dict[str, Any]], currency: str | None) -> list[list[str]]:
    head = ["ranks", "global batch", "fullest rank", "step", "samples/s", "scaling", "to target", "cost", "fits with"]
    rows = [head]
    for point in points:
        memory, step, reached = point["memory"], point["step"], point["target"]
        row = [f"{point['ranks']:,}", f"{point['global_batch']:,}"]
        if step is None:
            batch = memory["largest_global_batch"]
            missing = f"needs {size(memory['missing_bytes'])} more on rank {memory['fullest_rank']}"
            row += [missing, "-", "-", "-", "-", "-", f"--train.batch-size {batch}" if batch else "no batch size"]
        else:
            extrapolated = "~" if reached and reached["extrapolated"] else ""
            row += [
                size(memory["without_reuse_bytes"]),
                _band_time(step),
                f"{step['samples_per_s']:,.0f}",
                f"{point['scaling']:.0%}",
                f"{extrapolated}{_band_time(reached['seconds'])}" if reached else "-",
                _money(reached["cost"], currency) if reached and reached["cost"] else "-",
                point["options"],
            ]
        rows.append(row)
    shown = [any(row[column] not in ("-", "") for row in rows[1:]) for column in range(len(head))]
    return [[cell for cell, visible in zip(row, shown) if visible] for row in rows]


def _details(point: dict[str, Any], tiers: dict[str, Any] | None) -> list[str]:
    lines = [f"  {_count(point['rank_batch'], 'sample')} on each, global batch {point['global_batch']:,}"]
    if point["target"]:
        lines.append(f"  samples to the target: {point['target']['origin']}")
    if point["step"]:
        lines += ["", "one step", table(_parts(point["step"]))]
    lines += [
        "",
        f"memory: {_verdict(point['memory'])}",
        table(_memory(point["memory"])),
        *_tiers(tiers),
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


def _parts(step: dict[str, Any]) -> list[list[str]]:
    rows = [["part", "alone", "exposed", "share", "what"]]
    for name, seconds in step["parts"].items():
        left = step["exposed"][name]
        rows.append([name, _time(seconds), _time(left), f"{left / step['value']:.1%}", PARTS[name]])
    return rows


def _memory(memory: dict[str, Any]) -> list[list[str]]:
    rows = [["part", f"rank {memory['fullest_rank']} (fullest)", "mean", "least"]]
    for name, bytes_ in memory["parts"].items():
        rows.append([name, size(bytes_), size(memory["parts_mean"][name]), size(memory["parts_least"][name])])
    totals = memory["by_rank"]
    rows.append(["total", size(memory["bytes"]), size(sum(totals) / len(totals)), size(min(totals))])
    return rows


def _memory_band(memory: dict[str, Any]) -> str:
    """With and without reuse of memory."""
    low, high = size(memory["bytes"]), size(memory["without_reuse_bytes"])
    return low if low == high else f"{low} to {high}"


def _verdict(memory: dict[str, Any]) -> str:
    return (
        f"{memory['verdict']}; rank {memory['fullest_rank']} peaks at {size(memory['bytes'])} ({memory['phase']}), "
        f"{size(memory['without_reuse_bytes'])} if no memory is reused, {size(memory['limit_bytes'])} of "
        f"{size(memory['device_bytes'])} can be used; its largest table is {memory['largest_table']}"
    )


def _tiers(tiers: dict[str, Any] | None) -> list[str]:
    if tiers is None:
        return []
    room = f"{size(tiers['table_bytes'])} of rows beside a cache of {size(tiers['cache_bytes'])}"
    lines = [
        "",
        f"tables in tiers on one device: {room}, which serves {tiers['served']:.1%} of "
        f"{tiers['rows_per_step']:,.0f} rows a step",
        f"  ({tiers['origin']})",
    ]
    rows = [["tables in", "moved each way", "time", "step", "samples/s", "limited by"]]
    for name, one in tiers["stores"].items():
        moving = max(seconds for part, seconds in one["parts"].items() if part != "the device")
        step = (_band_time(one["step"]), f"{one['samples_per_s']:,.0f}", one["limit"])
        rows.append([name, size(one["bytes_each_way"]), _time(moving), *step])
    return [*lines, table(rows)] if tiers["stores"] else lines


def _skew(arrivals: list[dict[str, Any]]) -> list[str]:
    rows = [["table", "sharding", "mean of ranks", "worst rank and batch", "worst / mean", "rank"]]
    for one in arrivals:
        cells = (size(one["mean"]), size(one["worst"]), f"{one['ratio']:.1f} x", str(one["rank"]))
        rows.append([one["table"], one["kind"], *cells])
    return ["", "skew: data received by a rank in a step", table(rows)]


def _failures(failures: dict[str, Any]) -> list[str]:
    reached = failures["target_seconds"]
    return [
        "",
        f"failures: one every {_time(failures['mtbf_s'])}, checkpoints of {_time(failures['checkpoint_s'])}, "
        f"restarts of {_time(failures['restart_s'])}",
        f"  with a checkpoint every {_time(failures['interval_s'])} the goodput is {failures['goodput']:.1%}"
        + (f"; {_time(reached)} to the target" if reached else ""),
    ]


def _time(seconds: float) -> str:
    """Seconds in the unit a person would use."""
    if not seconds:
        return "0"
    unit, least = _unit(seconds)
    return f"{seconds / least:,.{_decimals(seconds / least)}f} {unit}"


def _band_time(band: dict[str, float]) -> str:
    """A time and its range, as in 632 ms (570 to 700)."""
    unit, least = _unit(band["value"])
    decimals = _decimals(band["value"] / least)
    value, low, high = (f"{band[key] / least:,.{decimals}f}" for key in ("value", "low", "high"))
    return f"{value} {unit} ({low} to {high})"


def _unit(seconds: float) -> tuple[str, float]:
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
    return next(((unit, least) for unit, least in units if seconds >= least), ("µs", 1e-6))


def _decimals(value: float) -> int:
    """Digits after the point that make three in all."""
    return 0 if value >= 99.95 else 1 if value >= 9.995 else 2


def _band_number(band: dict[str, float]) -> str:
    value, low, high = (number(band[key]) for key in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def _money(band: dict[str, float], currency: str | None) -> str:
    decimals = _decimals(band["value"])
    value, low, high = (f"{band[key]:,.{decimals}f}" for key in ("value", "low", "high"))
    return f"{value}{' ' + currency if currency else ''} ({low} to {high})"


def _reached(reached: dict[str, Any], currency: str | None) -> str:
    cost = f" and {_money(reached['cost'], currency)}" if reached["cost"] else ""
    return f"{'~' if reached['extrapolated'] else ''}{_band_time(reached['seconds'])}{cost}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
