"""The report of a run: quality, its steps, hot and cold ids, curves, provenance, config, reproduction."""

from __future__ import annotations

import shlex

from msgspec import structs

from ...config import flatten
from ...measure.limits import roofline
from ...measure.profile import StepProfile
from ...measure.profile_records import Pair, WorkloadFigures
from ...tasks import named
from ..evidence import Evidence, curve
from ..result import Result
from ..resume import change_text, is_free
from ..schemas import Scores
from . import charts, profile_report, quality_sections
from . import formats as fmt
from .blocks import Block, Cell, Code, Figure, Report, Section, Table, Text, arranged, cells, definitions
from .charts import in_order
from .formats import NONE, NOT_MEASURED, count, metric
from .quality_sections import left_out, limit_fact, needed, outcome, quality_fact
from .step_sections import advice_facts, headline, keyed

UNSTEADY = 1.25
"""Ratio of the step times of training and profile above which the page warns."""


def report(run: Evidence, key: str, *, short: bool = False) -> Report:
    """The report of a run; `short` leaves out the sections that do not belong below a comparison."""
    listed = [*quality_sections.sections(run.result), *step_sections(run)]
    if short:
        listed = [section for section in listed if section.key in ("timeline", "quality", "budget")]
    else:
        pairs = [Section("pair", "Hot and cold ids", pair_blocks(run.pair))] if run.pair else []
        listed += [*pairs, training(run), provenance(run), config(run)]
    return Report(
        key=key,
        title=run.workload,
        name=run.name,
        subtitle=" · ".join(_subtitle(run.result)),
        verdict=quality_fact(run.result),
        measured=True,
        picture=quality_sections.picture(run.result),
        command="" if run.profile else run.profile_command,
        facts=_facts(run),
        sections=arranged([*listed, reproduce(run)]),
    )


def _subtitle(result: Result) -> list[str]:
    """What was trained on, how often, and how the model stands."""
    data, overall, trials = result.data, result.performance.overall, len(result.quality.seeds)
    parts = [f"{data.name} (synthetic)" if data.synthetic else data.name]
    if overall:
        epochs = overall.samples / max(1, data.train_rows) / trials
        whole = epochs > 0.995 and abs(epochs - round(epochs)) < 0.005 * epochs
        amount = f"{epochs:,.0f} epoch{'s' * (epochs > 1.5)}" if whole else f"{overall.steps // trials:,} steps"
        parts.append(f"{amount}{f', {trials} seeds' if trials > 1 else ''}")
    return [*parts, *filter(None, [outcome(result)])]


def _facts(run: Evidence) -> list[tuple[str, str | Cell]]:
    result, performance = run.result, run.result.performance
    step = f"{fmt.time(performance.step_ms.p50)} a step" if performance.step_ms else "too few steps to time one"
    each = run.figures.communication.each if run.figures and run.figures.communication else []
    device = performance.device + (f", {len(each)} ranks" if each else "")
    ranked = ""
    if named(result.task).ranks_items:
        kept = result.quality.ranking is not None and result.quality.ranking.repeats
        among = "all items" if kept else "the items that their users had not met"
        ranked = f"; {count(result.data.valid_rows)} of these items are ranked among {among}"
    changes = (f"changed {change_text(change)}" for change in result.provenance.changes)
    notes = "; ".join([*result.quality.warnings, *left_out(result), *changes])
    facts: list[tuple[str, str | Cell]] = [
        ("quality", quality_fact(result)),
        *([("quality limit", limit_fact(limit))] if (limit := result.quality.limit) else []),
        *([("note", notes)] if notes else []),
        *([("time", fmt.waited(performance.waited))] if performance.waited else []),
        ("held out", result.data.held_out_text + ranked),
        ("speed", f"{fmt.throughput(performance.steady)}, {step}, {device}"),
    ]
    if run.profile is None:
        return [*facts, ("limit", "what limits a step was not measured")]
    advice = profile_report.advice_of(run.profile, run.figures) if run.figures else None
    return [*facts, ("limit", headline(run.profile.verdict)), *advice_facts(advice)]


def step_sections(run: Evidence) -> list[Section]:
    """What limits a step and where it spends its time; none where that was not measured."""
    profile, figures = run.profile, run.figures
    if profile is None or figures is None:
        return []
    figures = structs.replace(figures, roofline=roofline(figures, run.peaks) if run.peaks else None)
    measured, _ = profile_report.step_sections(profile, figures, run.peaks)
    for section in measured:
        if section.key == "budget":
            section.blocks[:0] = _training_steps(run, profile, figures)
    return measured


def _training_steps(run: Evidence, profile: StepProfile, figures: WorkloadFigures) -> list[Block]:
    """The steps of the training beside those of the profile."""
    performance, step = run.result.performance, run.result.performance.step_ms
    plain = figures.overhead.plain_ms
    blocks: list[Block] = [Text(f"Step time: {NOT_MEASURED}, too few steps.", "lead")]
    if step:
        lead = (
            f"A training step of {count(figures.batch_size)} samples takes {fmt.time(step.p50)} (p20 – p80: "
            f"{fmt.spread(step)}). Measured after it: parts of {count(figures.steps)} steps with timers "
            f"(median {fmt.time(figures.step_ms.p50)}), limit: from "
            f"{count(profile.steps.plain)} observed steps (median {fmt.time(plain)})."
        )
        blocks = [Text(lead, "lead")]
    if performance.overall:
        blocks.append(Text(f"The whole training took {fmt.whole_time(performance.overall)}."))
    if performance.difference:
        blocks.append(Text(f"Steady throughput is {performance.difference}.", "warning"))
    if step and max(plain, step.p50) > UNSTEADY * min(plain, step.p50):
        unsteady = (
            f"A step took {fmt.time(step.p50)} in training but {fmt.time(plain)} in the profile, without timers. "
            "Something else slowed one of them down, so the shares may be wrong."
        )
        blocks.append(Text(unsteady, "warning"))
    return blocks


