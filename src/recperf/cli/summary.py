"""A result as text in a terminal: the tables and sentences of its page, without the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runs.report.formats import component, count, percent, spread, time
from ..runs.report.sections import quality_table, target_sentence
from ..runs.report.step_sections import headline
from ..runs.report.text import render_block


def summary(result: dict[str, Any], folder: Path, profile: dict[str, Any] | None = None) -> str:
    data = result["data"]
    synthetic = " (synthetic)" if data["synthetic"] else ""
    trials = result["quality"]["seeds"]
    seeds = f"seed {trials[0]['seed']}" if len(trials) == 1 else f"{len(trials)} seeds"
    rows = f"{data['train_rows']:,} training rows, {data['valid_rows']:,} scored, {seeds}"
    lines = [
        "",
        f"{result['workload']} on {data['name']}{synthetic}, split {data['split']}: {rows}",
        *_skipped(data),
        "",
    ]
    lines += [*render_block(quality_table(result)), f"  {target_sentence(result)}", ""]
    lines += _performance(result["performance"])
    if profile:
        lines += _limit(profile)
    return "\n".join([*lines, f"  run     {folder}"])


def _skipped(data: dict[str, Any]) -> list[str]:
    reasons = data.get("skipped") or {}
    if not reasons:
        return []
    listed = ", ".join(f"{name} {count:,}" for name, count in reasons.items())
    return [f"skipped lines of the log: {sum(reasons.values()):,} ({listed})"]


def _limit(profile: dict[str, Any]) -> list[str]:
    """The verdict with its sentences, and every experiment."""
    verdict = profile["verdict"]
    lines = [f"  limit   {headline(verdict)}"]
    lines += [f"          {sentence}" for sentence in verdict["because"][1:]]
    for row in profile["experiments"]:
        if row["agrees"] is None:
            continue
        says = "agrees" if row["agrees"] else "disagrees"
        lines.append(f"          {row['name']}: expected {row['expected']}, measured {row['measured']} ({says})")
    return lines


def _performance(performance: dict[str, Any]) -> list[str]:
    step, rate, budget = performance["step_ms"], performance["samples_per_s"], performance["budget"]
    speed = parts = "not measured: too few steps"
    if step:
        speed = f"{time(step['p50'])} per step (p20 – p80: {spread(step)}, {performance['steps_timed']:,} steps)"
    if rate:
        speed += f", {count(rate)} samples/s including warm-up"
    if budget:
        shares = sorted(budget.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{component(name)} {percent(share)}" for name, share in shares)
    return [f"  speed   {speed}, {performance['device']}", f"  budget  {parts}"]
