"""Predictions of `recperf plan` beside what was measured or published, and how far they are off.

One set of efficiencies serves all points of a kind:

* our own steps on one H200: products and attention are shares of the first way, bytes of the second. So these are no
  predictions but a check that three numbers tell three steps; the third way alone was not used;
* the MLPerf reference on eight B200 and eight MI350X: efficiencies from its layers on one H200, 273 of 989 TFLOP/s;
* the same with the share that the other of the two points shows: what one device of this generation says of the other;
* what dedup saves it on one and on two nodes, and how its published logs scale from 8 to 16 and 32 devices. How its
  tables lay on more than one node is not published: once as its planner placed them on eight devices, once row-wise as
  its documents say. Both are recorded.

* the kinds of work in its published traces: where the error comes from;
* our own steps on 1, 2 and 4 gloo ranks of this machine, part by part, from ceilings of one core and of messages
  between two ranks, measured here: with assumed shares of them, with one factor for all shares (`calibrated`), and with
  what one rank's steps of two sizes tell. Rows measured beside other work say nothing; the load before is in them.

Its step is planned as it runs: every layer and every position in full, no pipeline, the all-reduce behind the backward
pass, a batch of 215.6 MB copied from
pageable memory at the published 2.4 GB/s, tables placed as its planner did on eight devices.

Run as `python benchmarks/plan_validate.py`, with --only ranks or --only known for a part. Prints every error; exits
with 5 where one is above what docs/planning.md claims. Some kinds claim nothing and are recorded all the same: stalls,
which the model does not know, the placement of one node on several, and parts of a step, whose errors outweigh each
other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import _plan_ranks as gloo
from _plan_calibrate import Measured, calibrated, calibrated_by_steps
from _rows import RESULTS, record, row, show
from recperf.models.dlrm_v4 import cost
from recperf.plan.devices import GB, KNOWN, TERA, Device, Efficiency, Network, Rates
from recperf.plan.predict import Prediction, dense_seconds, part_seconds, predict
from recperf.plan.sharding import KindOrAuto, Parallelism
from recperf.plan.skew import Skew, counted
from recperf.workloads.dlrm_v4.config import DLRMv4WorkloadConfig, gpu, mlperf
from recperf.workloads.dlrm_v4.plan import planned

NAME = "plan_validate"
INPUT_BYTES, PAGEABLE = 215_600_000, 2.4 * GB
COLUMNS = ("user_x_artist", "user_x_album", "item_x_hour")
REFERENCE = Efficiency(
    products=0.276,
    attention=0.276,
    origin="the MLPerf reference's three layers on one H200, 273 of 989 TFLOP/s; bytes as recperf's; links assumed",
)
"""Of the reference's kernels: its layers were timed together, so products and attention share a figure."""
MI355X = replace(
    KNOWN["mi350x"], name="mi355x", flops=Rates(bfloat16=2500 * TERA, float32=157 * TERA), origin="data sheet"
)
CLAIMED = {
    "own": 0.08,
    "reference": 0.40,
    "other point": 0.10,
    "scaling, row-wise": 0.15,
    "scaling, placed as on one node": None,
    "stalls": None,
    "reference, kinds of work": None,
    "gloo ranks": 0.35,
    "gloo ranks, shares assumed": None,
    "gloo ranks, one factor": None,
    "gloo ranks, parts": None,
}
"""Largest relative errors docs/planning.md admits; none: nothing is claimed."""


@dataclass(frozen=True)
class Point:
    kind: str
    name: str
    metric: str
    unit: str
    predicted: float
    known: float
    source: str
    conditions: dict[str, Any]

    @property
    def error(self) -> float:
        return self.predicted / self.known - 1


def reference_config() -> DLRMv4WorkloadConfig:
    """As the reference computes. What it computes again is in its efficiency, so that it is not counted here."""
    made = mlperf()
    hstu = replace(made.model.hstu, candidate_only=False)
    return replace(made, model=replace(made.model, shared_encoders=False, hstu=hstu))


