"""Predictions of `recperf plan` beside what was measured or published, and how far they are off.

What shaped the model, all marked `fitted` in their rows:

* the shares of products and passes: two of recperf's own steps on one H200 (the first and the third way);
* attention: rates of the kernels alone on one H200, ours and the MLPerf reference's, by length of rows; on an MI350X
  the published time of one of the reference's layers in full;
* products of the reference on B200 and MI350X: the `GEMM` of its published traces;
* seconds of an operator call: three small steps on one H200;
* stalls between windows: the mean of the two published pairs with and without them.

Everything else is a prediction: our third step, steps with tables in tiers, our layers at three shapes, the reference's
layers on one H200, its traced and logged steps, what dedup saves it on one and on two nodes, 8, 16 and 32 MI355X, and
our own steps on 1, 2 and 4 gloo ranks of this machine, planned as `recperf plan --gpu cpu` does: from its ceilings and
a calibration. Beside other work these say nothing; the load before is in the rows.

The reference is planned as it runs: every layer and position in full, queries and keys computed again in the backward
pass, no pipeline, the all-reduce behind the backward pass, a batch of 215.6 MB copied from pageable memory (2.4 GB/s
published for the MI350X host; the B200 host's idle time is taken from its trace), tables placed as its planner did. How
its tables lay on more than one node is not published; its documents say row-wise.

Run as `python benchmarks/plan_validate.py`. Prints every error; exits with 5 where one is above what docs/planning.md
claims, or a known step lies outside the band of its prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from _rows import RESULTS, record, row, show
from recperf.measure.cost import Cost
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config
from recperf.plan import target
from recperf.plan.devices import GB, KERNELS, KNOWN, NETWORKS, TERA, Device, Rates
from recperf.plan.predict import Prediction, error_band, part_seconds, predict
from recperf.plan.sharding import Parallelism
from recperf.plan.work import History, PlannedWorkload, Work
from recperf.workloads.dlrm.config import DLRM
from recperf.workloads.dlrm_v4.config import DLRM_V4, gpu, mlperf
from recperf.workloads.dlrm_v4.plan import planned
from recperf.workloads.micro_dlrm.config import MICRO_DLRM

NAME = "plan_validate"
INPUT_BYTES, PAGEABLE = 215_600_000, 2.4 * GB
COLUMNS = ("user_x_artist", "user_x_album", "item_x_hour")
STALLS = (631.7 / 558 + 760.6 / 654) / 2
"""A logged step over one without stalls between windows: B200 and MI350X."""
MI350X = replace(KNOWN["mi350x"], attention=KERNELS["reference"]["mi350x"], host_bytes_per_s=PAGEABLE)
MI355X = replace(
    MI350X,
    name="mi355x",
    flops=Rates(bfloat16=2500 * TERA, float32=157 * TERA),
    gemm=MI350X.gemm_rates.divided(2300 / 2500),
    origin="data sheet",
)
H200 = replace(KNOWN["h200"], attention=KERNELS["reference"]["h200"], calibrated=False)
B200 = replace(KNOWN["b200"], attention=KERNELS["reference"]["h200"], host_bytes_per_s=INPUT_BYTES / 49e-3)
TRACES = {
    "b200": {"GEMM": 77.0, "other kernels": 425.0, "idle": 49.0, "exposed messages": 7.0},
    "mi350x": {"GEMM": 138.0, "other kernels": 383.0, "idle": 104.0, "exposed messages": 27.0},
}
"""Published ms of a traced step, 558 on a B200 and 652 on an MI350X. What they call neither GEMM nor idle nor messages
is the rest: attention, norms, dropout, gathers."""
PUBLISHED_HOURS = ((8, 83, 2.38, 2.66, 3.00), (16, 44, 1.66, 1.87, 2.20), (32, 24, 1.29, 1.39, 1.61))
"""Ranks, seconds of an evaluation (median), and the fewest, the mean and the most hours of twenty runs."""
PUBLISHED_STARTUP_S = 825
"""Seconds before the first step of these runs, in which every rank counts the samples of each window."""
METRICS = {"ms": "step", "x": "ratio", "h": "hours"}
CLAIMED = {
    "own steps": 0.06,
    "own steps, calls": 0.20,
    "own layers": 0.06,
    "reference, layers": 0.10,
    "reference, steps": 0.10,
    "reference, logged": 0.12,
    "reference, scaling": 0.10,
    "reference, hours to the target": 0.10,
    "reference, kinds of work": None,
    "gloo ranks": 0.15,
}
"""Largest relative errors docs/planning.md admits; none: nothing is claimed."""


@dataclass(frozen=True)
class Point:
    kind: str
    name: str
    predicted: float
    """ms of a step, or a ratio."""
    known: float
    source: str
    fitted: bool = False
    """Shaped the model, so that it proves nothing."""
    band: tuple[float, float] | None = None
    """Of the prediction, as factors."""
    unit: str = "ms"
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return self.predicted / self.known - 1

    @property
    def inside(self) -> bool | None:
        """Whether the known figure lies in the band."""
        return None if self.band is None else self.band[0] <= self.known / self.predicted <= self.band[1]


def reference_plan() -> PlannedWorkload:
    """The MLPerf reference: all layers and positions in full; the backward pass computes gates, values, queries and
    keys again."""
    made = mlperf()
    model = replace(made.model, shared_encoders=False, hstu=replace(made.model.hstu, candidate_only=False))
    plan = planned(replace(made, model=model))

    def count(history: History, distinct: Mapping[str, float]) -> Work:
        work = plan.count(history, distinct)

        def parts(samples: int) -> dict[str, Cost]:
            step = dict(work.parts(samples))
            return step | {"stu_input_backward": step["stu_input_backward"] + Cost(step["stu_input"].flops, 0)}

        return replace(work, parts=parts, prepare_s=0.0)

    return replace(plan, count=count)


def reference_on(device: Device, ranks: int = 8, *, dedup: bool = True, rows: bool = False) -> Prediction:
    parallelism = Parallelism(
        rank_batch=1024,
        sharding="row" if rows else "table",
        overrides={} if rows else dict.fromkeys(COLUMNS, "column"),
        wire="fp16",
        pipelined=False,
        overlapped=True,
        balanced=False,
        dedup=dedup,
        input_bytes=INPUT_BYTES,
    )
    return predict(reference_plan(), ranks, device, parallelism=parallelism)


def own_points() -> list[Point]:
    """Our steps on one H200, with the lengths they were measured with."""
    from _histories import MEAN, SHORTEST
    from _hstu_peer import jagged_lengths

    base = gpu().model
    plain = replace(base, shared_encoders=False, hstu=replace(base.hstu, candidate_only=False))
    ways = {
        "shared encoders, candidate only": base,
        "candidate only": replace(base, shared_encoders=False),
        "neither": plain,
    }
    points = []
    for entry in _entries("dlrm_v4_step", "throughput"):
        conditions = entry["conditions"]
        if "H200" not in conditions["device"]:
            continue
        model = ways[entry["variant"]]
        lengths = [
            n + model.context_tokens + 1 for n in jagged_lengths(1024, SHORTEST, model.max_history, MEAN, 3).tolist()
        ]
        ms = 1e3 * sum(_own_parts(model, lengths, int(conditions["distinct_rows"])).values())
        fitted = entry["variant"] != "candidate only"
        points.append(
            _own("own steps", f"H200, {entry['variant']}", ms, conditions["ms"], "dlrm_v4_step", fitted=fitted)
        )
    for entry in _entries("table_tiers", "step"):
        if entry["variant"] == "41 GiB, device":
            rows = int(entry["conditions"]["distinct_rows"])
            lengths = [n + 9 for n in jagged_lengths(1024, SHORTEST, base.max_history, MEAN, 3).tolist()]
            ms = 1e3 * sum(_own_parts(base, lengths, rows).values())
            points.append(_own("own steps", "H200, 41 GiB of tables on the device", ms, entry["p50"], "table_tiers"))
    return points


def called_points() -> list[Point]:
    """Small steps on one H200: operators called one by one, and as CUDA graphs, which is the default."""
    latest = {entry["variant"]: entry for entry in _entries("default_speed", "samples_per_s")}
    points = []
    for workload in (MICRO_DLRM, DLRM, DLRM_V4):
        plain = workload.planned(next(iter(workload.presets.values()))())
        for way, name in (("eager", "operators called one by one"), ("default", "CUDA graph")):
            one = plain if way == "default" else replace(plain, count=partial(_eager, plain))
            plan = predict(one, 1, KNOWN["h200"])
            known = 1e3 * plan.global_batch / latest[f"{workload.name}, cuda {way}"]["p50"]
            label, source = f"H200, {workload.name}, {name}", "measured, default_speed"
            points.append(Point("own steps, calls", label, 1e3 * plan.seconds, known, source, True, plan.band))
    return points


def _eager(plan: PlannedWorkload, history: History, distinct: Mapping[str, float]) -> Work:
    return replace(plan.count(history, distinct), kernels=0)


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
    latest = {entry["variant"]: entry for entry in _entries("stu_stack", "throughput")}
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
        ms = 1e3 * _layers(plain, lengths, H200, again=True)
        points.append(Point("reference, layers", f"H200, {name}", ms, known, "measured", band=error_band(H200, 1)))
    lengths = [round(length) for length in reference_plan().work().lengths] * 16
    one = replace(plain, hstu=replace(plain.hstu, layers=1))
    ms = 1e3 * _layers(one, lengths, MI350X, again=True)
    name, band = "MI350X, one layer in full, 2.73 M tokens", error_band(MI350X, 1)
    points.append(Point("reference, layers", name, ms, 160.3, "published", True, band))
    return points


def _layers(model: DLRMv4Config, lengths: list[int], device: Device, *, again: bool = False) -> float:
    """Seconds of the layers alone; `again`: with the products that the reference repeats."""
    load = cost.Load(lengths=tuple(lengths), triples=1)
    step, passes = cost.step(model, [load], rows=0), cost.passes(model, load)
    work = _with_lengths(model, lengths)
    seconds = sum(
        part_seconds(name, Cost(part.flops, passes.get(name, 0)), work, device)
        for name, part in step.items()
        if name.startswith(("stu", "attention"))
    )
    if again:
        seconds += part_seconds("stu_input", Cost(step["stu_input"].flops, 0), work, device)
    return seconds


def _own_parts(model: DLRMv4Config, lengths: list[int], rows: int) -> dict[str, float]:
    load = cost.load_of(model, lengths)
    passes, work = cost.passes(model, load), _with_lengths(model, lengths)
    parts = cost.step(model, [load], rows=rows)
    tables = {name: parts[name].bytes for name in ("dense_update", "sparse_update")}
    passes |= tables
    return {
        name: part_seconds(name, Cost(part.flops, passes.get(name, 0)), work, KNOWN["h200"])
        for name, part in parts.items()
    }


def _with_lengths(model: DLRMv4Config, lengths: list[int]) -> Work:
    work = planned(replace(gpu(), model=model)).work()
    return replace(work, lengths=tuple(float(length) for length in lengths))


def _own(kind: str, name: str, ms: float, known: float, source: str, *, fitted: bool = False) -> Point:
    return Point(kind, name, ms, known, f"measured, {source}", fitted, error_band(KNOWN["h200"], 1))


def reference_points() -> list[Point]:
    plans = {"b200": reference_on(B200), "mi350x": reference_on(MI350X)}
    points = []
    for name, trace in TRACES.items():
        plan = plans[name]
        exposed = {part: round(1e3 * seconds, 1) for part, seconds in plan.exposed.items() if seconds > 1e-4}
        points.append(_step("reference, steps", f"8 {name}, traced", plan, sum(trace.values()), exposed_ms=exposed))
        points += _trace_points(name, plan, trace)
    points.append(_step("reference, steps", "8 mi350x, logged without stalls", plans["mi350x"], 654.0))
    for name, ms in (("b200", 631.7), ("mi350x", 760.6)):
        points.append(_step("reference, logged", f"8 {name}, with stalls", plans[name], ms, factor=STALLS))
    for ranks, samples in ((8, 11_100), (16, 21_500), (32, 40_400)):
        plan = reference_on(MI355X, ranks, rows=ranks > 8)
        points.append(
            _step("reference, logged", f"{ranks} mi355x, with stalls", plan, 1024e3 * ranks / samples, factor=STALLS)
        )
    for ranks, before, after in ((8, 941.6, 805.7), (16, 1108.0, 818.0)):
        with_, without = (reference_on(MI350X, ranks, dedup=on, rows=True).seconds for on in (True, False))
        name = f"dedup, {ranks // 8} nodes of 8 mi350x, time with over without"
        ratio = Point("reference, scaling", name, with_ / without, after / before, "published", unit="x")
        points.append(ratio)
    return points


def target_points() -> list[Point]:
    """Hours to the target of the published logs: predicted steps and evaluations, published samples and start-up. The
    logs have an evaluation after every block, and no skipped ones."""
    workload, points = reference_plan(), []
    assert workload.evaluations is not None
    every_block = replace(workload.evaluations, first=lambda batch: 0)
    for ranks, evaluation_s, low, mean, high in PUBLISHED_HOURS:
        plan = reference_on(MI355X, ranks, rows=ranks > 8)
        samples = target.samples_to_target(workload.published_samples, plan.global_batch)
        assert samples is not None
        step = target.Band(*(STALLS * seconds for seconds in (plan.seconds, plan.low, plan.high)))
        forward = STALLS * target.forward_seconds(plan)
        training = target.training(
            samples, step, forward, plan.global_batch, evaluations=every_block, startup=PUBLISHED_STARTUP_S
        )
        hours = training.seconds.times(1 / 3600)
        band = (hours.low / hours.value, hours.high / hours.value)
        each = training.evaluation / training.evaluations
        facts = {"known_range": [low, high], "evaluation_s": round(each, 1), "published_evaluation_s": evaluation_s}
        points.append(
            Point(
                "reference, hours to the target",
                f"{ranks} mi355x, hours to the target",
                hours.value,
                mean,
                "published logs",
                band=band,
                unit="h",
                conditions=facts,
            )
        )
    return points


def _trace_points(name: str, plan: Prediction, trace: Mapping[str, float]) -> list[Point]:
    """Which kinds of work the prediction is wrong about."""
    device = {"b200": B200, "mi350x": MI350X}[name]
    flops = sum(part.flops for label, part in plan.work.parts(1024).items() if not label.startswith("attention"))
    planned_s = {
        "GEMM": flops / device.product_rate("bfloat16"),
        "idle": plan.exposed["input"],
        "exposed messages": sum(seconds for part, seconds in plan.exposed.items() if "all-" in part),
    }
    planned_s["other kernels"] = plan.seconds - sum(planned_s.values())
    shaped = {"b200": ("GEMM", "idle"), "mi350x": ("GEMM",)}[name]
    return [
        Point(
            "reference, kinds of work", f"8 {name}, {label}", 1e3 * planned_s[label], ms, "published", label in shaped
        )
        for label, ms in trace.items()
    ]


def _step(kind: str, name: str, plan: Prediction, ms: float, *, factor: float = 1.0, **conditions: Any) -> Point:
    return Point(kind, name, 1e3 * factor * plan.seconds, ms, "published", band=plan.band, conditions=conditions)


def rank_points(steps: int) -> list[Point]:
    """Steps on gloo ranks of this machine: a larger model on 1, 2 and 4 of them, the laptop preset on 1 and 2."""
    from statistics import median

    import _plan_ranks as gloo
    from recperf.measure import peaks
    from recperf.plan import calibrate
    from recperf.plan.devices import from_peaks
    from recperf.plan.skew import counted
    from recperf.workloads.dlrm_v4.build import PreparedHistories

    load, ceilings = os.getloadavg()[0], peaks.require(None, print)
    points = []
    for name, config, counts in (("", gloo.config(128), (1, 2, 4)), ("laptop preset, ", gloo.plain(), (1, 2))):
        workload, store = planned(config), PreparedHistories(config).store.folder
        rates = calibrate.measure(workload.work(), config.train.batch_size // 2, print, on_cpu=True)
        device, network = rates.applied(from_peaks(ceilings), "float32"), rates.network() or NETWORKS["loopback"]
        for ranks in counts:
            size = config.train.batch_size // ranks
            ids = counted(workload.ids(store, size, ranks, 4), workload.work(), size, ranks)
            options = config.distributed
            parallelism = Parallelism(
                sharding="row",
                wire="fp32",
                pipelined=options.pipeline,
                overlapped=options.overlap == "on",
                balanced=options.balance,
            )
            plan = predict(workload, ranks, device, network, parallelism, skew=ids, history=ids.histories)
            taken = gloo.measured(ranks, config, steps)
            facts = {"load_before": load, "measured_ms": _ms(taken.parts), "exposed_ms": _ms(plan.exposed)}
            known = 1e3 * median(taken.seconds)
            label = f"{name}{ranks} gloo ranks"
            points.append(
                Point("gloo ranks", label, 1e3 * plan.seconds, known, "measured here", False, plan.band, "ms", facts)
            )
    return points


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e3 * value, 3) for name, value in seconds.items()}


def _entries(name: str, metric: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [entry for entry in rows if entry["metric"] == metric]


def table() -> str:
    """The newest stored row of each step, without parts of steps."""
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    newest = {entry["variant"]: entry for entry in rows if "fitted" in entry["conditions"]}
    lines = ["| case | predicted | known | error |", "|---|---|---|---|"]
    for name, entry in newest.items():
        facts, unit = entry["conditions"], entry["unit"]
        if facts["kind"] == "reference, kinds of work":
            continue
        source = "recperf" if facts["kind"].startswith("own") else "MLPerf reference"
        source = "recperf, this machine" if "gloo" in facts["kind"] else source
        predicted, known = (f"{value:.3g} {unit}" for value in (entry["p50"], facts["known"]))
        star = " *" if facts["fitted"] else ""
        lines.append(f"| {source}: {name}{star} | {predicted} | {known} | {100 * facts['error']:+.1f} % |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="predictions beside measured and published figures")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    parser.add_argument("--only", choices=("ranks", "known"), help="only what is measured here, or only what is not")
    parser.add_argument("--steps", type=int, default=30, help="steps that gloo ranks are timed in")
    parser.add_argument("--table", action="store_true", help="only print the stored rows, as docs/planning.md has them")
    options = parser.parse_args(arguments)
    if options.table:
        print(table())
        return 0
    points: list[Point] = []
    if options.only != "ranks":
        points += own_points() + called_points() + layer_points() + reference_points() + target_points()
    if options.only != "known":
        points += rank_points(options.steps)
    entries, missed = [], []
    for point in points:
        facts = {"kind": point.kind, "known": point.known, "source": point.source, "error": round(point.error, 4)}
        facts |= {"fitted": point.fitted, "band": point.band, "inside": point.inside, **point.conditions}
        entries.append(row(NAME, point.name, METRICS[point.unit], point.unit, [point.predicted], facts))
        shaped = ", shaped the model" if point.fitted else ""
        print(f"{show(entries[-1])}  known {point.known:,.4g}, error {point.error:+.1%}{shaped}", flush=True)
        most = CLAIMED[point.kind]
        if most is not None and abs(point.error) > most:
            missed.append(f"{point.name}: off by {point.error:+.1%}, claimed {most:.0%}")
        if point.inside is False:
            missed.append(f"{point.name}: outside of the band of its prediction")
    if not options.no_record:
        print(f"rows appended to {record(entries).name}")
    for line in missed:
        print(f"claim missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
