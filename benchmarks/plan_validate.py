"""Predictions of `recperf plan` beside what was measured or published, and how far they are off.

What shaped the model; rows say whether they did so wholly or partly:

* the share of passes: two of recperf's own steps on one H200 (`FITTED`); that of products once too;
* attention: rates of the kernels alone on one H200, ours and the MLPerf reference's, by length of rows; on an MI350X
  the published time of one of the reference's layers in full;
* products of the reference on B200 and MI350X: the `GEMM` of its published traces, and the B200's idle time;
* seconds of an operator call: small steps on one H200 (`call_s`), where rows of default_speed say no `call_s` of their
  own host; of a kernel in a graph: micro-dlrm's step (`kernel_s`);
* seconds in which a sample is prepared (`PREPARE_S`), from one ARM core and a Xeon;
* stalls between windows: the mean of the two published pairs with and without them;
* seconds of an evaluation besides its forward passes (`EVALUATION_S`): the published evaluations;
* samples to the target, and the start-up: published;
* the spread of lengths (`FULL_POOLS`), assumed so that their mean is the published one; the exponent of popularity,
  fitted to one published allocation (memory only: these steps have even ids or counted ones).

Everything else is a prediction: our third step, steps with tables in tiers, our layers at three shapes, the reference's
layers on one H200, what dedup saves it on one and on two nodes, 8, 16 and 32 MI355X, and what two gloo ranks wait for,
from their measured link (`rank_messages`) and their own time.

Run as `python benchmarks/plan_validate.py`. Prints every error; exits with 5 where one is above what docs/planning.md
claims, or a known step lies outside the band of its prediction.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Literal

from _plan_reference import (
    H200,
    MI350X,
    Point,
    reference_passes,
    reference_plan,
    reference_points,
    target_points,
)
from _rows import RESULTS, record, row, show
from recperf.measure.cost import Cost
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config
from recperf.planning.calibrate import Calibration
from recperf.planning.devices import KNOWN, NETWORKS, Device, all_reduce
from recperf.planning.link import Link
from recperf.planning.predict import error_band, part_seconds, predict
from recperf.planning.sharding import Parallelism
from recperf.planning.work import PlannedWorkload, Work
from recperf.workloads import find
from recperf.workloads.dlrm_v4.config import gpu
from recperf.workloads.dlrm_v4.plan import planned

NAME = "plan_validate"
METRICS = {"ms": "step", "x": "ratio", "h": "hours"}
CLAIMED = {
    "own steps": 0.06,
    "own steps, calls": 0.20,
    "own layers": 0.08,
    "own ranks, waiting": None,
    "reference, layers": 0.10,
    "reference, candidate-only layer": None,
    "reference, steps": 0.10,
    "reference, logged": 0.12,
    "reference, scaling": 0.10,
    "reference, hours to the target": 0.10,
    "reference, range of hours": None,
    "reference, kinds of work": None,
}
"""Largest relative errors docs/planning.md admits; none: nothing, or only the range, is claimed. Layers: 5.8 % on the
day whose steps shaped the model, and the same kernels were 2.5 % faster in the next rows."""
OUTSIDE = ("8 mi350x, exposed messages",)
"""Known figures that docs/planning.md says to lie outside of the range."""
CALLED = {
    "eager": "operators called one by one",
    "plain": "every switch off",
    "default": "CUDA graph",
}
"""Ways of default_speed."""
SHAPING = "micro-dlrm, CUDA graph"
"""The small step that the seconds of a kernel in a graph follow from."""
FITTED = ("shared encoders, candidate only", "neither")
"""Steps of dlrm-v4 that the share of passes is fitted to."""


def entries_of(name: str, metric: str = "") -> list[dict[str, Any]]:
    """Stored rows of a benchmark, the oldest first."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [entry for entry in rows if metric in ("", entry["metric"])]


def on_h200(name: str, metric: str) -> list[dict[str, Any]]:
    """Those that were measured on an H200."""
    return [entry for entry in entries_of(name, metric) if "H200" in entry["conditions"].get("device", "")]


def own_steps() -> dict[str, dict[str, Any]]:
    """Conditions of the newest steps of dlrm-v4 on one H200, by name."""
    rows = on_h200("dlrm_v4_step", "throughput")
    return {
        entry["variant"]: {**entry["conditions"], "time": entry["time"], "commit": entry["commit"]} for entry in rows
    }


