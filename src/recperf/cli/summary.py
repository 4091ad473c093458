"""A result as a person reads it in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .terminal import table

NAMES = {
    "user_item_bias": "user + item bias",
    "item_bias": "item bias",
    "majority": "majority class",
    "popularity": "item popularity",
}


def summary(result: dict[str, Any], folder: Path, profile: dict[str, Any] | None = None) -> str:
    quality, data = result["quality"], result["data"]
    made_up = " (synthetic)" if data["synthetic"] else ""
    seeds = [entry["seed"] for entry in quality["seeds"]]
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {seeds[0]} to {seeds[-1]}"
    lines = [
        "",
        f"{result['workload']} on {data['name']}{made_up}, split {data['split']}: "
        f"{data['train_rows']:,} rows to train on, {data['valid_rows']:,} scored, {which}",
        *_skipped(data),
        "",
        _quality_table(result),
        f"  target: {_target(quality)}: {'met' if quality['met'] else 'MISSED'}",
        "",
    ]
    limit = [f"  limit   {_limit(profile['regime'])}"] if profile else []
    return "\n".join([*lines, *_performance(result["performance"]), *limit, f"  run     {folder}"])


def _skipped(data: dict[str, Any]) -> list[str]:
    kinds = data.get("skipped") or {}
    if not kinds:
        return []
    each = ", ".join(f"{name} {count:,}" for name, count in kinds.items())
    return [f"left out of the log: {sum(kinds.values()):,} lines ({each})"]


def _limit(regime: dict[str, Any]) -> str:
    """The verdict; an unclear one says so itself."""
    named = "" if regime["name"] == "unclear" else f"{regime['name']}: "
    return named + str(regime["sentence"])


def _quality_table(result: dict[str, Any]) -> str:
    quality = result["quality"]
    rows = [["", "accuracy", "AUC", "log loss", "calibration"]]
    shown = [(result["workload"], quality["metrics"], quality["spread"])]
    shown += [(NAMES.get(name, name), metrics, {}) for name, metrics in reversed(quality["baselines"].items())]
    for name, metrics, spread in shown:
        cells = [_spread(metrics[key], spread.get(key)) for key in ("accuracy", "auc", "log_loss")]
        rows.append([name, *cells, f"{metrics['calibration']:.3f}"])
    return table(rows)


def _spread(value: float, deviation: float | None) -> str:
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"


def _target(quality: dict[str, Any]) -> str:
    target, bounds = quality["target"], []
    if target["beat"]:
        bounds.append(f"AUC above {NAMES[target['beat']]} ({quality['baselines'][target['beat']]['auc']:.4f})")
    bounds += [
        f"{name} >= {target[key]:g}"
        for key, name in (("accuracy", "accuracy"), ("auc", "AUC"))
        if target[key] is not None
    ]
    return ", ".join(bounds) or "none"


def _performance(performance: dict[str, Any]) -> list[str]:
    step, rate, budget = performance["step_ms"], performance["samples_per_s"], performance["budget"]
    timed = "not measured: too few steps"
    if step:
        timed = (
            f"{step['p50']:.2f} ms a step (p20 {step['p20']:.2f}, p80 {step['p80']:.2f}, "
            f"{performance['steps_timed']:,} steps)"
        )
    speed = f", {rate:,.0f} samples/s warm-up included" if rate else ""
    parts = "not measured: too few steps"
    if budget:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in sorted(budget.items(), key=lambda kv: -kv[1]))
    return [f"  speed   {timed}{speed}, {performance['device']}", f"  budget  {parts}"]
