"""The sections of a run that come from its training: quality, step budget, curves, provenance, config, reproduction."""

from __future__ import annotations

import math
import shlex
from typing import Any

from ...config import flatten
from ...units import size
from . import curves, plots
from .blocks import Block, Cell, Code, Missing, Section, Table, Text, cells
from .reading import Reading, step_parts
from .svg import family
from .words import MEASURE, NOT_MEASURED, baseline, between, component, count, metric, ms, percent, shown

UNSTEADY = 1.25
"""Ratio of two medians of the same step beyond which the page says so."""


def targets(run: Reading) -> dict[str, float]:
    """The least value of each metric that has a bound."""
    quality = run.result["quality"]
    bounds = {name: quality["target"][name] for name in ("accuracy", "auc") if quality["target"][name] is not None}
    rule = quality["baselines"].get(quality["target"]["beat"] or "", {})
    if "auc" in rule:
        bounds["auc"] = max(rule["auc"], bounds.get("auc", 0.0))
    return bounds


def target_words(run: Reading) -> str:
    quality = run.result["quality"]
    target, bounds = quality["target"], []
    if target["beat"]:
        rule = quality["baselines"].get(target["beat"], {})
        bounds.append(f"AUC above {baseline(target['beat'])}" + (f" ({rule['auc']:.4f})" if "auc" in rule else ""))
    bounds += [f"{metric(name)} at least {target[name]:g}" for name in ("accuracy", "auc") if target[name] is not None]
    return " and ".join(bounds)


def seed_words(run: Reading) -> str:
    seeds = [entry["seed"] for entry in run.result["quality"]["seeds"]]
    if len(seeds) == 1:
        return f"seed {seeds[0]}, so no spread"
    return f"mean ± standard deviation over {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}"


def quality(run: Reading, key: str) -> Section:
    part, data = run.result["quality"], run.result["data"]
    names = list(part["metrics"])
    rows = [
        (
            Cell(run.workload, "strong", "accent"),
            *(
                Cell(f"{part['metrics'][name]:.4f}", "strong", aside=_spread(part["spread"].get(name)))
                for name in names
            ),
        )
    ]
    rules = list(reversed(part["baselines"].items()))
    for rule, metrics in rules:
        values = [f"{metrics[name]:.4f}" if name in metrics else "–" for name in names]
        rows.append(cells(Cell(baseline(rule), swatch="other"), *values))
    bars = [_own_bar(run)] + [plots.Bar(baseline(rule), metrics) for rule, metrics in rules]
    panels = [(name, metric(name)) for name in ("auc", "accuracy") if all(name in bar.values for bar in bars)]
    words = target_words(run)
    met = "met" if part["met"] else "missed"
    blocks: list[Block] = [Text(f"Target: {words}. It was {met}." if words else "No target was set.", "lead")]
    if panels:
        what = "; ".join(f"{title}: " + ", ".join(f"{b.label} {b.values[n]:.3f}" for b in bars) for n, title in panels)
        caption = "Dashed: the target." if targets(run) else ""
        if all(min(bar.values[name] for bar in bars) >= 0.5 for name, _ in panels):
            caption = f"Bars start at 0.5, where guessing ends up. {caption}"
        if len(part["seeds"]) > 1:
            caption += " Open dots: single seeds."
        draw = lambda width: plots.quality(width, bars, panels, targets(run))  # noqa: E731
        blocks.append(plots.drawing(f"{key}-quality", f"Quality beside baselines. {what}", caption, draw))
    note = (
        f"Scored on {count(data['valid_rows'])} validation rows after the last step (not the best epoch), "
        f"{seed_words(run)}; trained on {count(data['train_rows'])} rows."
    )
    if "planted" in part["baselines"]:
        note += " The planted answer is the rule that made the labels: nothing can do better."
    blocks.append(Table(("", *(metric(name) for name in names)), rows, note))
    return Section("quality", "Quality", blocks)


def _own_bar(run: Reading) -> plots.Bar:
    part = run.result["quality"]
    seeds = part["seeds"] if len(part["seeds"]) > 1 else []
    each = {name: [entry["metrics"][name] for entry in seeds if name in entry["metrics"]] for name in part["metrics"]}
    return plots.Bar(run.workload, part["metrics"], own=True, spread=part["spread"], seeds=each)


def _spread(deviation: float | None) -> str:
    return "" if deviation is None else f"± {deviation:.4f}"


