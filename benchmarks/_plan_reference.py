"""The MLPerf reference as published, and plans of it: its layers, steps, scaling and hours to the target.

It is planned as it runs: every layer and position in full, queries and keys computed again in the backward pass, no
pipeline, the all-reduce behind the backward pass, a batch of 215.6 MB copied from pageable memory (2.4 GB/s published
for the MI350X host; the B200 host's idle time is taken from its trace), tables placed as its planner did. How its
tables lay on more than one node is not published; its documents say row-wise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from recperf.measure.cost import FLOAT, Cost
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import DLRMv4Config
from recperf.planning import target
from recperf.planning.devices import GB, KNOWN, TERA, Attention, Device, Efficiency, KnownRates
from recperf.planning.predict import Prediction, error_band, predict
from recperf.planning.sharding import Parallelism
from recperf.planning.work import PlannedWorkload, Spread, Work
from recperf.workloads.dlrm_v4.config import mlperf
from recperf.workloads.dlrm_v4.plan import PUBLISHED_STALLS, batch_lengths, planned

INPUT_BYTES, PAGEABLE = 215_600_000, 2.4 * GB
COLUMNS = ("user_x_artist", "user_x_album", "item_x_hour")
SHARES = Efficiency(
    products=0.85, bytes=0.53, origin="assumed: as recperf's kernels had before they were fused further"
)
"""Its own, so that faster kernels of recperf do not change what is predicted for it."""
TRITON = Attention(
    lengths=(512, 1024, 2048, 4096),
    forward=(72 * TERA, 128 * TERA, 168 * TERA, 282 * TERA),
    backward=(104 * TERA, 135 * TERA, 210 * TERA, 256 * TERA),
    origin="measured on an H200: the MLPerf reference's Triton kernels",
)
LAYER = Attention(
    lengths=(2716,),
    forward=(250 * TERA,),
    backward=(281 * TERA,),
    origin="from the published time of one of the reference's layers, 160.3 ms for 2.73 M tokens",
)
MI350X = replace(KNOWN["mi350x"], attention=LAYER, host_bytes_per_s=PAGEABLE, efficiency=SHARES)
MI355X = replace(
    MI350X,
    name="mi355x",
    flops=KnownRates(bfloat16=2500 * TERA, float32=157 * TERA),
    gemm=MI350X.gemm_rates.divided(2300 / 2500),
    origin="data sheet",
)
H200 = replace(KNOWN["h200"], attention=TRITON, calibrated=False, efficiency=SHARES)
B200 = replace(KNOWN["b200"], attention=TRITON, host_bytes_per_s=INPUT_BYTES / 49e-3, efficiency=SHARES)
TRACES = {
    "b200": {"GEMM": 77.0, "other kernels": 425.0, "idle": 49.0, "exposed messages": 7.0},
    "mi350x": {"GEMM": 138.0, "other kernels": 383.0, "idle": 104.0, "exposed messages": 27.0},
}
"""Published ms of a traced step, 558 on a B200 and 652 on an MI350X. What they call neither GEMM nor idle nor messages
is the rest: attention, norms, dropout, gathers."""
PUBLISHED_HOURS = ((8, 83, 2.38, 2.66, 3.00), (16, 44, 1.66, 1.87, 2.20), (32, 24, 1.29, 1.39, 1.61))
"""Ranks, seconds of an evaluation (median), and the fewest, the mean and the most hours of twenty runs."""


@dataclass(frozen=True)
class Point:
    kind: str
    name: str
    predicted: float
    """ms of a step, or a ratio."""
    known: float
    source: str
    fitted: Literal["", "partly", "wholly"] = ""
    """How far it shaped the model, so that it proves less or nothing."""
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


def reference_passes(model: DLRMv4Config, load: cost.Load) -> dict[str, int]:
    """Bytes of its passes, counted as recperf's before they were fused further; how its encoders pass gradients on is
    not known, so only what they must read and write counts."""
    hstu, width, (encoded, actions) = model.hstu, cost.activation_bytes(model), cost.encoded_rows(model, load)
    full, back = hstu.layers - hstu.candidate_only, cost.backward(model, load)
    norms = width * (2 * encoded + actions) * (model.encoder_hidden + model.dim)
    casts = encoded * 3 * model.table_dim * (FLOAT + width)
    return cost.passes(model, load) | {
        "encoders": 2 * norms + casts,
        "stu_output_backward": width * load.tokens * 12 * hstu.attention_width * full,
        "stu_input_backward": width * load.tokens * (6 * hstu.dim * hstu.layers + 3 * hstu.attention_width * full),
        "encoders_backward": 3 * norms + casts,
        "position_time_backward": back["position_time_backward"].bytes,
        "embedding_backward": back["embedding_backward"].bytes,
    }


def reference_plan() -> PlannedWorkload:
    """The MLPerf reference: all layers and positions in full; the backward pass computes gates, values, queries and
    keys again."""
    made = mlperf()
    model = replace(made.model, shared_encoders=False, hstu=replace(made.model.hstu, candidate_only=False))
    plan = planned(replace(made, model=model))

    def count(history: float | None, distinct: Mapping[str, float]) -> Work:
        work = plan.count(history, distinct)

        def parts(samples: int) -> dict[str, Cost]:
            lengths = batch_lengths(work.lengths, samples, least=model.context_tokens + 1)
            passes, step = reference_passes(model, cost.load_of(model, lengths)), dict(work.parts(samples))
            step |= {name: Cost(step[name].flops, bytes_) for name, bytes_ in passes.items()}
            return step | {"stu_input_backward": step["stu_input_backward"] + Cost(step["stu_input"].flops, 0)}

        return replace(work, parts=parts, prepare_s=0.0, input_bytes=lambda samples: INPUT_BYTES)

    return replace(plan, count=count)


def reference_on(device: Device, ranks: int = 8, *, dedup: bool = True, rows: bool = False) -> Prediction:
    parallelism = Parallelism(
        rank_batch=1024,
        sharding="row" if rows else ",".join(["table", *(f"{name}=column" for name in COLUMNS)]),
        all_to_all="fp16",
        pipeline=False,
        overlap="on",
        balance=False,
        dedup=dedup,
    )
    return predict(reference_plan(), ranks, device, parallelism=parallelism)


def reference_points() -> list[Point]:
    plans = {"b200": reference_on(B200), "mi350x": reference_on(MI350X)}
    points = []
    for name, trace in TRACES.items():
        plan = plans[name]
        exposed = {part: round(1e3 * seconds, 1) for part, seconds in plan.step.exposed.items() if seconds > 1e-4}
        label = f"8 {name}, traced"
        points.append(_step("reference, steps", label, plan, sum(trace.values()), fitted="partly", exposed_ms=exposed))
        points += _trace_points(name, plan, trace)
    label = "8 mi350x, logged without stalls"
    points.append(_step("reference, steps", label, plans["mi350x"], 654.0, fitted="partly"))
    for name, ms in (("b200", 631.7), ("mi350x", 760.6)):
        label, factor = f"8 {name}, with stalls", PUBLISHED_STALLS.mean
        points.append(_step("reference, logged", label, plans[name], ms, factor=factor, fitted="partly"))
    for ranks, samples in ((8, 11_100), (16, 21_500), (32, 40_400)):
        plan = reference_on(MI355X, ranks, rows=ranks > 8)
        label, factor = f"{ranks} mi355x, with stalls", PUBLISHED_STALLS.mean
        points.append(_step("reference, logged", label, plan, 1024e3 * ranks / samples, factor=factor))
    for ranks, before, after in ((8, 941.6, 805.7), (16, 1108.0, 818.0)):
        with_, without = (reference_on(MI350X, ranks, dedup=on, rows=True).step.value for on in (True, False))
        name = f"dedup, {ranks // 8} x 8 mi350x, time with over without"
        ratio = Point("reference, scaling", name, with_ / without, after / before, "published", unit="x")
        points.append(ratio)
    return points


def target_points() -> list[Point]:
    """Hours to the target of the published logs: as a plan prints them, and with the start-up and the evaluations of
    these runs, which have one after every block."""
    workload, points = reference_plan(), []
    assert workload.evaluations is not None
    every_block = replace(workload.evaluations, first=lambda batch: 0)
    logged = Spread(*3 * [workload.startup_s.most])
    for ranks, evaluation_s, low, mean, high in PUBLISHED_HOURS:
        plan = reference_on(MI355X, ranks, rows=ranks > 8)
        samples = target.samples_to_target(workload.published_samples, plan.global_batch)
        assert samples is not None
        for kind, name, evaluations, startup in (
            ("reference, range of hours", "as planned", workload.evaluations, workload.startup_s),
            ("reference, hours to the target", "evaluations and start-up as published", every_block, logged),
        ):
            training = target.training(
                samples,
                plan.step,
                target.forward_seconds(plan.step),
                plan.global_batch,
                evaluations=evaluations,
                startup=startup,
                stalls=workload.stalls,
            )
            hours = training.seconds.times(1 / 3600)
            each = training.evaluations_seconds / training.evaluations
            facts = {"known_range": [low, high], "evaluation_s": round(each, 1), "published_evaluation_s": evaluation_s}
            label = f"{ranks} mi355x, hours to the target, {name}"
            points.append(Point(kind, label, hours.value, mean, "published logs", "partly", hours.factors, "h", facts))
    return points


def _trace_points(name: str, plan: Prediction, trace: Mapping[str, float]) -> list[Point]:
    """Which kinds of work the prediction is wrong about."""
    device = {"b200": B200, "mi350x": MI350X}[name]
    flops = sum(part.flops for label, part in plan.work.parts(1024).items() if not label.startswith("attention"))
    late = plan.step.exposed["late ranks"]
    messages = sum(seconds for part, seconds in plan.step.exposed.items() if "all-" in part)
    low, high = error_band(device, plan.ranks)
    # A rank with the most work waits for nobody, one with the least twice as long as the mean.
    bands = {"exposed messages": (low * messages / (messages + late), (high * messages + 2 * late) / (messages + late))}
    planned_s = {
        "GEMM": flops / device.product_rate("bfloat16"),
        "idle": plan.step.exposed["transfer"],
        "exposed messages": messages + late,
    }
    planned_s["other kernels"] = plan.step.value - sum(planned_s.values())
    shaped = {"b200": ("GEMM", "idle"), "mi350x": ("GEMM",)}[name]
    return [
        Point(
            "reference, kinds of work",
            f"8 {name}, {label}",
            1e3 * planned_s[label],
            ms,
            "published",
            "wholly" if label in shaped else "",
            bands.get(label),
        )
        for label, ms in trace.items()
    ]


def _step(
    kind: str,
    name: str,
    plan: Prediction,
    ms: float,
    *,
    factor: float = 1.0,
    fitted: Literal["", "partly"] = "",
    **conditions: Any,
) -> Point:
    return Point(
        kind, name, 1e3 * factor * plan.step.value, ms, "published", fitted, plan.step.factors, conditions=conditions
    )
