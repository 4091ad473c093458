"""A result as text in a terminal: the tables and sentences of its page, without the figures."""

from __future__ import annotations

from pathlib import Path

from ..measure.profile_records import Profile
from ..runs.report.formats import component, percent, spread, throughput, time, whole_time
from ..runs.report.quality_sections import certainty
from ..runs.report.sections import measured_steps, quality_table, target_sentence, unsteady_steps
from ..runs.report.step_sections import headline
from ..runs.report.text import render_block
from ..runs.result import Data, Performance, Result
from ..runs.resume import change_text


def summary(result: Result, folder: Path, profile: Profile | None = None) -> str:
    data = result.data
    synthetic = " (synthetic)" if data.synthetic else ""
    trials = result.quality.seeds
    seeds = f"seed {trials[0].seed}" if len(trials) == 1 else f"{len(trials)} seeds"
    rows = f"{data.train_rows:,} training rows, {data.valid_rows:,} scored, {seeds}"
    lines = [
        "",
        f"{result.workload} on {data.name}{synthetic}, split {data.split}: {rows}",
        *_skipped(data),
        "",
    ]
    lines += [*render_block(quality_table(result)), *(f"  {sentence}" for sentence in certainty(result))]
    lines += [f"  warning: {text}" for text in result.quality.warnings]
    lines += [f"  {target_sentence(result)}", ""]
    lines += [f"  changed {change_text(change)}" for change in result.provenance.changes]
    lines += _performance(result.performance)
    if profile:
        lines += _measured(result.performance, profile)
    return "\n".join([*lines, f"  run     {folder}"])


def _skipped(data: Data) -> list[str]:
    reasons = data.skipped or {}
    if not reasons:
        return []
    listed = ", ".join(f"{name} {count:,}" for name, count in reasons.items())
    return [f"skipped lines of the log: {sum(reasons.values()):,} ({listed})"]


def _measured(performance: Performance, profile: Profile) -> list[str]:
    """What was measured after training: parts of a step, the verdict with its sentences, and every experiment."""
    shares = sorted((performance.budget or {}).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{component(name)} {percent(share)}" for name, share in shares)
    lines = [f"  measured after training: {measured_steps(profile)}", f"  budget  {parts}"]
    unsteady = unsteady_steps(performance, profile)
    lines += [f"          {unsteady}"] if unsteady else []
    verdict = profile.verdict
    lines += [f"  limit   {headline(verdict)}"]
    lines += [f"          {sentence}" for sentence in verdict.because[1:]]
    lines += [f"          doubt: {doubt}" for doubt in verdict.doubts]
    for row in profile.experiments:
        if row.outcome != "not run":
            lines.append(f"          {row.name}: expected {row.expected}, measured {row.measured} ({row.outcome})")
    return lines


def _performance(performance: Performance) -> list[str]:
    step, steady, overall = performance.step_ms, performance.steady, performance.overall
    times = "step time not measured: too few steps"
    if step:
        times = f"{time(step.p50)} per step (p20 – p80: {spread(step)}, {performance.steps_timed:,} steps)"
    lines = [f"  speed   {throughput(steady)} steady, {times}, {performance.device}"]
    if performance.difference:
        lines.append(f"          steady is {performance.difference}")
    if overall:
        lines.append(f"          {throughput(overall)} overall, in {whole_time(overall)}")
    return lines