def budget(run: Reading, key: str) -> Section:
    profiled = run.profile is not None
    parts = step_parts(run, profiled=profiled)
    if not parts:
        return Section("budget", "Where a step goes", [Missing("The step budget", _profile(run))])
    rows = []
    for part in parts:
        hue, faint = family(part.name)
        time = cells(ms(part.ms["p50"]), between(part.ms)) if part.ms else ()
        name = Cell(component(part.name), swatch=hue, faint=faint)
        rows.append((name, *cells(percent(part.share), *time, Cell(part.phase, "muted"))))
    head = ("part", "share", *(("p50", "p20 – p80, ms") if profiled else ()), "phase")
    listed = ", ".join(f"{component(part.name)} {percent(part.share)}" for part in parts)
    bar = [("", [plots.Part(part.name, part.phase, part.share) for part in parts])]
    drawn = plots.drawing(
        f"{key}-budget", f"Share of each part in a training step: {listed}",
        "Backward in the lighter shade of its part." if profiled else "",
        lambda width: plots.stacked(width, bar, "share"),
    )  # fmt: skip
    blocks: list[Block] = [
        Text(_step_sentence(run), "lead"),
        drawn,
        Table(head, rows, _budget_note(run), words=(len(head) - 1,)),
    ]
    unsteady = _unsteady(run)
    if unsteady:
        blocks.insert(1, Text(unsteady, "warning"))
    if not profiled:
        blocks.append(Missing("Backward and update by component", _profile(run)))
    return Section("budget", "Where a step goes", blocks)


def _profile(run: Reading) -> str:
    return MEASURE["profile"].format(run=run.quoted)


def _step_sentence(run: Reading) -> str:
    step = run.profile["step_ms"] if run.profile else run.result["performance"]["step_ms"]
    if not step:
        return f"Step time: {NOT_MEASURED}, too few steps."
    batch = run.profile["batch_size"] if run.profile else run.config.get("train", {}).get("batch_size")
    samples = f" of {count(batch)} samples" if isinstance(batch, int) else ""
    return f"A training step{samples} takes {ms(step['p50'])} (p20 – p80: {between(step)} ms)."


def _unsteady(run: Reading) -> str | None:
    """Profiled steps that took another time than those of the training: one of the two was disturbed."""
    trained = run.result["performance"]["step_ms"]
    if not trained or not run.profile:
        return None
    profiled = (run.profile["overhead"] or {}).get("plain_ms") or run.profile["step_ms"]["p50"]
    if max(profiled, trained["p50"]) <= UNSTEADY * min(profiled, trained["p50"]):
        return None
    return (
        f"While training, a step took {ms(trained['p50'])}; while it was profiled, {ms(profiled)} without clocks. "
        "Something else was going on in one of them: read the shares with care."
    )


def _budget_note(run: Reading) -> str:
    if run.profile is None:
        steps = run.result["performance"]["steps_in_budget"]
        return (
            f"Clocked in {count(steps)} steps of the training itself, warm-up excluded; "
            "what no span covers is “other”, so the shares sum to 1."
        )
    profile = run.profile
    note = (
        f"Profiled on {profile['device']} over {count(profile['steps'])} steps after {count(profile['warmup'])} steps "
        "of warm-up; medians, with the 20th and 80th percentile."
    )
    if profile["overhead"]:
        cost = profile["overhead"]
        note += (
            f" Measuring itself costs {percent(max(0.0, cost['share']))} of a step: "
            f"{ms(cost['plain_ms'])} without clocks, {ms(cost['clocked_ms'])} with them."
        )
    return note


def training(run: Reading, key: str) -> Section:
    events = run.events
    if not events.losses and not events.metrics:
        return Section("training", "Training", [Text("No loss or metric was logged in events.jsonl.", "note")])
    shown_metric = next((name for name in ("auc", "accuracy", "log_loss") if _history(run, name)), "auc")
    history = _history(run, shown_metric)
    bound = targets(run).get(shown_metric)
    steps = sum(len(series) for series in events.losses.values())
    ends = [f"seed {seed}: {series[-1][1]:.3f} after step {series[-1][0]:,}" for seed, series in events.losses.items()]
    caption = f"Loss of {count(steps)} logged steps; the line is an exponential mean."
    if any(len(series) > curves.BUCKETS for series in events.losses.values()):
        caption = (
            f"Loss of {count(steps)} logged steps, thinned to at most {curves.BUCKETS} groups a seed: the band spans "
            "the smallest and largest loss of a group, the line is an exponential mean of the groups."
        )
    label = f"Training loss ({'; '.join(ends)}) and validation {metric(shown_metric)} over the steps"
    draw = lambda width: curves.training(width, events.losses, history, metric(shown_metric), bound)  # noqa: E731
    blocks: list[Block] = [plots.drawing(f"{key}-training", label, caption, draw)]
    names = [name for name in run.result["quality"]["metrics"] if any(name in event for event in events.metrics)]
    if events.metrics and names:
        rows = [
            cells(
                event["seed"], f"{event['step']:,}", event.get("epoch", "–"), *(_score(event, name) for name in names)
            )
            for event in events.metrics
        ]
        head = ("seed", "step", "epoch", *(metric(name) for name in names))
        blocks.append(Table(head, rows, "On the validation rows.", fold=f"Every evaluation ({len(rows)})"))
    return Section("training", "Training", blocks)


