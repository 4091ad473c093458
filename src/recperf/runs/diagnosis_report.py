"""A diagnosis of the quality of a run, in a terminal and as a page: the distance as one bar, the experiments with their
intervals, the curves of the run, and its losses by how often something was seen."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import asdict

from ..learn.diagnosis import FILE, SCHEMA, Diagnosis, Share, Sum, Tried
from ..learn.gains import Gain
from ..learn.kinds import LIMITS
from ..learn.records import GroupSeen
from .evidence import Evidence
from .report import charts
from .report.blocks import Block, Cell, Figure, Report, Section, Table, Text, arranged, cells, render, table_of
from .report.formats import NONE, baseline, count, metric, plus_minus, sentence
from .report.quality_sections import limit_fact
from .report.run_report import training
from .schemas import LEARNING, SavedLearning, read_file

MOST_FACTS = 4
"""Parts of the distance that a terminal lists."""
TONES = ("embedding", "top", "interaction", "update", "data")


class DiagnosisReport(Diagnosis):
    """A diagnosis as users of the Python API see it: printed, as a page, and in a notebook."""

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> DiagnosisReport:
        return cls(**asdict(diagnosis))

    def __str__(self) -> str:
        return render(report(self))

    def page(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the diagnosis as one HTML file. With `force` it replaces a file that is not a page of recperf."""
        from .report import page

        return page.save(report(self), Path(path), force=force)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from .report import page

        return page.framed(report(self))


def read(folder: Path) -> Diagnosis:
    """The diagnosis in a folder."""
    return read_file(folder / FILE, Diagnosis, SCHEMA)


def report(diagnosis: Diagnosis) -> Report:
    """Its report; the curves are those of the run, where its folder is still there."""
    sections = [
        Section("shares", "The distance", _distance(diagnosis)),
        Section("advice", "Experiments", _experiments(diagnosis)),
    ]
    if diagnosis.curve or diagnosis.sums:
        sections.append(Section("beside", "More rows, and sums with other models", _beside(diagnosis)))
    run = Evidence(Path(diagnosis.folder))
    if run.has("events.jsonl") and run.has("result.json"):
        sections += [training(run), *_groups(run)]
    return Report(
        key="q1",
        title=f"{diagnosis.workload} {diagnosis.run}",
        name="",
        subtitle=f"{sum(not one.screened for one in diagnosis.tried)} experiments in full, "
        f"{sum(one.screened for one in diagnosis.tried)} screened, {diagnosis.seconds:.0f} s",
        verdict=limit_fact(diagnosis.verdict),
        measured=True,
        picture=_bar(diagnosis),
        facts=_facts(diagnosis),
        sections=arranged(sections),
    )


def _facts(diagnosis: Diagnosis) -> list[tuple[str, str | Cell]]:
    facts: list[tuple[str, str | Cell]] = [("limit", limit_fact(diagnosis.verdict)), ("distance", _line(diagnosis))]
    parts = [one for one in diagnosis.shares if one.limit != "baseline"]
    for number, share in enumerate(parts[:MOST_FACTS]):
        facts.append(("" if number else "shares", f"{share.limit}: {share.name} {_gained(share.gain)}"))
    if diagnosis.verdict.doubts:
        facts.append(("doubts", "; ".join(diagnosis.verdict.doubts)))
    if diagnosis.advised:
        facts.append(("advice", f"{diagnosis.advice}: {metric(diagnosis.metric)} {_gained(diagnosis.advised)}"))
        facts.append(("", Cell(f"recperf run --from-diagnosis {diagnosis.folder}")))
    return facts


def _line(diagnosis: Diagnosis) -> str:
    """From the best baseline to what is possible."""
    ends = [("run", diagnosis.score), ("best experiment", diagnosis.best), ("possible", diagnosis.possible)]
    if diagnosis.baseline is not None:
        ends.insert(0, (baseline(diagnosis.baseline_name), diagnosis.baseline))
    known = [f"{name} {NONE if value is None else f'{value:.4f}'}" for name, value in ends if value is not None]
    unknown = [] if diagnosis.possible is not None else ["possible: not known"]
    return f"{metric(diagnosis.metric)} {' → '.join([*known, *unknown])}"


def _gained(gain: Gain) -> str:
    return plus_minus(gain.value, gain) if gain.value < 0 else f"+{plus_minus(gain.value, gain)}"


def _bar(diagnosis: Diagnosis) -> Figure:
    """The distance from 0 on, each part with its length."""
    parts = []
    start = min(diagnosis.score, diagnosis.baseline if diagnosis.baseline is not None else diagnosis.score)
    parts.append(charts.BarPart("baseline" if start < diagnosis.score else "run", start, "other"))
    if start < diagnosis.score:
        parts.append(charts.BarPart("run", diagnosis.score - start, "accent"))
    for number, share in enumerate(one for one in diagnosis.shares if one.limit != "baseline"):
        if share.gain.value > 0:
            parts.append(charts.BarPart(share.limit, share.gain.value, TONES[number % len(TONES)]))
    reached = sum(part.value for part in parts)
    rest = (diagnosis.possible or 0.0) - reached
    parts.append(charts.BarPart("unexplained" if rest > 0 else "?", rest if rest > 0 else 0.04 * reached, "muted"))
    end = "then what is possible but not explained" if rest > 0 else "what is possible is not known (?)"
    first = "The best baseline, what the run adds" if start < diagnosis.score else "The run"
    caption = f"{first}, what each kept change adds; {end}."
    return Figure(_line(diagnosis), caption, lambda: charts.stacked([("", parts)], "value"))


