"""Run folders written by hand, in milliseconds: what a training leaves behind, without the training."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from recperf.jsonfile import as_json, require, sealed
from recperf.measure.limit_kinds import LIMITS
from recperf.measure.profile import KIND, SCHEMA
from recperf.runs.compare_report import html_of_runs
from recperf.runs.derive import add_detail
from recperf.runs.evidence import Evidence, seal
from recperf.runs.report import page, run_report
from recperf.runs.result import Quality, Target
from recperf.runs.schemas import SavedScores
from recperf.tasks import CLICK_LABELS

MACHINE = {
    "system": "Linux",
    "architecture": "aarch64",
    "cpu": "Neoverse-N1",
    "cores": 2,
    "caches": {"L1": 65536, "L2": 1 << 20, "L3": 1 << 25},
    "memory_gib": 24,
    "gpus": [],
    "torch": "2.13.0",
    "fingerprint": "0123456789abcdef",
}

CONFIG = {
    "data": {"source": "embedded", "split": "random", "path": None},
    "model": {"rows": [944, 1683, 22], "dim": 8, "interaction": "concat"},
    "train": {"epochs": 4, "batch_size": 256, "learning_rate": 0.005},
    "seed": 42,
    "seeds": 1,
}

STEPS = 240


PARTS = {
    "data": 0.047, "bottom": 0.078, "embedding": 0.071, "interaction": 0.038, "top": 0.1, "loss": 0.063,
    "loss_backward": 0.032, "top_backward": 0.231, "interaction_backward": 0.062, "embedding_backward": 0.074,
    "bottom_backward": 0.12, "dense_update": 0.062, "sparse_update": 0.099, "other": 0.08,
}  # fmt: skip
"""Milliseconds of each part of a step."""
FLOPS = {"bottom": 1e5, "top": 8e5, "loss": 2560, "top_backward": 1.6e6, "bottom_backward": 1.6e5, "dense_update": 2e4}


def phase(name: str) -> str:
    last = name.rpartition("_")[2]
    if last == "exchange":
        return "communication"
    if last in ("backward", "update", "data"):
        return last
    return "forward" if name in ("bottom", "embedding", "interaction", "top", "loss") else "other"


def spread(value: float, unit: str | None = None, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"p20": value * 0.97, "p50": value, "p80": value * 1.04, **more}
    return {**found, "n": 25, "unit": unit} if unit else found


def profile(
    parts: dict[str, float] = PARTS, flops: dict[str, float] = FLOPS, *, device: str = "cpu", **fields: Any
) -> dict[str, Any]:
    """What the profile of any workload has, that of a run too; `fields` replace some of it."""
    made = {**step(device, spread(sum(parts.values()))), "workload": budget(parts, flops, device=device)}
    for name, value in fields.items():
        (made["workload"] if name in made["workload"] or name == "precision" else made)[name] = value
    return made


def budget(parts: dict[str, float] = PARTS, flops: dict[str, float] = FLOPS, *, device: str = "cpu") -> dict[str, Any]:
    """The time of a step by part."""
    total = sum(parts.values())
    return {
        "device": device,
        "steps": 64,
        "warmup": 16,
        "batch_size": 256,
        "step_ms": spread(total),
        "overhead": {"plain_ms": total * 0.97, "clocked_ms": total, "share": 1 / 0.97 - 1},
        "components": [
            {"name": name, "phase": phase(name), "ms": spread(ms), "share": ms / total, "flops": flops.get(name),
             "bytes": 2e7 if name in flops else None}
            for name, ms in parts.items()
        ],
        "ids": {"lookups": 768.0, "unique_rows": 512.5, "row_bytes": 32, "working_set_bytes": 84_768,
                "touched_bytes": 61_320},
        "threads": 2,
    }  # fmt: skip


def timeline(us: float, device: str) -> dict[str, Any]:
    """A traced step: a wait for input, calls inside each other, and work of a device, where there is one."""
    calls: list[dict[str, Any]] = [
        {"lane": "input", "start_us": 0.0, "us": 0.05 * us, "name": "wait for input", "limit": "input"}
    ]
    for index in range(16):
        start = (0.06 + 0.058 * index) * us
        calls.append({"lane": "host", "start_us": start, "us": 0.05 * us, "operator": 0})
        calls.append({"lane": "host", "start_us": start + 0.01 * us, "us": 0.02 * us, "name": "aten::mm"})
        if device != "cpu":
            calls.append({"lane": "device", "start_us": start + 0.03 * us, "us": 0.04 * us, "operator": 0, "name": "k"})
    return {"us": us, "calls": calls}


def step(device: str, step_ms: dict[str, Any], limit: str = "dispatch", sentence: str = "") -> dict[str, Any]:
    """What the profile of any step has."""
    shares = dict.fromkeys(LIMITS, 0.0) | {"python": 0.2, "compute": 0.15, "input": 0.05}
    shares[limit if limit in LIMITS else "cache"] = 0.6
    ms = step_ms["p50"]
    operator = {
        "name": "aten::addmm", "part": "top", "kind": "product", "calls": 83.0, "python_calls": 83.0, "ms": 0.7 * ms,
        "precision": "float32", "flops": 1e6, "bytes": 1e5, "limits": {"dispatch": 0.5 * ms, "compute": 0.2 * ms},
        "random_ms": 0.0, "note": "",
    }  # fmt: skip
    verdict = {
        "limit": limit, "share": 0.6, "confidence": "high", "second": "python",
        "because": [sentence or "Operator overhead takes 60% of the step: 83 operator calls."], "doubts": [],
    }  # fmt: skip
    experiment = {"name": "half the batch", "expected": "0.90 to 0.98", "measured": "0.95 times", "outcome": "agrees"}
    return {
        "kind": KIND, "schema": SCHEMA, "verdict": verdict, "shares": shares, "operators": [operator], "advice": [],
        "step_ms": {name: step_ms[name] for name in ("p20", "p50", "p80")}, "notes": [],
        "timeline": timeline(1100 * ms, device),
        "parts": [{"name": "top", "ms": 0.7 * ms, "share_of_operators": 1.0}], "experiments": [experiment],
        "waits": {"input": 0.05 * ms, "python": 0.25 * ms},
        "steps": {"seen": 40, "plain": 30, "traced": 4, "counted": 3}, "device": device, "threads": 2,
        "other_work": 0.02, "overhead": {"ns": 9000.0, "share": 0.002}, "machine": MACHINE, "ceilings": None,
        "preempted": 0.0,
    }  # fmt: skip


def peaks() -> dict[str, Any]:
    def rows(ns: float) -> list[dict[str, Any]]:
        return [
            {
                "row_bytes": size,
                "ids": 65536,
                "method": "numpy.take",
                "ns": spread(ns * size / 32, "ns a row"),
            }
            for size in (32, 256, 2048)
        ]

    points = [
        {**spread(12 + 6 * math.log2(1 + size / (1 << 20)), "ns a lookup"), "table_bytes": size}
        for size in (1 << power for power in range(15, 30))
    ]
    return {
        "schema": 2,
        "machine": MACHINE,
        "measured": "2026-11-15T03:48:05+00:00",
        "quick": True,
        "seconds": 16.0,
        "threads": 2,
        "other_work": 0.01,
        "huge_pages": "madvise",
        "notes": [],
        "gemm": {"float32": spread(7e10, "FLOP/s", shape=[256] * 3)},
        "copy": spread(6e10, "B/s", buffer_bytes=1 << 28),
        "read": spread(3.8e10, "B/s", buffer_bytes=1 << 29),
        "update": spread(5e10, "B/s", buffer_bytes=1 << 29),
        "first_touch": spread(2e9, "B/s", buffer_bytes=1 << 24),
        "cached": spread(7e10, "B/s", buffer_bytes=1 << 20),
        "gather": {
            "cache": {"table_bytes": 1 << 22, "rows": rows(7.0)},
            "dram": {"table_bytes": 1 << 29, "rows": rows(20.0)},
        },
        "knee": {
            "row_bytes": 256,
            "threads": 1,
            "lookups": 16384,
            "method": "numpy.take",
            "points": points,
            "bytes": 11 << 20,
        },
        "calls": {"elementwise": spread(2600.0, "ns")},
        "other_threads": {},
        "gpu": None,
    }


def pair() -> dict[str, Any]:
    return {
        "schema": 1,
        "hot": budget(),
        "cold": budget({**PARTS, "embedding": 4.1 * PARTS["embedding"]}),
        "ids": {"hot": 1682, "cold": 2_000_000},
        "ratio": {"embedding": 4.1, "step": 1.6},
        "verdict": "Cold ids make the same lookups 4.1 times slower.",
    }


def scores(seeds: int, auc: float) -> dict[str, Any]:
    """What scores.json of such a run holds; a baseline and the model miss alike in each replicate."""

    def sampled(value: float, ndcg: float, **more: Any) -> dict[str, Any]:
        off = [0.01 * math.sin(i) for i in range(40)]
        ranked = {
            "metrics": {"hit_rate_10": 2 * ndcg, "ndcg_10": ndcg, "mrr": ndcg},
            "segments": {"new_users": {"hit_rate_10": 0.02, "ndcg_10": 0.01, "mrr": 0.01}},
            "ndcg_replicates": [ndcg + one for one in off],
        }
        replicates, segments = [value + one for one in off], {"new_users": value - 0.02, "the_rest": value}
        sampled = {"leading": value, "replicates": {"auc": replicates}, "segments": segments}
        return {**sampled, **{name: ranked if name == "ranking" else one for name, one in more.items()}}

    bins = [{"predicted": 0.05 + 0.1 * i, "observed": 0.04 + 0.1 * i, "rows": 2000} for i in range(10)]
    rules = {"majority": 0.6, "item_bias": 0.68, "user_item_bias": 0.77}
    return {
        "rows": 20_000, "rows_digest": "d", "by": "users", "units": 943,
        "segments": {"new_users": {"rows": 2087, "at_most": 36}, "the_rest": {"rows": 17_913, "at_most": 0}},
        "ranking": {"users": 116, "catalogue": 1653, "negatives": 0,
                    "baselines": {"popularity": sampled(0.6, 0.06, ranking=None)["ranking"]}},
        "baselines": {name: sampled(value, 0.0) for name, value in rules.items()},
        "seeds": {str(42 + i): sampled(auc + 0.001 * i, 0.02, rows_digest="d", calibration=bins, ranking=None)
                  for i in range(seeds)},
    }  # fmt: skip


def quality_of(scores: dict[str, Any], auc: float) -> Quality:
    """The quality of a result with this content of scores.json."""
    none = Target(beat=None, accuracy=None, auc=None)
    quality = Quality(metrics={"auc": auc}, spread={}, seeds=[], target=none, met=True, baselines={})
    add_detail(CLICK_LABELS, quality, require(scores, SavedScores, Path("scores.json"), what="is damaged"))
    return quality


def details(scores: dict[str, Any], auc: float) -> dict[str, Any]:
    plain = ("metrics", "spread", "seeds", "target", "met", "baselines")
    return {name: value for name, value in as_json(quality_of(scores, auc)).items() if name not in plain}


def result(name: str, workload: str, seeds: int, auc: float) -> dict[str, Any]:
    def metrics(value: float) -> dict[str, float]:
        return {"accuracy": value - 0.08, "auc": value, "log_loss": 1.33 - value, "calibration": 1.01}

    each = [{"seed": 42 + i, "metrics": metrics(auc + 0.002 * i - 0.001 * (seeds - 1))} for i in range(seeds)]
    budget = {"data": 0.06, "embedding": 0.06, "bottom": 0.06, "interaction": 0.03, "top": 0.08, "loss": 0.05}
    return {
        "schema": 4,
        "workload": workload,
        "run": name,
        "quality": {
            "metrics": metrics(auc),
            "spread": dict.fromkeys(metrics(auc), 0.002) if seeds > 1 else {},
            "seeds": [{**one, "best": {"step": 9, "epoch": 1, "metrics": one["metrics"]}} for one in each],
            "target": {"beat": "user_item_bias", "accuracy": None, "auc": None},
            "met": auc > 0.77,
            "baselines": {"majority": metrics(0.6), "item_bias": metrics(0.68), "user_item_bias": metrics(0.77)},
            **(details(scores(seeds, auc), auc) if seeds > 1 else {}),
        },
        "performance": {
            "device": "cpu",
            "settings": {"threads": "1: products too small to share between threads"},
            "steady": {"samples_per_s": 215051.9, "samples": 153_600, "steps": 600, "seconds": 0.714},
            "overall": {
                "samples_per_s": 160000.0,
                "samples": 160_000,
                "steps": 625,
                "seconds": 1.0,
                "steady_s": 0.714,
                "warmup_s": 0.036,
                "evaluation_s": 0.2,
                "save_s": 0.05,
                "shuffle_s": 0.01,
            },
            "step_ms": spread(1.12),
            "difference": None,
            "budget": {**budget, "backward": 0.46, "update": 0.13, "other": 0.07},
        },
        "data": {
            "name": "movielens-like",
            "digest": "e0" * 32,
            "rows": 100_000,
            "train_rows": 80_000,
            "valid_rows": 20_000,
            "split": "random",
            "synthetic": True,
        },
        "provenance": {
            "commit": "4" * 40,
            "dirty": False,
            "packages": {"python": "3.11.7", "recperf": "0.1.0", "torch": "2.13.0"},
            "machine": MACHINE["fingerprint"],
            "seed": 42,
            "data_digest": "e0" * 32,
            "command": ["recperf", "run", workload],
            "started": "2026-11-15T03:47:11+00:00",
            "ended": "2026-11-15T03:47:16+00:00",
            "resumes": 0,
        },
    }


def events(seeds: int, steps: int) -> str:
    lines = []
    for seed in range(42, 42 + seeds):
        for step in range(1, steps + 1):
            loss = 0.5 + 0.2 / step + 0.03 * math.sin(step * seed)
            lines.append({"kind": "step", "t": step / 100, "seed": seed, "step": step, "loss": loss})
            if step % (steps // 4) == 0:
                score = 0.82 - 1 / (step + 20)
                lines.append(
                    {"kind": "metric", "t": step / 100, "seed": seed, "step": step, "epoch": 4 * step // steps,
                     "split": "valid", "accuracy": score - 0.08, "auc": score, "log_loss": 0.52}
                )  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_run(
    folder: Path,
    *,
    workload: str = "micro-dlrm",
    seeds: int = 1,
    steps: int = STEPS,
    auc: float = 0.8212,
    config: dict[str, Any] | None = None,
    measured: tuple[str, ...] = ("profile", "peaks", "pair"),
) -> Path:
    """A finished run; `measured` names the optional files it has."""
    folder.mkdir(parents=True)
    files = {
        "config": {"schema": 1, "workload": workload, "config": {**CONFIG, "seeds": seeds, **(config or {})}},
        "machine": MACHINE,
        "result": result(folder.name, workload, seeds, auc),
    }
    made = {"profile": profile, "peaks": peaks, "pair": pair}
    files |= {name: made[name]() for name in measured}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(sealed(value) if name == "profile" else value))
    (folder / "events.jsonl").write_text(events(seeds, steps))
    seal(folder)
    return folder


def page_of(*runs: Path) -> str:
    """The page of a run, or of two compared."""
    evidence = [Evidence(run) for run in runs]
    return html_of_runs(*evidence) if len(runs) > 1 else page.html_of(run_report.report(evidence[0], "r1"))


def change(folder: Path, name: str, path: str, value: Any) -> None:
    """Set one field of a file, given its dotted path."""
    content = changed(json.loads((folder / name).read_text()), path, value)
    if content.pop("seal", None):
        content = sealed(content)
    (folder / name).write_text(json.dumps(content))
    seal(folder)


def changed(content: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value of one field, given its dotted path; `...` removes the field."""
    content = copy.deepcopy(content)
    inner: Any = content
    *parents, last = path.split(".")
    for key in parents:
        inner = inner[int(key) if isinstance(inner, list) else key]
    if value is ...:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value
    return content