def _score(event: dict[str, Any], name: str) -> str:
    return f"{event[name]:.4f}" if isinstance(event.get(name), float) else "–"


def _history(run: Reading, name: str) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for event in run.events.metrics:
        if isinstance(event.get(name), (int, float)) and math.isfinite(event[name]):
            found.setdefault(event["seed"], []).append((event["step"], float(event[name])))
    return found


def provenance(run: Reading) -> Section:
    origin, data, facts = run.result["provenance"], run.result["data"], run.machine
    commit = origin["commit"] or "none: not run from a checkout"
    if origin["dirty"]:
        commit += ", and files differed from it"
    rows = [
        ("run", Cell(run.name, "code")),
        ("commit", Cell(commit, "code")),
        ("data", f"{data['name']}, {count(data['rows'])} rows, split {data['split']}"),
        ("data digest (SHA-256)", Cell(origin["data_digest"], "code")),
        ("first seed", str(origin["seed"])),
        ("started – ended (UTC)", f"{_time(origin['started'])} – {_time(origin['ended'])}"),
        ("interrupted and resumed", f"{origin['resumes']} times" if origin["resumes"] else "never"),
        ("device", run.result["performance"]["device"]),
        *((f"setting: {name}", text) for name, text in run.result["performance"]["settings"].items()),
        ("packages", ", ".join(f"{name} {version}" for name, version in origin["packages"].items())),
        ("machine fingerprint", Cell(origin["machine"], "code")),
        *((f"machine: {name}", shown(value)) for name, value in flatten(_facts(facts)).items()),
    ]
    if run.peaks:
        quick = ", quick" if run.peaks.get("quick") else ""
        when = _time(str(run.peaks.get("measured", "unknown time")))
        rows.append(("ceilings", f"measured {when}, {run.peaks.get('threads', '?')} threads{quick}"))
    else:
        rows.append(("ceilings", f"{NOT_MEASURED}: {MEASURE['peaks'].format(run=run.quoted)}"))
    table = Table(("", ""), [cells(name, text) for name, text in rows], words=(1,))
    return Section("provenance", "Where this comes from", [table])


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in facts.items() if key not in ("fingerprint", "caches", "gpus") and value}
    kept["caches"] = ", ".join(f"{level} {size(count)}" for level, count in (facts.get("caches") or {}).items()) or None
    kept["GPUs"] = ", ".join(str(gpu.get("name")) for gpu in facts.get("gpus") or []) or None
    return kept


def _time(stamp: str) -> str:
    return stamp.replace("T", " ").removesuffix("+00:00")


def config(run: Reading) -> Section:
    rows = [cells(Cell(name, "code"), Cell(shown(value), "code")) for name, value in flatten(run.config).items()]
    table = Table(("field", "value"), rows, "As saved in config.json.", fold=f"All {len(rows)} fields", words=(1,))
    return Section("config", "Config", [table])


def reproduce(run: Reading) -> Section:
    origin = run.result["provenance"]
    blocks: list[Block] = []
    if origin["commit"]:
        blocks.append(Code("The code", f"git checkout {origin['commit']}"))
    if origin["dirty"]:
        blocks.append(
            Text("Files differed from that commit, so the checkout alone may not give the same run.", "warning")
        )
    blocks.append(
        Code("The run, in a new folder", f"recperf run --config {shlex.quote(str(run.folder / 'config.json'))}")
    )
    typed = "The command that finished it" if origin["resumes"] else "As it was typed"
    blocks.append(Code(typed, shlex.join(origin["command"])))
    return Section("reproduce", "Do it again", blocks)