def reference_on(
    device: Device, ranks: int = 8, *, factor: float = 1.0, dedup: bool = True, rows: bool = False
) -> Prediction:
    shares = REFERENCE if factor == 1.0 else REFERENCE.scaled(factor, "from the other published point")
    overrides: dict[str, KindOrAuto] = {} if rows else dict.fromkeys(COLUMNS, "column")
    parallelism = Parallelism(
        rank_batch=1024,
        sharding="row" if rows else "table",
        overrides=overrides,
        pipelined=False,
        overlapped=True,
        dedup=dedup,
        input_bytes=INPUT_BYTES,
    )
    on = replace(device, efficiency=shares, host_bytes_per_s=PAGEABLE)
    return predict(planned(reference_config()), ranks, on, parallelism=parallelism)


def own_points() -> list[Point]:
    """Our steps on one H200, with the lengths they were measured with."""
    from _histories import MEAN, SHORTEST
    from _hstu_peer import jagged_lengths

    base = gpu()
    plain = replace(base.model, shared_encoders=False, hstu=replace(base.model.hstu, candidate_only=False))
    ways = {
        "shared encoders, candidate only": base.model,
        "candidate only": replace(base.model, shared_encoders=False),
        "neither": plain,
    }
    found = []
    for line in (RESULTS / "dlrm_v4_step.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["metric"] != "throughput" or not entry["machine"]["gpus"]:
            continue
        model, told = ways[entry["variant"]], entry["conditions"]
        lengths = [
            int(n) + model.context_tokens + 1 for n in jagged_lengths(1024, SHORTEST, model.max_history, MEAN, 3)
        ]
        parts = cost.step(model, [cost.load_of(model, lengths)], rows=int(told["distinct_rows"]))
        work = planned(replace(base, model=model)).work()
        ms = {name: 1e3 * part_seconds(name, one, work, KNOWN["h200"]) for name, one in parts.items()}
        found.append(
            Point(
                "own",
                f"H200, {entry['variant']}",
                "step",
                "ms",
                sum(ms.values()),
                told["ms"],
                "measured, dlrm_v4_step",
                {"parts_ms": {name: round(value, 2) for name, value in ms.items()}},
            )
        )
    return found


PUBLISHED = (("b200", 631.7, 12_969), ("mi350x", 654.0, 12_522))
"""Device, ms a step and samples/s of eight; MI350X without the stalls between windows: with them 760.6 and 10,771."""


def reference_points() -> list[Point]:
    found = []
    for name, ms, samples in PUBLISHED:
        made = reference_on(KNOWN[name])
        found.append(_step("reference", f"8 {name}", made, ms, samples))
    stalled = reference_on(KNOWN["mi350x"])
    found.append(_step("stalls", "8 mi350x, stalls between windows", stalled, 760.6, 10_771))
    for (name, ms, samples), (other, other_ms, _) in zip(PUBLISHED, reversed(PUBLISHED)):
        made = reference_on(KNOWN[name], factor=fitting(KNOWN[other], other_ms * 1e-3))
        found.append(_step("other point", f"8 {name}, share from {other}", made, ms, samples))
    return found


TRACES = {
    "b200": {"GEMM": 77.0, "other kernels": 425.0, "idle": 49.0, "exposed messages": 7.0},
    "mi350x": {"GEMM": 138.0, "other kernels": 383.0, "idle": 104.0, "exposed messages": 27.0},
}
"""Published ms of a traced step: 558 in all on a B200, where the log says 631.7, and 652 on an MI350X. What they call
neither GEMM nor idle nor messages is the rest: attention, norms, dropout, gathers."""


def trace_points() -> list[Point]:
    """Which kinds of work the reference's plan is wrong about."""
    found = []
    for name, known in TRACES.items():
        device = replace(KNOWN[name], efficiency=REFERENCE)
        made = reference_on(KNOWN[name])
        flops = sum(part.flops for label, part in made.work.parts(1024).items() if not label.startswith("attention"))
        products = flops / (device.efficiency.products * device.flops.of("bfloat16"))
        messages = sum(seconds for part, seconds in made.exposed.items() if "all" in part)
        planned = {"GEMM": products, "idle": made.exposed["input"], "exposed messages": messages}
        planned["other kernels"] = made.seconds - sum(planned.values())
        for label, ms in known.items():
            told = {"published_trace_ms": sum(known.values())}
            point = (f"8 {name}, {label}", "part", "ms", 1e3 * planned[label], ms, "published trace", told)
            found.append(Point("reference, kinds of work", *point))
    return found


OWN_RANKS = Parallelism(sharding="row", wire="fp32", pipelined=False, overlapped=False)
"""As the ranks that are measured work: batches are gathered ahead, but nothing of a step is hidden behind another."""


def rank_points(batch: int, steps: int) -> list[Point]:
    """Steps on 1, 2 and 4 ranks of this machine, predicted in three ways."""
    from recperf.workloads.dlrm_v4.build import PreparedHistories

    load = os.getloadavg()[0]
    config = gloo.config(batch)
    store = PreparedHistories(config).store.folder
    ceilings = gloo.one_core()
    taken = {ranks: gloo.measured(ranks, config, steps) for ranks in (1, 2, 4)}
    few = gloo.measured(1, gloo.config(batch // 4), steps)
    assumed, network = gloo.device(ceilings, taken[2])
    workload = planned(config)

    def skew(ranks: int) -> Skew:
        size = batch // ranks
        return counted(workload.ids(store, size, ranks, 4), workload.work(), size, ranks)

    ids = {ranks: skew(ranks) for ranks in taken}
    samples: dict[str, Any] = {"skew": ids[1], "history": ids[1].mean_history}
    sizes = [
        Measured(
            size,
            workload.work(history=ids[1].mean_history, distinct=found.distinct_per_sample(size)),
            one.spans,
        )
        for size, found, one in ((batch // 4, ids[4], few), (batch, ids[1], taken[1]))
    ]
    ways = {
        "gloo ranks, shares assumed": assumed,
        "gloo ranks, one factor": calibrated(workload, assumed, median(taken[1].seconds), OWN_RANKS, **samples),
        "gloo ranks": calibrated_by_steps(assumed, *sizes),
    }
    conditions = {
        "batch": batch, "steps": steps, "load_before": load, "gemm": ceilings["gemm"]["float32"]["p50"],
        "copy": ceilings["copy"]["p50"], "link": assumed.link_bytes_per_s, "latency_s": network.link_latency_s,
    }  # fmt: skip
    found = []
    for kind, device in ways.items():
        for ranks, one in taken.items():
            history = ids[ranks].mean_history
            made = predict(workload, ranks, device, network, OWN_RANKS, skew=ids[ranks], history=history)
            told = conditions | {name: made.origins[name] for name in ("device", "efficiency")}
            told |= {"measured_ms": _ms(one.parts), "messages_ms": _ms(one.messages)}
            pair = 1e3 * made.seconds, 1e3 * median(one.seconds)
            name = kind.replace("gloo", f"{ranks} gloo")
            found.append(Point(kind, name, "step", "ms", *pair, "measured here", told))
            if kind == "gloo ranks":
                found += part_points(made, one, device, network)
    return found


def part_points(made: Prediction, one: gloo.Steps, device: Device, network: Network) -> list[Point]:
    found = []
    for part, expected in own_parts(made, device, network).items():
        known = one.parts[part]
        if known > 0:
            pair, name = (1e3 * expected, 1e3 * known), f"{one.ranks} gloo ranks, {part}"
            found.append(Point("gloo ranks, parts", name, "part", "ms", *pair, "measured here", {}))
    return found


def own_parts(made: Prediction, device: Device, network: Network) -> dict[str, float]:
    """A prediction by the names that ranks time."""
    here = min(made.ranks, network.ranks_per_node)
    picks = dense_seconds(made.work, device.share(here), made.rank_batch)["embedding"]
    left = made.exposed
    return {
        "input": left["input"],
        "lookup": left["ids all-to-all"] + left["lookup"] + left["rows all-to-all"] + picks,
        "forward": left["dense forward"] - picks,
        "backward": left["dense backward"],
        "reduce": left["all-reduce"],
        "update": left["gradients all-to-all"] + left["table update"] + left["dense update"],
    }


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


def fitting(device: Device, seconds: float) -> float:
    """How much of the assumed shares makes the prediction meet a time."""
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if reference_on(device, factor=middle).seconds > seconds else (low, middle)
    return high


def _step(kind: str, name: str, made: Prediction, ms: float, samples: int) -> Point:
    parts = {part: round(1e3 * seconds, 2) for part, seconds in made.exposed.items()}
    told = {"exposed_ms": parts, "published_samples_per_s": samples, "samples_per_s": round(made.samples_per_s)}
    return Point(kind, name, "step", "ms", 1e3 * made.seconds, ms, "published", told)


def scaling_points(*, rows: bool) -> list[Point]:
    """Ratios, in which the efficiency of the compute counts little; the share is that of the B200's point."""
    kind = "scaling, row-wise" if rows else "scaling, placed as on one node"
    factor = fitting(KNOWN["b200"], PUBLISHED[0][1] * 1e-3)

    def made(device: Device, ranks: int, *, dedup: bool = True) -> Prediction:
        return reference_on(device, ranks, factor=factor, dedup=dedup, rows=rows)

    found = []
    for ranks, before, after in ((8, 941.6, 805.7), (16, 1108.0, 818.0)):
        ms = {on: 1e3 * made(KNOWN["mi350x"], ranks, dedup=on).seconds for on in (False, True)}
        told = {"ms": {"without": round(ms[False], 1), "with": round(ms[True], 1)}, "published_ms": [before, after]}
        name = f"dedup, {ranks // 8} nodes of 8, {kind.removeprefix('scaling, ')}"
        found.append(Point(kind, name, "ratio", "x", ms[True] / ms[False], after / before, "published", told))
    speed = {ranks: made(MI355X, ranks).samples_per_s for ranks in (8, 16, 32)}
    for ranks, samples in ((16, 21.5), (32, 40.4)):
        told = {"samples_per_s": {str(key): round(value) for key, value in speed.items()}}
        name = f"8 to {ranks} mi355x, {kind.removeprefix('scaling, ')}"
        known = samples / 11.1
        found.append(Point(kind, name, "ratio", "x", speed[ranks] / speed[8], known, "published logs", told))
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="predictions beside measured and published figures")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    parser.add_argument("--only", choices=("ranks", "known"), help="only what is measured here, or only what is not")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step of all gloo ranks together")
    parser.add_argument("--steps", type=int, default=30, help="steps that gloo ranks are timed in")
    chosen = parser.parse_args(words)
    points = []
    if chosen.only != "ranks":
        points += own_points() + reference_points() + trace_points()
        points += scaling_points(rows=True) + scaling_points(rows=False)
    if chosen.only != "known":
        points += rank_points(chosen.batch, chosen.steps)
    entries, missed = [], []
    for point in points:
        told = {"kind": point.kind, "known": point.known, "source": point.source, "error": round(point.error, 4)}
        entries.append(row(NAME, point.name, point.metric, point.unit, [point.predicted], told | point.conditions))
        print(f"{show(entries[-1])}  known {point.known:,.4g}, error {point.error:+.1%}", flush=True)
        most = CLAIMED[point.kind]
        if most is not None and abs(point.error) > most:
            missed.append(f"{point.name}: off by {point.error:+.1%}, claimed {most:.0%}")
    if not chosen.no_record:
        print(f"rows appended to {record(entries).name}")
    for line in missed:
        print(f"claim missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