def _distance(diagnosis: Diagnosis) -> list[Block]:
    columns = {
        "part": lambda one: Cell(one.limit, "strong"),
        "of": lambda one: one.name if one.limit != "baseline" else f"the run less {baseline(one.name)}",
        f"{metric(diagnosis.metric)}": lambda one: _gained(one.gain),
        "lost without it": lambda one: NONE if one.removed is None else _gained(one.removed),
        "meaning": lambda one: LIMITS[one.limit].meaning if one.limit in LIMITS else "",
    }  # fmt: skip
    note = "95 % intervals over users and seeds. What lies beyond the best experiment is not explained."
    shares: list[Share] = diagnosis.shares
    table = table_of(shares, columns, note, left=(1, 4)) if shares else Text("Nothing gained.", "note")
    said = [Text(sentence(text), "note") for text in (*diagnosis.verdict.because[1:], *diagnosis.verdict.doubts)]
    return [Text(f"{sentence(limit_fact(diagnosis.verdict))}", "lead"), table, *said]


def _experiments(diagnosis: Diagnosis) -> list[Block]:
    full = [one for one in diagnosis.tried if not one.screened]
    blocks: list[Block] = []
    if full:
        rows = [charts.Dot("the run", 0.0, is_model=True)]
        rows += [charts.Dot(_name(one), one.gain.value, one.gain.low, one.gain.high) for one in full]
        title = f"gain in {metric(diagnosis.metric)}"
        blocks.append(charts.dots_figure(title, rows, f"What each change gains in {metric(diagnosis.metric)}."))
    columns = {
        "experiment": lambda one: Cell(_name(one), "strong" if one.kept else ""),
        "limit": lambda one: one.limit,
        "options": lambda one: Cell(one.change, "code"),
        "steps": lambda one: "a quarter" if one.screened else "all",
        "choosing metric": lambda one: f"{one.chosen:+.4f}",
        metric(diagnosis.metric): lambda one: _gained(one.gain),
        "": lambda one: "kept" if one.kept else "",
    }
    if diagnosis.tried:
        tried: list[Tried] = diagnosis.tried
        blocks.append(table_of(tried, columns, "Chosen by the rows that choose the epoch.", left=(1, 2, 3, 6)))
    if diagnosis.left_out:
        blocks.append(Text(f"Not run for lack of time: {', '.join(diagnosis.left_out)}.", "note"))
    return blocks


def _beside(diagnosis: Diagnosis) -> list[Block]:
    """The learning curve, and what sums gain."""
    blocks: list[Block] = []
    if curve := diagnosis.curve:
        whole, more = curve.points[-1].value, curve.doubled
        rows = [charts.Dot(_part(one.share), one.value, is_model=one.share == 1.0) for one in curve.points]
        rows.append(charts.Dot("twice, predicted", whole + more.value, whole + more.low, whole + more.high))
        caption = "The best config trained on parts of the rows, and what twice as many would give."
        blocks.append(charts.dots_figure(f"{metric(diagnosis.metric)} by training rows", rows, caption))
    if diagnosis.sums:
        columns = {
            "sum of the best config with": lambda one: one.name,
            f"{metric(diagnosis.metric)} over the better part": lambda one: _gained(one.gain),
        }
        note = "Means of log-odds; the model is that of one seed. No rows chose them."
        sums: list[Sum] = diagnosis.sums
        blocks.append(table_of(sums, columns, note, left=(0,)))
    return blocks


def _part(share: float) -> str:
    return {0.25: "a quarter", 0.5: "half", 1.0: "all rows"}.get(share, f"{share:.0%}")


def _name(tried: Tried) -> str:
    return f"{tried.name}, on top" if tried.on_top else tried.name


def _groups(run: Evidence) -> list[Section]:
    """The loss of held-out rows by how many training rows their user, item or value has."""
    if not run.has(LEARNING):
        return []
    seen = next(iter(run.file(LEARNING, SavedLearning).seeds.values()), None)
    if seen is None or not seen.groups:
        return []
    rows = [
        cells(one.name, _range(one), count(one.loss.rows), f"{one.loss.value:.4f} ± {1.96 * one.loss.error:.4f}")
        for one in seen.groups
    ]
    bars = [
        charts.Dot(
            f"{one.name}, {_range(one)}", one.loss.value, one.loss.value - 1.96 * one.loss.error,
            one.loss.value + 1.96 * one.loss.error, is_model=one.at_most is None,
        )
        for one in seen.groups
    ]  # fmt: skip
    figure = charts.dots_figure("loss", bars, "Mean losses of the scored rows, by training rows, with 95 % intervals.")
    note = "The mean loss of the scored rows, by how many training rows have the same user, item or value."
    table = Table(("", "training rows", "scored rows", "loss"), rows, note, left=(1,))
    return [Section("groups", "Losses by training rows", [figure, table])]


def _range(group: GroupSeen) -> str:
    return "more" if group.at_most is None else f"at most {group.at_most}" if group.at_most else "none"