def own_seconds(step: Mapping[str, Any], device: Device) -> float:
    """Seconds of such a step, predicted for the lengths it was measured with."""
    from _histories import MEAN, SHORTEST
    from _hstu_peer import jagged_lengths

    base = gpu().model
    model = {
        "shared encoders, candidate only": base,
        "candidate only": replace(base, shared_encoders=False),
        "neither": replace(base, shared_encoders=False, hstu=replace(base.hstu, candidate_only=False)),
    }[step["way"]]
    mean = step.get("mean_history", MEAN)
    lengths = [
        n + model.context_tokens + 1 for n in jagged_lengths(1024, SHORTEST, model.max_history, mean, 3).tolist()
    ]
    load = cost.load_of(model, lengths)
    passes, work = cost.passes(model, load), _with_lengths(model, lengths)
    parts = cost.step(model, [load], rows=int(step["distinct_rows"]))
    passes |= {name: parts[name].bytes for name in ("dense_update", "sparse_update")}
    return sum(part_seconds(name, Cost(part.flops, passes.get(name, 0)), work, device) for name, part in parts.items())


def current(entry: dict[str, Any]) -> bool:
    """Whether a row is of the commit of the steps that shaped the model, or newer: an older one had other kernels."""
    steps = [own_steps()[name] for name in FITTED]
    same = entry["commit"] in (step["commit"] for step in steps)
    return same or bool(entry["time"] >= min(step["time"] for step in steps))


def own_points() -> list[Point]:
    """Our steps on one H200."""
    points, device = [], KNOWN["h200"]
    for name, step in own_steps().items():
        ms, fitted = 1e3 * own_seconds(step, device), name in FITTED
        points.append(_own("own steps", f"H200, {name}", ms, step["ms"], "dlrm_v4_step", fitted=fitted))
    for entry in entries_of("table_tiers", "step"):
        if entry["variant"] == "41 GiB, device" and current(entry):
            ms = 1e3 * own_seconds(entry["conditions"] | {"way": FITTED[0]}, device)
            points.append(_own("own steps", "H200, 41 GiB of tables on the device", ms, entry["p50"], "table_tiers"))
    return points


def called_points() -> list[Point]:
    """Small steps on one H200: operators called one by one, with every switch off, and as CUDA graphs, which is the
    default."""
    from default_speed import NAMES, config_of

    latest = {entry["variant"]: entry for entry in on_h200("default_speed", "samples_per_s") if current(entry)}
    points = []
    for workload in map(find, NAMES):
        for way, name in CALLED.items():
            entry = latest.get(f"{workload.name}, cuda {way}")
            if entry is None:
                continue
            # Hosts differ: how fast this one calls operators and prepares batches was measured beside the steps.
            facts, device = entry["conditions"], KNOWN["h200"]
            step = _prepared(workload.planned(config_of(workload, f"cuda {way}")), facts.get("input_ms"))
            plan = predict(step, 1, replace(device, call_s=facts.get("call_s", device.call_s)))
            points.append(
                Point(
                    "own steps, calls",
                    f"H200, {workload.name}, {name}",
                    1e3 * plan.step.value,
                    1e3 * plan.global_batch / entry["p50"],
                    "measured, default_speed",
                    "" if "call_s" in facts and f"{workload.name}, {name}" != SHAPING else "wholly",
                    plan.step.factors,
                    conditions={
                        "planned_calls": plan.work.calls,
                        **{key: facts[key] for key in ("operators", "call_s", "input_ms") if key in facts},
                    },
                )
            )
    return points


def _prepared(step: PlannedWorkload, input_ms: float | None) -> PlannedWorkload:
    """With the time in which the host prepared a batch, where it was measured and the plan counts one."""
    work = step.work()
    if input_ms is None or not work.prepare_s:
        return step
    measured = replace(work, prepare_s=input_ms / 1e3 / step.batch_size)
    return replace(step, count=lambda history, distinct: measured)