def pair_blocks(pair: Pair) -> list[Block]:
    """The same step with hot and with cold ids."""
    hot, cold, ids = pair.hot, pair.cold, pair.ids
    times = {part.name: [part.ms] for part in in_order(hot.components)}
    for part in cold.components:
        times.setdefault(part.name, []).append(part.ms)
    rows = []
    for name, arms in {"whole step": [hot.step_ms, cold.step_ms], **times}.items():
        if len(arms) == 2:
            near, far = arms
            title = keyed(name) if name in times else Cell(name, "strong")
            cold_over_hot = fmt.gain(far.p50 / near.p50 if near.p50 else None)
            rows.append(
                cells(title, cold_over_hot, *(text for ms in arms for text in (fmt.time(ms.p50), fmt.spread(ms))))
            )
    note = (
        f"The same model and shapes, with new ids every step: hot ids of {count(ids.hot)} rows, cold ids of "
        f"{count(ids.cold)}; {fmt.size(hot.ids.touched_bytes)} and {fmt.size(cold.ids.touched_bytes)} of rows were "
        f"touched in {hot.steps} steps."
    )
    return [
        Text(pair.verdict, "lead"),
        Table(("part", "cold / hot", "hot", "p20 – p80", "cold", "p20 – p80"), rows, note),
    ]


def training(run: Evidence) -> Section:
    losses, norms = curve(run.log, "loss"), curve(run.log, "gradient_norm")
    evaluations = [event for event in run.events(Scores) if event.kind == "metric"]
    if not losses and not evaluations:
        return Section("training", "Training", [Text("events.jsonl holds neither losses nor metrics.", "note")])
    name = named(run.result.task).leading
    title, bound = f"validation {metric(name)}", needed(run.result).get(name)
    by_title = {"training loss": losses, "gradient norm": norms, title: curve(run.log, name)}
    panels = {panel: series for panel, series in by_title.items() if series}
    steps = sum(len(series) for series in losses.values())
    ends = [f"seed {seed}: {series[-1][1]:.3f} after step {series[-1][0]:,}" for seed, series in losses.items()]
    seeds = "1 seed" if len(losses) == 1 else f"{len(losses)} seeds"
    caption = (
        f"Loss of {count(steps)} steps, {seeds}. Lines are smoothed means of at most "
        f"{charts.GROUPS} groups of steps, bands reach from the smallest to the largest value in a group."
    )
    if norms:
        caption += " The gradient norm is that of the dense parameters, over all ranks and before clipping."
    label = f"Training loss ({'; '.join(ends)}), gradient norm and {title} over the steps"
    draw = lambda: charts.training(panels, {} if bound is None else {title: bound})  # noqa: E731
    blocks: list[Block] = [Figure(label, caption, draw)]
    names = [name for name in run.result.quality.metrics if any(name in event.metrics for event in evaluations)]
    if names:
        rows = []
        for event in evaluations:
            values = [event.metrics.get(name) for name in names]
            scores = [f"{value:.4f}" if isinstance(value, float) else NONE for value in values]
            rows.append(cells(event.seed, f"{event.step:,}", NONE if event.epoch is None else event.epoch, *scores))
        head = ("seed", "step", "epoch", *(metric(name) for name in names))
        blocks.append(Table(head, rows, "On the validation rows.", fold=f"Every evaluation ({len(rows)})"))
    return Section("training", "Training", blocks)


def provenance(run: Evidence) -> Section:
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
        *profile_report.machine_rows(run.machine),
    ]
    if run.peaks:
        quick = ", quick mode" if run.peaks.quick else ""
        when = fmt.timestamp(run.peaks.measured)
        rows.append(("ceilings", f"measured {when}, {run.peaks.threads} threads{quick}"))
    else:
        rows.append(("ceilings", f"{NOT_MEASURED}; measure them with: recperf peaks && {run.profile_command}"))
    return Section("provenance", "Where this comes from", [definitions(rows)])


def config(run: Evidence) -> Section:
    rows = [
        cells(Cell(name, "code"), Cell(fmt.setting(value), "code"))
        for name, value in flatten(run.config.config).items()
    ]
    table = Table(("field", "value"), rows, "As saved in config.json.", fold=f"All {len(rows)} fields", left=(1,))
    return Section("config", "Config", [table])


def reproduce(run: Evidence) -> Section:
    origin = run.result.provenance
    blocks: list[Block] = []
    if origin.commit:
        blocks.append(Code("The code", f"git checkout {origin.commit}"))
    if origin.dirty:
        text = "The checkout had uncommitted changes, so the commit alone may not reproduce the run."
        blocks.append(Text(text, "warning"))
    changes = [change_text(change) for change in origin.changes if not is_free(change.field)]
    if changes:
        text = f"Its config was changed on the way: {'; '.join(changes)}."
        blocks.append(Text(f"{text} The command below trains with the final config from the first step.", "warning"))
    command = f"recperf run --config {shlex.quote(str(run.folder / 'config.json'))}"
    blocks.append(Code("The run, in a new folder", command))
    typed = "The command that finished it" if origin.resumes else "The command line of this run"
    blocks.append(Code(typed, shlex.join(origin.command)))
    return Section("reproduce", "Reproduce it", blocks)
