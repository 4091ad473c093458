"""Puts a page together: what each run shows, the comparison above several, and the template around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import MachineError
from ..compare import Comparison, Row, compare, summary
from . import limits, plots, sections
from .blocks import Badge, Block, Cell, RunView, Section, Table, Text, Tile, cells
from .reading import Reading, step_parts
from .svg import family, require_matplotlib
from .words import MEASURE, NOT_MEASURED, between, component, count, metric, ms, percent, shown


def environment() -> Any:
    """Jinja as every page uses it: escaping all text, refusing names that mean nothing."""
    require_matplotlib()
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MachineError("the report needs matplotlib and jinja2", fix="pip install 'recperf[report]'") from None
    from markupsafe import Markup

    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["svg"] = Markup
    return found


def page(runs: list[Reading]) -> str:
    """The whole page as text."""
    pages = environment()
    several = len(runs) > 1
    compared = compare(runs) if several else None
    views = [view(run, f"r{index}", short=several) for index, run in enumerate(runs, 1)]
    text: str = pages.get_template("template.html.j2").render(
        title=f"{_listed(runs)} compared" if several else f"{runs[0].workload}: {runs[0].name}",
        comparison=comparison(runs, compared) if compared else None,
        summary=summary(compared) if compared else None,
        runs=views,
        several=several,
        version=__version__,
    )
    return text


def _listed(runs: list[Reading]) -> str:
    names = list(dict.fromkeys(run.short_name for run in runs))
    if len(names) > 3:
        return f"{len(names)} runs"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def view(run: Reading, key: str, *, short: bool) -> RunView:
    regime = run.profile["regime"] if run.profile else None
    data = run.result["data"]
    return RunView(
        key=key,
        title=run.workload,
        name=run.name,
        subtitle=" · ".join([data["name"], run.result["performance"]["device"], run.machine.get("cpu") or "unknown"]),
        verdict=regime["sentence"] if regime else "What limits this run was not measured.",
        measured=bool(regime),
        command="" if regime else MEASURE["profile"].format(run=run.quoted),
        badges=badges(run),
        tiles=tiles(run),
        sections=run_sections(run, key, short=short),
    )


def run_sections(run: Reading, key: str, *, short: bool) -> list[Section]:
    if short:
        return [sections.quality(run, key), sections.budget(run, key), sections.reproduce(run)]
    return [
        sections.quality(run, key),
        sections.budget(run, key),
        *limits.between_ranks(run, key),
        limits.roofline(run, key),
        limits.knee(run, key),
        limits.pair(run, key),
        sections.training(run, key),
        limits.evidence(run),
        sections.provenance(run),
        sections.config(run),
        sections.reproduce(run),
    ]


def badges(run: Reading) -> list[Badge]:
    quality, origin = run.result["quality"], run.result["provenance"]
    found = []
    if run.result["data"]["synthetic"]:
        found.append(Badge("synthetic data", "warning"))
    if sections.target_words(run):
        found.append(Badge("target met", "good") if quality["met"] else Badge("target missed", "bad"))
    if run.profile and run.profile["regime"]:
        found.append(Badge(run.profile["regime"]["name"], "plain"))
    if origin["dirty"]:
        found.append(Badge("uncommitted changes", "warning"))
    return found


def tiles(run: Reading) -> list[Tile]:
    quality, performance = run.result["quality"], run.result["performance"]
    name = next((name for name in ("auc", "accuracy") if name in quality["metrics"]), None)
    found = []
    if name:
        spread = quality["spread"].get(name)
        note = f"± {spread:.4f} over {len(quality['seeds'])} seeds" if spread is not None else "one seed"
        found.append(Tile(f"validation {metric(name)}", f"{quality['metrics'][name]:.4f}", note))
    step = performance["step_ms"]
    found.append(
        Tile(
            "training step",
            ms(step["p50"]),
            f"p20 – p80: {between(step)} ms, {count(performance['steps_timed'])} steps",
        )
        if step
        else Tile("training step", NOT_MEASURED, "too few steps")
    )
    rate = performance["samples_per_s"]
    found.append(
        Tile("samples a second", count(rate), "over all training time")
        if rate
        else Tile("samples a second", NOT_MEASURED, "nothing was trained")
    )
    parts = [part for part in step_parts(run, profiled=run.profile is not None) if part.name != "other"]
    if parts:
        largest = max(parts, key=lambda part: part.share)
        found.append(Tile("largest part of a step", percent(largest.share), component(largest.name)))
    else:
        found.append(Tile("largest part of a step", NOT_MEASURED, "too few steps"))
    return found


def comparison(runs: list[Reading], found: Comparison) -> list[Section]:
    heads = ("", *found.runs)
    notes: list[Block] = [Text(note, "warning") for note in found.notes]
    what: list[Block] = (
        [
            Table(
                heads,
                [_row(row, shown, code=True) for row in found.config],
                "Only fields that differ.",
                words=_all(runs),
            )
        ]
        if found.config
        else [Text("The configs are the same.", "lead")]
    )
    regime = Table(
        heads,
        [
            (
                Cell("regime"),
                *(Cell(value or NOT_MEASURED, "strong" if value else "muted") for value in found.regime.values),
            )
        ],
        words=_all(runs),
    )
    return [
        Section("changed", "What changed", [*notes, *what]),
        Section("regimes", "Regime", [regime]),
        Section("qualities", "Quality", [_measured(found.quality, heads, _score, metric)]),
        Section("speeds", "Speed", [_measured(found.speed, heads, _number, str)]),
        Section("budgets", "Where a step goes", _budgets(runs, found, heads)),
    ]


def _budgets(runs: list[Reading], found: Comparison, heads: tuple[str, ...]) -> list[Block]:
    if not found.budget:
        return [Text(f"The step budget was {NOT_MEASURED}: too few steps.", "note")]
    parts = [step_parts(run, profiled=found.profiled) for run in runs]
    bars = [
        (name, [plots.Part(p.name, p.phase, p.share) for p in shares])
        for name, shares in zip(found.runs, parts)
        if shares
    ]
    drawn = plots.drawing(
        "all-budgets", "Share of each part in a training step, a bar a run; the table below has the figures",
        "Shares of a step, not times.", lambda width: plots.stacked(width, bars, "share"),
    )  # fmt: skip
    rows = []
    for row in found.budget:
        hue, faint = family(row.name)
        values = (percent(value) if value is not None else "–" for value in row.values)
        rows.append((Cell(component(row.name), swatch=hue, faint=faint), *cells(*values)))
    source = "profiles, warm-up excluded" if found.profiled else "spans clocked while training, warm-up excluded"
    return [drawn, Table(heads, rows, f"From {source}.")]


def _measured(rows: list[Row], heads: tuple[str, ...], say: Callable[[Any], str], name: Callable[[str], str]) -> Table:
    remarks = any(row.remark for row in rows)
    drawn = [
        (Cell(name(row.name)), *_row(row, say)[1:], *((Cell(row.remark, "muted"),) if remarks else ())) for row in rows
    ]
    return Table((*heads, "remark") if remarks else heads, drawn, words=(len(heads),) if remarks else ())


def _row(row: Row, say: Callable[[Any], str], *, code: bool = False) -> tuple[Cell, ...]:
    tone = "code" if code else ""
    return (Cell(row.name, tone), *(Cell("–" if value is None else say(value), tone) for value in row.values))


def _score(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else f"{value:.4f}"


def _number(value: float) -> str:
    return count(value) if value >= 100 else f"{value:.3g}"


def _all(runs: list[Reading]) -> tuple[int, ...]:
    return tuple(range(1, len(runs) + 1))
