"""A plan as a report: what to do, then the numbers of ranks, then the details of the advised one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import cycle

from ..measure.limit_kinds import LIMITS
from ..runs.report.blocks import Block, Cell, Figure, Report, Section, Table, Text, arranged, cells, definitions
from ..runs.report.charts import BarPart, stacked
from ..runs.report.formats import NONE
from ..runs.report.svg import EXTRA, FAMILIES
from ..units import WIDEST_RANGE, digits, number, size, time, times, too_wide
from .memory import Memory
from .predict import PARTS, Band, PredictedStep
from .summary import Plan, Point
from .target import PlannedTraining
from .tiers import PlannedTiers

HEAD = (
    "ranks", "global batch", "fullest rank", "step", "samples/s", "scaling", "limit", "to target", "cost", "fits with"
)  # fmt: skip
COMMANDS = ("recperf run", "on each node")
"""How texts begin that are commands."""


def report_of(plan: Plan, key: str = "plan") -> Report:
    """Everything, the advice first."""
    lead, texts = _advice(plan)
    shown = plan.advice.configuration or plan.points[-1]
    facts = [(name, Cell(text, "code") if text.startswith(COMMANDS) else text) for name, text in texts.items()]
    return Report(
        key=key,
        title=f"{plan.workload}{f' --preset {plan.preset}' if plan.preset else ''}",
        name="",
        subtitle=f"{plan.device} · network {plan.network} · predicted, not measured",
        verdict=lead,
        measured=True,
        facts=[("devices", lead), *facts],
        sections=arranged(
            [
                Section("ranks", "numbers of ranks", _overview(plan.points, plan.currency)),
                *_details(plan, shown),
            ],
            shown=("ranks",),
        ),
    )


def side_by_side(plans: Sequence[Plan]) -> list[Section]:
    """Plans of one workload for several devices: the smallest number of each that fits, in a row."""
    rows = []
    for plan in plans:
        advised = plan.advice.configuration
        none = [f"none up to {plan.advice.tried_ranks:,}", *(len(HEAD) - 1) * [NONE]]
        rows.append([plan.device, *(_row(advised, plan.currency) if advised else none)])
    return [Section("devices", "side by side", [_filled(("device", *HEAD), rows)])]


def summary(plans: Sequence[Plan]) -> str:
    """The devices that several plans need."""
    return " ".join(f"{plan.device}: {_advice(plan)[0]}" for plan in plans)


def _advice(plan: Plan) -> tuple[str, dict[str, str]]:
    """The number of devices in one sentence, and the facts behind it by name."""
    advised, tiers = plan.advice.configuration, plan.advice.tiers
    other = _alternative(plan, tiers) if tiers and tiers.stores else {}
    if advised is None:
        return _too_few(plan), other
    return _smallest(plan, advised), _facts(plan, advised) | other


def _too_few(plan: Plan) -> str:
    """What to do where no number of ranks fits."""
    points = plan.points
    text = f"No number of {plan.device} up to {plan.advice.tried_ranks:,} is enough"
    smaller = next((point for point in points if point.memory.largest_global_batch), None)
    if smaller is None:
        return f"{text}: choose a device with more memory."
    options = f"--train.batch-size {smaller.memory.largest_global_batch}"
    return f"{text} for {smaller.rank_batch:,} samples on each; {smaller.ranks:,} are with {options}."


def _alternative(plan: Plan, tiers: PlannedTiers) -> dict[str, str]:
    """Devices with their tables elsewhere."""
    host, ranks = tiers.stores["host"], tiers.ranks
    target = f", {_reached(host.target, plan.currency)} to the target" if host.target else ""
    memory = f"{'its' if ranks == 1 else 'their'} tables in {size(tiers.table_bytes)} of host memory" + " each" * (
        ranks > 1
    )
    options = [f"--train.batch-size {ranks * tiers.rank_batch}", *([f"--ranks {ranks}"] if ranks > 1 else [])]
    if "--tables.placement" not in plan.command:
        options.append("--tables.placement host")
    return {
        "or": f"{ranks:,} {plan.device} with {memory}: {_time(host.step.value)} a step{target}",
        "run it": f"recperf {plan.command} {' '.join(options)}",
    }


def _smallest(plan: Plan, advised: Point) -> str:
    """Which number of devices to use."""

    def devices(ranks: int, what: str, name: str = "") -> str:
        return f"{ranks:,}{name} {'is' if ranks == 1 else 'are'} {what}"

    tried = [point.ranks for point in plan.points]
    fewer = max((ranks for ranks in tried if ranks < advised.ranks), default=None)
    name = f" {plan.device}" + (f" on {advised.nodes:,} nodes" if advised.nodes > 1 else "")
    options = f" with {advised.options}" if advised.options else ""
    worse, ids = plan.advice.worse_ranks, ""
    if worse is not None and worse != advised.ranks:
        ids = " if ids repeat as published" + (f", {worse:,} if they do not" if worse else "")
    enough = devices(advised.ranks, f"enough{options}{ids}", name)
    return f"{enough}." if fewer is None else f"{enough}; {devices(fewer, 'too few')}."


def _facts(plan: Plan, advised: Point) -> dict[str, str]:
    step, reached, memory = advised.step, advised.target, advised.memory
    assert step is not None
    samples = advised.global_batch
    rate = Band(samples / step.value, samples / step.high, samples / step.low)
    facts = {
        "run": _command(plan, advised),
        "step": f"{_band_time(step)}, {_range(rate, _three_digits)} samples/s",
        "memory": f"{_memory_band(memory)} of {size(memory.limit_bytes)} on the fullest rank",
        "target": "time not known without --samples-to-target, cost not without --price, such as 4USD an hour",
    }
    if reached:
        facts["target"] = f"{_reached(reached, plan.currency)} for {_range(reached.samples, number)} samples"
        facts["target"] += "" if reached.cost else "; --price 4USD adds the cost"
    if narrower := _narrower(plan, advised):
        facts["range"] = narrower
    if failing := advised.failures:
        reached_s = reached.seconds.value / failing.goodput if reached and failing.goodput else None
        facts["failures"] = (
            f"one every {_time(failing.mtbf_s)}: with a checkpoint every {_time(failing.interval_s)} the "
            f"goodput is {failing.goodput:.1%}" + (f", {_time(reached_s)} to the target" if reached_s else "")
        )
    limit, exposed = step.limit, step.exposed
    longest = max(exposed, key=lambda name: exposed[name])
    sentence = LIMITS[limit].sentence.format(share=f"{step.shares[limit]:.0%}", detail="")
    facts["limit"] = f"{limit}: {sentence} The longest part is {longest}, {_time(exposed[longest])}."
    faster = [
        f"{one.options}: {one.step.samples_per_s / step.samples_per_s:.2f} times the samples/s, "
        f"{_band_time(one.step)} a step"
        for one in plan.advice.changes
    ]
    changes = [*faster, *_more_devices(plan, advised)]
    return {**facts, "change": "; ".join(changes)} if changes else facts


def _more_devices(plan: Plan, advised: Point) -> list[str]:
    """What the next larger number of devices brings."""
    larger = next((one for one in plan.points if one.ranks > advised.ranks and one.fits), None)
    if larger is None or larger.step is None or advised.step is None:
        return []
    if larger.step.samples_per_s < 1.02 * advised.step.samples_per_s:
        return [f"{larger.ranks:,} {plan.device} are no faster"]
    takes = f"train {larger.step.samples_per_s:,.0f} samples/s"
    if larger.target:
        takes = f"take {_reached(larger.target, plan.currency)} to the target"
    return [f"{larger.ranks:,} {plan.device} {takes}"]


def _command(plan: Plan, advised: Point) -> str:
    """What starts this configuration."""
    run, ranks, nodes = plan.command, advised.ranks, advised.nodes
    for flag in re.findall(r"--[\w.-]+", advised.options):
        run = re.sub(rf" {re.escape(flag)}[ =]\S+", "", run)
    options = f" {advised.options}" if advised.options else ""
    end = f" --train.batch-size {advised.global_batch}{options}"
    if nodes > 1:
        torchrun, (full, last) = f"torchrun --nnodes {nodes} --nproc-per-node", advised.node_ranks
        where = "on each node" if last == full else f"on each node, on the last one with --nproc-per-node {last}"
        return f"{where}: {torchrun} {full} -m recperf {run}{end}"
    return f"recperf {run}{f' --ranks {ranks}' if ranks > 1 else ''}{end}"


def _overview(points: list[Point], currency: str | None) -> list[Block]:
    extrapolated = any(point.target and point.target.samples.extrapolated for point in points)
    note = "~ samples to the target are extrapolated beyond the published batch sizes" if extrapolated else ""
    blocks: list[Block] = [_filled(HEAD, [_row(point, currency) for point in points], note)]
    bars = [(_count(point.ranks, "rank"), _bar(point.step)) for point in points if point.step is not None]
    if bars:
        label = "Predicted time of a step by part, for each number of ranks that fits"
        blocks.append(Figure(label, label, lambda: stacked(bars, "ms")))
    return blocks


def _row(point: Point, currency: str | None) -> list[str]:
    """One number of ranks."""
    memory, step, reached = point.memory, point.step, point.target
    row = [f"{point.ranks:,}", f"{point.global_batch:,}"]
    if step is None:
        batch = memory.largest_global_batch
        missing = f"needs {size(memory.missing_bytes)} more on rank {memory.fullest_rank}"
        return [*row, missing, *6 * [NONE], f"--train.batch-size {batch}" if batch else "no batch size"]
    return [
        *row,
        size(memory.without_reuse_bytes),
        _band_time(step),
        f"{step.samples_per_s:,.0f}",
        f"{point.scaling:.0%}",
        f"{step.limit} {step.shares[step.limit]:.0%}",
        f"{_approximately(reached)}{_band_time(reached.seconds)}" if reached else NONE,
        _range(reached.cost, digits, currency) if reached and reached.cost else NONE,
        point.options,
    ]


def _filled(head: tuple[str, ...], rows: list[list[str]], note: str = "") -> Table:
    """A table of the columns in which something stands."""
    shown = [column for column in range(len(head)) if any(row[column] not in (NONE, "") for row in rows)]
    left = tuple(at for at, column in enumerate(shown) if head[column] in ("limit", "fits with"))
    return Table(tuple(head[at] for at in shown), [cells(*(row[at] for at in shown)) for row in rows], note, left=left)


def _bar(step: PredictedStep) -> list[BarPart]:
    """The exposed parts of a step, in ms."""
    tones = zip(PARTS, cycle((*FAMILIES, *EXTRA)))
    return [BarPart(name, 1e3 * step.exposed[name], tone) for name, tone in tones if step.exposed[name]]


def _details(plan: Plan, point: Point) -> list[Section]:
    batch = f"{_count(point.ranks, 'rank')}, {_count(point.rank_batch, 'sample')} on each"
    sections: list[Section] = []
    if step := point.step:
        rows = [
            cells(name, _time(seconds), _time(left), f"{left / step.value:.1%}", PARTS[name])
            for (name, seconds), left in zip(step.parts.items(), step.exposed.values())
        ]
        table = Table(("part", "alone", "exposed", "share", "what"), rows, left=(4,))
        sections.append(Section("step", f"one step: {batch}", [table]))
    memory: list[Block] = [Text(_verdict(point.memory)), _memory(point.memory)]
    sections.append(Section("memory", f"memory: {batch}", memory + _tiers(plan.advice.tiers)))
    tables = [
        cells(t.name, t.kind, f"{t.ranks:,}", size(t.bytes), size(t.most_bytes_a_rank), t.why) for t in point.tables
    ]
    head = ("table", "sharding", "ranks", "size", "most on a rank", "why")
    sections.append(Section("tables", "tables", [Table(head, tables, left=(1, 5))]))
    origins = dict(point.origins)
    if reached := point.target:
        evaluations = _count(round(reached.evaluations), "evaluation")
        origins["samples"] = f"to the target: {reached.samples.origin}"
        origins["target"] = (
            f"{_time(reached.steps_seconds)} of steps, {_time(reached.evaluations_seconds)} of {evaluations}, "
            f"{_time(reached.startup_seconds)} of start-up"
        )
    sources = definitions(list(origins.items()))
    return [*sections, Section("sources", "sources of the figures", [sources])]


def _memory(memory: Memory) -> Table:
    total = [sum(by_part) for by_part in zip(*memory.parts.values())]
    rows = [
        cells(name, size(by_rank[memory.fullest_rank]), size(sum(by_rank) / len(by_rank)), size(min(by_rank)))
        for name, by_rank in {**memory.parts, "total": total}.items()
    ]
    return Table(("part", f"rank {memory.fullest_rank} (fullest)", "mean", "least"), rows)


def _memory_band(memory: Memory) -> str:
    """With and without reuse of memory."""
    low, high = size(memory.bytes), size(memory.without_reuse_bytes)
    return low if low == high else f"{low} to {high}"


def _verdict(memory: Memory) -> str:
    return (
        f"{memory.verdict}; rank {memory.fullest_rank} peaks at {size(memory.bytes)} ({memory.phase}), "
        f"{size(memory.without_reuse_bytes)} if no memory is reused, {size(memory.limit_bytes)} of "
        f"{size(memory.device_bytes)} can be used; its largest table is {memory.largest_tables[0]}"
    )


def _devices(ranks: int) -> str:
    return "one device" if ranks == 1 else f"{ranks:,} devices, each"


def _tiers(tiers: PlannedTiers | None) -> list[Block]:
    if tiers is None:
        return []
    room = f"{size(tiers.table_bytes)} of rows beside a cache of {size(tiers.cache_bytes)}"
    text = (
        f"Tables in tiers on {_devices(tiers.ranks)}: {room}, which serves {tiers.served:.1%} of "
        f"{tiers.rows_per_step:,.0f} rows a step ({tiers.origin})."
    )
    rows = []
    for name, one in tiers.stores.items():
        moving = max(seconds for part, seconds in one.parts.items() if part != "the device")
        step = (_band_time(one.step), f"{one.samples_per_s:,.0f}", one.limit)
        rows.append(cells(name, size(one.bytes_each_way), _time(moving), *step))
    head = ("tables in", "moved each way", "time", "step", "samples/s", "limited by")
    return [Text(text), Table(head, rows, left=(5,))] if rows else [Text(text)]


def _time(seconds: float) -> str:
    return time(1e3 * seconds)


def _band_time(band: Band) -> str:
    """A time and its range, as in 632 ms (570 to 700)."""
    (value, low, high), unit = times(*(1e3 * seconds for seconds in (band.value, band.low, band.high)))
    return f"{value} {unit} {_ends(band, low, high)}"


def _range(band: Band, text: Callable[[float], str], unit: str | None = None) -> str:
    """A figure and its range, as in 26.8 USD (21.3 to 46.9)."""
    value, low, high = map(text, (band.value, band.low, band.high))
    shown = f"{value} {unit}" if unit else value
    return shown if low == high else f"{shown} {_ends(band, low, high)}"


def _ends(band: Band, low: str, high: str) -> str:
    """A range in brackets. One that would contain nearly anything says that no plan can be judged by it."""
    return f"({low} to {high}{', not judged' if too_wide(band.low, band.high) else ''})"


def _narrower(plan: Plan, advised: Point) -> str | None:
    """Which ranges are too wide to judge by, and what would narrow them; None where none is."""
    step, reached = advised.step, advised.target
    assert step is not None
    bands = {"step": step, **({"time to the target": reached.seconds, "samples": reached.samples} if reached else {})}
    wide = [name for name, band in bands.items() if too_wide(band.low, band.high)]
    if not wide:
        return None
    # The range of the time comes from those of the step, the samples and the start; each is enough at its root.
    ways = {
        f"--calibrate on a {plan.device}": step,
        "a measured --samples-to-target": reached.samples if reached else Band(1.0, 1.0, 1.0),
    }
    enough = math.sqrt(WIDEST_RANGE)
    useful = [way for way, band in ways.items() if band.high > enough * band.low]
    way = " and ".join(useful or ["a measured --startup-seconds"])
    return f"{', '.join(wide)} not judged, wider than a factor of {WIDEST_RANGE:g}: {way} narrows it"


def _reached(reached: PlannedTraining, currency: str | None) -> str:
    cost = ""
    if reached.cost:
        # It follows the time: where that is not judged, its range says no more.
        judged = not too_wide(reached.seconds.low, reached.seconds.high)
        amount = _range(reached.cost, digits, currency) if judged else f"{digits(reached.cost.value)} {currency}"
        cost = f" and {amount}"
    return f"{_approximately(reached)}{_band_time(reached.seconds)}{cost}"


def _approximately(reached: PlannedTraining) -> str:
    return "~" if reached.samples.extrapolated else ""


def _three_digits(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