def graph_points() -> list[Point]:
    """Steps of dlrm as CUDA graphs on one H200, in three precisions."""
    latest = {entry["variant"]: entry for entry in on_h200("dlrm_step", "throughput") if current(entry)}
    workload, points = find("dlrm"), []
    for preset in ("experiment", "intended"):
        for precision in ("bfloat16", "tf32", "float32"):
            entry = latest.get(f"recperf, {preset}" if precision == "bfloat16" else f"recperf, {precision}, {preset}")
            if entry is not None:
                config: Any = workload.presets[preset]()
                config = replace(config, fast=replace(config.fast, precision=precision))
                step = predict(workload.planned(config), 1, KNOWN["h200"]).step
                name = f"H200, dlrm {preset}, {precision}"
                known = 1e3 / entry["p50"]
                points.append(
                    Point("own steps, calls", name, 1e3 * step.value, known, "measured, dlrm_step", band=step.factors)
                )
    return points


def waiting_points() -> list[Point]:
    """Waits of two gloo ranks, for messages and for the later rank, from the links measured beside them."""
    points = []
    for entry in {(entry["variant"], entry["metric"]): entry for entry in entries_of("rank_messages")}.values():
        facts, name, late = entry["conditions"], entry["variant"], entry["metric"] == "late_ms"
        links = [Link(**one) for one in facts["links"]]
        each = [facts["own_ms"] * link.late if late else 1e3 * _message_seconds(name, link) for link in links]
        middle = median(each)
        label = f"2 gloo ranks, {name}, {'the later rank' if late else 'messages'}"
        band = (min(each) / middle, max(each) / middle)
        kind, source = "own ranks, waiting", "measured, rank_messages"
        points.append(Point(kind, label, middle, entry["p50"], source, band=band))
    return points


def _message_seconds(name: str, link: Link) -> float:
    """Seconds of the messages of a step on two ranks that have no core to spare: gradients are summed after the
    backward pass, and ranks agree on signals by one message more."""
    workload = find(name)
    rates = Calibration(device=link.backend, product=1e12, copy=1e12, memory_bytes=1 << 34, link=link)
    device, network = rates.applied(KNOWN["h200"], "float32"), rates.connected(NETWORKS["ib400"])
    config: Any = next(iter(workload.presets.values()))()
    exposed = predict(workload.planned(config), 2, device, network, Parallelism(overlap="off")).step.exposed
    return sum(seconds for part, seconds in exposed.items() if "all-" in part) + all_reduce(0, 2, device, network)


def layer_points() -> list[Point]:
    """Three layers alone, ours at three shapes and the reference's at two."""
    from _hstu_peer import STACK_REFERENCE, jagged_lengths

    base = gpu().model
    shapes = {
        "B32 x 4096": (32, 4096, 4096, 4096),
        "B256, mean 2663": (256, 512, 4096, 2663),
        "B256, mean 2663, the reference's FLOPs": (256, 1738, 3588, 2663),
    }
    points = []
    latest = {entry["variant"]: entry for entry in on_h200("stu_stack", "throughput")}
    for name, (rows, shortest, longest, mean) in shapes.items():
        lengths = jagged_lengths(rows, shortest, longest, mean, 3).tolist()
        for way, candidate_only in (("full", False), ("candidate only", True)):
            model = replace(base, hstu=replace(base.hstu, candidate_only=candidate_only))
            ms = 1e3 * _layers(model, lengths, KNOWN["h200"])
            points.append(
                _own(
                    "own layers", f"H200, {way}, {name}", ms, 1e3 * rows / latest[f"{way}, {name}"]["p50"], "stu_stack"
                )
            )
    plain = replace(base, hstu=replace(base.hstu, candidate_only=False))
    for name, shape in (("B32 x 4096", "B32 x 4096"), ("B256, mean 2663", "B256, mean 2663, the reference's FLOPs")):
        rows, shortest, longest, mean = shapes[shape]
        lengths = jagged_lengths(rows, shortest, longest, mean, 3).tolist()
        known = 1e3 * rows / STACK_REFERENCE[name]["samples_per_s"]
        ms = 1e3 * _layers(plain, lengths, H200, reference=True)
        points.append(Point("reference, layers", f"H200, {name}", ms, known, "measured", band=error_band(H200, 1)))
    lengths = [round(length) for length in reference_plan().work().lengths] * 16
    one = replace(plain, hstu=replace(plain.hstu, layers=1))
    ms = 1e3 * _layers(one, lengths, MI350X, reference=True)
    name, band = "MI350X, one layer in full, 2.73 M tokens", error_band(MI350X, 1)
    points.append(Point("reference, layers", name, ms, 160.3, "published", "wholly", band))
    last = replace(one, hstu=replace(one.hstu, candidate_only=True))
    ms, name = 1e3 * _layers(last, lengths, MI350X, reference=True), "MI350X, one layer, candidate only, 2.73 M tokens"
    points.append(Point("reference, candidate-only layer", name, ms, 30.6, "published"))
    return points


