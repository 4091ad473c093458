"""The sections of a run: quality, its steps, hot and cold ids, curves, provenance, config, reproduction."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from msgspec import structs

from ...config import flatten
from ...measure.profile_records import Profile
from ...measure.sections import roofline
from ...train.config import CHOOSING, RANKED, VALIDATION, baseline_to_beat, leading
from ..result import Performance, Quality, Result
from ..resume import change_text, is_free, repeatable
from ..schemas import Scores
from . import curves, plots, quality_sections
from . import formats as fmt
from .blocks import Block, Cell, Code, Figure, Section, Table, Text, cells, definitions
from .formats import NONE, NOT_MEASURED, baseline, count, metric
from .plots import from_profile
from .profile_report import step_sections_of
from .reading import Reading
from .step_sections import keyed

CURVES = ("auc", "accuracy", "log_loss", "ndcg_10")
"""Metrics over the steps; the first that was evaluated is drawn."""
UNSTEADY = 1.25
"""Ratio of the step times of training and profile above which the page warns."""


def lowest(quality: Quality) -> dict[str, float]:
    """The smallest value of each metric that meets the target."""
    named = {"accuracy": quality.target.accuracy, "auc": quality.target.auc}
    target = {name: bound for name, bound in named.items() if bound is not None}
    beat = baseline_to_beat(quality.target.beat, quality.baselines)
    if beat:
        name = leading(quality.metrics)
        target[name] = max(quality.baselines[beat][name], target.get(name, 0.0))
    return target


def target_text(result: Result) -> str:
    """What had to be reached; empty if no target was set."""
    target, baselines = result.quality.target, result.quality.baselines
    beat = baseline_to_beat(target.beat, baselines)
    name = leading(result.quality.metrics)
    parts = [f"{metric(name)} above {baseline(beat)} ({baselines[beat][name]:.4f})"] if beat else []
    named = {"accuracy": target.accuracy, "auc": target.auc}
    parts += [f"{metric(name)} at least {bound:g}" for name, bound in named.items() if bound is not None]
    return " and ".join(parts)


def target_sentence(result: Result) -> str:
    text = target_text(result)
    met = "met" if result.quality.met else "missed"
    place = quality_sections.standing_text(result)
    return f"Target: {text}; {met}{f', {place}' if place else ''}." if text else "No target set."


def seeds_text(result: Result) -> str:
    seeds = [entry.seed for entry in result.quality.seeds]
    if len(seeds) == 1:
        return f"with one seed ({seeds[0]})"
    return f"mean ± standard deviation over {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}"


def quality_table(result: Result) -> Table:
    """The metrics of the model above those of the baselines."""
    part, data = result.quality, result.data
    names = [name for name in part.metrics if name not in CHOOSING]
    own = [Cell(f"{part.metrics[name]:.4f}", "strong", second_line=_deviation(part.spread.get(name))) for name in names]
    rows = [(Cell(result.workload, "strong", "accent"), *own)]
    for rule, metrics in reversed(part.baselines.items()):
        values = [f"{metrics[name]:.4f}" if name in metrics else NONE for name in names]
        rows.append(cells(Cell(baseline(rule), swatch="other"), *values))
    note = (
        f"Scored on {count(data.valid_rows)} {_scored_rows(part)}, "
        f"{seeds_text(result)}; trained on {count(data.train_rows)} rows."
    )
    if data.baseline_rows:
        note += f" The baselines were fitted on {count(data.baseline_rows)} of them, at equal distances."
    if "planted" in part.baselines:
        note += " The synthetic data was drawn from its true model: no model can do better."
    return Table(("", *(metric(name) for name in names)), rows, note)


def _scored_rows(part: Quality) -> str:
    if VALIDATION in part.metrics:
        return "held-out rows after the epoch with the lowest log loss on others, inside the training time"
    if RANKED in part.metrics:
        return "test items after the epoch with the highest NDCG@10 of validation items"
    return "validation rows after the last step (not the best epoch)"


def _deviation(value: float | None) -> str:
    return "" if value is None else f"± {value:.4f}"


def quality(run: Reading, key: str) -> list[Section]:
    part, target = run.result.quality, lowest(run.result.quality)
    blocks: list[Block] = [Text(target_sentence(run.result), "lead")]
    blocks += [Text(sentence) for sentence in quality_sections.auc_certainty(run.result)]
    blocks += quality_sections.warnings(run.result)
    bars = [_own_bar(run)]
    intervals = {name: {"auc": ends} for name, ends in (part.baseline_intervals or {}).items()}
    bars += [
        plots.Bar(baseline(rule), metrics, interval=intervals.get(rule, {}))
        for rule, metrics in reversed(part.baselines.items())
    ]
    named = ("auc", "accuracy") if "auc" in part.metrics else ("ndcg_10", "hit_rate_10")
    panels = [(name, metric(name)) for name in named if all(name in bar.values for bar in bars)]
    if panels:
        listed = "; ".join(
            f"{title}: " + ", ".join(f"{bar.label} {bar.values[name]:.3f}" for bar in bars) for name, title in panels
        )
        caption = "Dashed: the target." if target else ""
        if all(min(bar.values[name] for bar in bars) >= 0.5 for name, _ in panels):
            caption = f"Bars start at 0.5, the score of guessing. {caption}"
        if len(part.seeds) > 1:
            caption += " Open dots: single seeds."
        if part.interval:
            caption += " Lines on the bars of the AUC: 95 % intervals."
        draw = lambda: plots.quality(bars, panels, target)  # noqa: E731
        blocks.append(Figure(f"{key}-quality", f"Quality beside baselines. {listed}", caption, draw))
    more = quality_sections.details(run.result, key)
    return [
        Section("quality", "Quality", blocks),
        Section("qualities", "Quality in detail", [quality_table(run.result), *more]),
    ]


def _own_bar(run: Reading) -> plots.Bar:
    part = run.result.quality
    seeds = part.seeds if len(part.seeds) > 1 else []
    each = {name: [entry.metrics[name] for entry in seeds if name in entry.metrics] for name in part.metrics}
    interval = {"auc": part.interval} if part.interval else {}
    return plots.Bar(run.workload, part.metrics, own=True, spread=part.spread, seeds=each, interval=interval)


def step_sections(run: Reading, key: str) -> list[Section]:
    """What limits a step and where it spends its time; none where that was not measured."""
    if run.profile is None:
        return []
    profile = structs.replace(run.profile, roofline=roofline(run.profile, run.peaks) if run.peaks else None)
    measured, _ = step_sections_of(profile, run.peaks, key)
    return [
        replace(section, blocks=[*_training_steps(run, run.profile), *section.blocks])
        if section.key == "budget"
        else section
        for section in measured
    ]


def _training_steps(run: Reading, profile: Profile) -> list[Block]:
    """The steps of the training beside those of the profile."""
    performance, step = run.result.performance, run.result.performance.step_ms
    lead = f"Step time: {NOT_MEASURED}, too few steps."
    if step:
        samples, times = (
            f"{count(profile.batch_size)} samples",
            f"{fmt.time(step.p50)} (p20 – p80: {fmt.spread(step)})",
        )
        lead = f"A training step of {samples} takes {times}. Measured after it: {measured_steps(profile)}."
    blocks: list[Block] = [Text(lead, "lead")]
    if performance.overall:
        blocks.append(Text(f"The whole training took {fmt.whole_time(performance.overall)}."))
    if performance.difference:
        blocks.append(Text(f"Steady throughput is {performance.difference}.", "warning"))
    unsteady = unsteady_steps(performance, profile)
    return [*blocks, *([Text(unsteady, "warning")] if unsteady else [])]


def measured_steps(profile: Profile) -> str:
    """The steps behind the budget and behind the verdict, which are not those of the training."""
    observed = profile.observed
    return (
        f"parts of {count(profile.steps)} steps with timers ({fmt.time(profile.step_ms.p50)} each, "
        f"{fmt.time(profile.overhead.plain_ms)} without), limit: from "
        f"{count(observed.steps.plain if observed.steps else None)} observed steps "
        f"(median {fmt.time(observed.step_ms.p50)})"
    )


def unsteady_steps(performance: Performance, profile: Profile) -> str | None:
    """A warning if steps took clearly longer or shorter in the profile than in training."""
    trained = performance.step_ms
    if not trained:
        return None
    profiled = profile.overhead.plain_ms
    if max(profiled, trained.p50) <= UNSTEADY * min(profiled, trained.p50):
        return None
    return (
        f"A step took {fmt.time(trained.p50)} in training but {fmt.time(profiled)} in the profile, without timers. "
        "Something else slowed one of them down, so the shares may be wrong."
    )


def pair(run: Reading) -> list[Section]:
    """The same step with hot and with cold ids; no section for a run without this comparison."""
    if run.pair is None:
        return []
    hot, cold, ids = run.pair.hot, run.pair.cold, run.pair.ids
    hot_ms, cold_ms = ({part.name: part.ms.p50 for part in from_profile(arm) if part.ms} for arm in (hot, cold))
    rows = [(Cell("whole step", "strong"), *_pair_cells(hot.step_ms.p50, cold.step_ms.p50))]
    for name in dict.fromkeys([*hot_ms, *cold_ms]):
        rows.append((keyed(name), *_pair_cells(hot_ms.get(name), cold_ms.get(name))))
    note = (
        f"Median times of the same model and shapes, with new ids every step: hot ids of {count(ids.hot)} rows, "
        f"cold ids of {count(ids.cold)}."
    )
    table = Table(("part", "cold / hot", "hot", "cold"), rows, note)
    return [Section("pair", "Hot and cold ids", [Text(run.pair.verdict, "lead"), table])]


def _pair_cells(hot: float | None, cold: float | None) -> tuple[Cell, ...]:
    return cells(fmt.gain(cold / hot if hot and cold else None), fmt.time(hot), fmt.time(cold))


def training(run: Reading, key: str) -> Section:
    events = run.events
    if not events.losses and not events.metrics:
        return Section("training", "Training", [Text("events.jsonl holds neither losses nor metrics.", "note")])
    name = next((name for name in CURVES if events.history(name)), "auc")
    title, bound = f"validation {metric(name)}", lowest(run.result.quality).get(name)
    curves_by_title = {"training loss": events.losses, "gradient norm": events.norms, title: events.history(name)}
    panels = {panel: series for panel, series in curves_by_title.items() if series}
    steps = sum(len(series) for series in events.losses.values())
    ends = [f"seed {seed}: {series[-1][1]:.3f} after step {series[-1][0]:,}" for seed, series in events.losses.items()]
    seeds = "1 seed" if len(events.losses) == 1 else f"{len(events.losses)} seeds"
    caption = (
        f"Loss of {count(steps)} steps, {seeds}. Lines are smoothed means of at most "
        f"{curves.GROUPS} groups of steps, bands reach from the smallest to the largest value in a group."
    )
    if events.norms:
        caption += " The gradient norm is that of the dense parameters, over all ranks and before clipping."
    label = f"Training loss ({'; '.join(ends)}), gradient norm and {title} over the steps"
    draw = lambda: curves.training(panels, {} if bound is None else {title: bound})  # noqa: E731
    blocks: list[Block] = [Figure(f"{key}-training", label, caption, draw)]
    names = [name for name in run.result.quality.metrics if any(name in event.metrics for event in events.metrics)]
    if events.metrics and names:
        rows = [
            cells(event.seed, f"{event.step:,}", NONE if event.epoch is None else event.epoch, *_scores(event, names))
            for event in events.metrics
        ]
        head = ("seed", "step", "epoch", *(metric(name) for name in names))
        blocks.append(Table(head, rows, "On the validation rows.", fold=f"Every evaluation ({len(rows)})"))
    return Section("training", "Training", blocks)


def _scores(event: Scores, names: list[str]) -> list[str]:
    values = [event.metrics.get(name) for name in names]
    return [f"{value:.4f}" if isinstance(value, float) else NONE for value in values]


def provenance(run: Reading) -> Section:
    origin, data = run.result.provenance, run.result.data
    commit = origin.commit or "none: recperf did not run from a checkout"
    if origin.dirty:
        commit += ", with uncommitted changes"
    rows: list[tuple[str, str | Cell]] = [
        ("run", Cell(run.name, "code")),
        ("commit", Cell(commit, "code")),
        ("data", f"{data.name}, {count(data.rows)} rows, split {data.split}"),
        *((f"skipped lines: {why}", count(lines)) for why, lines in (data.skipped or {}).items()),
        ("data digest (SHA-256)", Cell(origin.data_digest, "code")),
        ("first seed", str(origin.seed)),
        ("started – ended (UTC)", f"{fmt.timestamp(origin.started)} – {fmt.timestamp(origin.ended)}"),
        ("interrupted and resumed", f"{origin.resumes} times" if origin.resumes else "never"),
        *([("started from", origin.started_from.text)] if origin.started_from else []),
        *(("changed when resumed", change_text(change)) for change in origin.changes),
        ("device", run.result.performance.device),
        *((f"setting: {name}", text) for name, text in run.result.performance.settings.items()),
        ("packages", ", ".join(f"{name} {version}" for name, version in origin.packages.items())),
        ("machine fingerprint", Cell(origin.machine, "code")),
        *((f"machine: {name}", fmt.setting(value)) for name, value in _machine(run.machine).items()),
    ]
    if run.peaks:
        quick = ", quick mode" if run.peaks.quick else ""
        when = fmt.timestamp(run.peaks.measured)
        rows.append(("ceilings", f"measured {when}, {run.peaks.threads} threads{quick}"))
    else:
        rows.append(("ceilings", f"{NOT_MEASURED}; measure them with: {run.peaks_command}"))
    return Section("provenance", "Where this comes from", [definitions(rows)])


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in facts.items() if key not in ("fingerprint", "caches", "gpus") and value}
    caches = (facts.get("caches") or {}).items()
    shown["caches"] = ", ".join(f"{level} {fmt.size(count)}" for level, count in caches) or None
    shown["GPUs"] = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or []) or None
    return flatten(shown)


def config(run: Reading) -> Section:
    rows = [cells(Cell(name, "code"), Cell(fmt.setting(value), "code")) for name, value in flatten(run.config).items()]
    table = Table(("field", "value"), rows, "As saved in config.json.", fold=f"All {len(rows)} fields", left=(1,))
    return Section("config", "Config", [table])


def reproduce(run: Reading) -> Section:
    origin = run.result.provenance
    blocks: list[Block] = []
    if origin.commit:
        blocks.append(Code("The code", f"git checkout {origin.commit}"))
    if origin.dirty:
        text = "The checkout had uncommitted changes, so the commit alone may not reproduce the run."
        blocks.append(Text(text, "warning"))
    changes = origin.changes
    if not repeatable(changes, (entry.seed for entry in run.result.quality.seeds)):
        listed = "; ".join(change_text(change) for change in changes if not is_free(change.field))
        text = f"No single command repeats this run, because its config was changed on the way: {listed}."
        blocks.append(Text(f"{text} The command below trains with the final config from the first step.", "warning"))
    command = f"recperf run --config {shlex.quote(str(run.folder / 'config.json'))}"
    blocks.append(Code("The run, in a new folder", command))
    typed = "The command that finished it" if origin.resumes else "The command line of this run"
    blocks.append(Code(typed, shlex.join(origin.command)))
    return Section("reproduce", "Reproduce it", blocks)