def _layers(model: DLRMv4Config, lengths: list[int], device: Device, *, reference: bool = False) -> float:
    """Seconds of the layers alone, ours or the reference's, which repeats products."""
    load = cost.Load(lengths=tuple(lengths), triples=1)
    step, passes = cost.step(model, [load], rows=0), (reference_passes if reference else cost.passes)(model, load)
    work = _with_lengths(model, lengths)
    seconds = sum(
        part_seconds(name, Cost(part.flops, passes.get(name, 0)), work, device)
        for name, part in step.items()
        if name.startswith(("stu", "attention"))
    )
    if reference:
        seconds += part_seconds("stu_input", Cost(step["stu_input"].flops, 0), work, device)
    return seconds


def _with_lengths(model: DLRMv4Config, lengths: list[int]) -> Work:
    work = planned(replace(gpu(), model=model)).work()
    return replace(work, lengths=tuple(float(length) for length in lengths))


def _own(kind: str, name: str, ms: float, known: float, source: str, *, fitted: bool = False) -> Point:
    shaped: Literal["", "wholly"] = "wholly" if fitted else ""
    return Point(kind, name, ms, known, f"measured, {source}", shaped, error_band(KNOWN["h200"], 1))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


STARS = {"": "", "partly": " (*)", "wholly": " *"}


def table() -> str:
    """The newest stored row of each step, without parts of steps."""
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    # Rows that say how far they shaped the model; earlier ones compared something else.
    rows = [entry for entry in rows if entry["conditions"].get("fitted") in STARS]
    rows = [entry for entry in rows if entry["conditions"]["kind"] in CLAIMED]
    # What the newest call no longer compares is left out.
    newest = {entry["variant"]: entry for entry in rows if entry["commit"] == rows[-1]["commit"]}
    lines = ["| case | predicted | range | known | error |", "|---|---|---|---|---|"]
    for name, entry in newest.items():
        facts, unit, value = entry["conditions"], entry["unit"], entry["p50"]
        if facts["kind"] == "reference, kinds of work":
            continue
        source = "recperf" if facts["kind"].startswith("own") else "MLPerf reference"
        band = " to ".join(_short(factor * value) for factor in facts["band"]) if facts["band"] else "-"
        case = f"{source}: {name}{STARS[facts['fitted']]}"
        error = f"{100 * facts['error']:+.1f} %"
        lines.append(f"| {case} | {_short(value)} {unit} | {band} | {_short(facts['known'])} {unit} | {error} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="predictions beside measured and published figures")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    parser.add_argument("--table", action="store_true", help="only print the stored rows, as a table in Markdown")
    options = parser.parse_args(arguments)
    if options.table:
        print(table())
        return 0
    points = own_points() + called_points() + graph_points() + waiting_points() + layer_points()
    points += reference_points() + target_points()
    entries, missed = [], []
    for point in points:
        facts = {"kind": point.kind, "known": point.known, "source": point.source, "error": round(point.error, 4)}
        facts |= {"fitted": point.fitted, "band": point.band, "inside": point.inside, **point.conditions}
        entries.append(row(NAME, point.name, METRICS[point.unit], point.unit, [point.predicted], facts))
        shaped = f", {point.fitted} shaped the model" if point.fitted else ""
        print(f"{show(entries[-1])}  known {point.known:,.4g}, error {point.error:+.1%}{shaped}", flush=True)
        most = CLAIMED[point.kind]
        if most is not None and abs(point.error) > most:
            missed.append(f"{point.name}: off by {point.error:+.1%}, claimed {most:.0%}")
        if point.inside is False and point.name not in OUTSIDE:
            missed.append(f"{point.name}: outside of the band of its prediction")
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")
    for line in missed:
        print(f"claim missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
