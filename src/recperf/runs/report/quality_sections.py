"""Quality: the metrics beside those of baselines, their certainty, rankings, segments and calibration, as blocks of a
page and of a terminal."""

from __future__ import annotations

from collections.abc import Callable

from ...learn.records import NOT_MEASURED, UNCLEAR, QualityLimit
from ...tasks import NDCG, Task, named, signed
from ..derive import best_of, better_side, compared, leading_interval, limit_text
from ..result import CalibrationBin, Difference, Interval, Metrics, Ranking, Result
from . import charts
from .blocks import Block, Cell, Figure, Section, Table, Text, cells, table_of
from .formats import NONE, baseline, count, metric, percent, place, plus_minus, sentence, stands

SEGMENTS = {"new_users": "new users", "rare_items": "rare items", "the_rest": "the rest"}


def tone(row: Difference) -> str:
    """Whether a difference is good or bad; neither where the model is level with the baseline."""
    return "" if row.standing == "level" else "good" if row.standing == better_side(row.metric) else "bad"


def sections(result: Result) -> list[Section]:
    part, asked = result.quality, target_text(result)
    blocks: list[Block] = []
    if asked:
        reached = ", ".join(filter(None, ["met" if part.met else "missed", standing_text(result)]))
        blocks = [Text(f"Target: {asked}; {reached}.", "lead")]
    blocks += [Text(text) for text in certainty(result)]
    if part.limit:
        blocks += [Text(f"Quality limit: {limit_fact(part.limit)}.", "lead"), *_doubts(part.limit)]
    blocks += [Text(sentence(text), "warning") for text in (*part.warnings, *left_out(result))]
    more = [*_ranking(result), *_segments(result), *_calibration(result)]
    return [
        Section("quality", "Quality", [*blocks, quality_table(result)]),
        *([Section("qualities", "Quality in detail", more)] if more else []),
    ]


def _doubts(limit: QualityLimit) -> list[Block]:
    """What else speaks for it, or for another limit."""
    return [Text(sentence(text), "note") for text in (*limit.because[1:], *limit.doubts)]


MOST_DOTS = 9
"""Baselines in a picture, the best."""


def picture(result: Result) -> Figure:
    """The leading metric of the model beside those of its baselines."""
    part, task = result.quality, named(result.task)
    name, ends = task.leading, leading_interval(task, part)
    known = part.ranking.baseline_intervals if task.ranks_items and part.ranking else part.baseline_intervals
    own = charts.Dot(result.workload, part.metrics[name], *_ends(ends), is_model=True)
    rules = [rule for rule in part.baselines if name in part.baselines[rule]]
    rules = [rule for rule in rules if rule != "majority"] or rules
    rows = [charts.Dot(baseline(rule), part.baselines[rule][name], *_ends((known or {}).get(rule))) for rule in rules]
    rows = sorted(rows, key=lambda row: -signed(name, row.value))[:MOST_DOTS]
    rows = sorted([own, *rows], key=lambda row: -signed(name, row.value))
    lower = ", lower is better" if better_side(name) == "below" else ""
    certain = "with 95 % intervals" if ends else "without intervals"
    held_out = f"{count(result.data.valid_rows)} held-out {'users' if task.ranks_items else 'rows'}"
    caption = f"{metric(name)}{lower}, {certain}: the model beside its baselines, on {held_out}."
    return charts.dots_figure(metric(name), rows, caption)


def _ends(interval: Interval | None) -> tuple[float | None, float | None]:
    return (interval.low, interval.high) if interval else (None, None)


def quality_table(result: Result) -> Table:
    """The metrics of the model above those of the baselines."""
    part, data, task = result.quality, result.data, named(result.task)
    names = [name for name in part.metrics if name != task.choosing]
    ends = {"": part.interval, **(part.baseline_intervals or {})}

    def beside(rule: str, name: str) -> str:
        """The 95 % interval of the leading metric of labels; else the standard deviation over the seeds."""
        one = ends.get(rule) if name == task.leading else None
        if one:
            return plus_minus(metrics_of[rule][name], one).partition(" ")[2]
        return f"± {part.spread[name]:.4f}" if not rule and name in part.spread else ""

    rows = []
    metrics_of = {"": part.metrics, **dict(reversed(part.baselines.items()))}
    for rule, metrics in metrics_of.items():
        title = Cell(baseline(rule), swatch="other") if rule else Cell(result.workload, "strong", "accent")
        values = (
            Cell(
                f"{metrics[name]:.4f}" if name in metrics else NONE,
                "" if rule else "strong",
                second_line=beside(rule, name),
            )
            for name in names
        )
        rows.append((title, *values))
    scored = "validation rows after the last step (not the best epoch)"
    if task.choosing in part.metrics:
        scored = task.scored_rows
    trials = [entry.seed for entry in part.seeds]
    seeds = f"with one seed ({trials[0]})"
    if len(trials) > 1:
        seeds = f"mean ± standard deviation over {len(trials)} seeds, {trials[0]} to {trials[-1]}"
    note = f"Scored on {count(data.valid_rows)} {scored}, {seeds}; trained on {count(data.train_rows)} rows."
    if part.interval:
        note += f" Below each {metric(task.leading)} is its 95 % interval."
    if data.baseline_rows:
        note += f" The baselines were fitted on {count(data.baseline_rows)} of them, at equal distances."
    if data.chosen_rows and "gradient_boosting" in part.baselines:
        note += f" Gradient boosting chose its columns and rounds on {count(data.chosen_rows)} of them."
    if "planted" in part.baselines:
        note += " The synthetic data was drawn from its true model: no model can do better."
    return Table(("", *(metric(name) for name in names)), rows, note)


def needed(result: Result) -> dict[str, float]:
    """The value of each metric from which on the target is met."""
    quality, task = result.quality, named(result.task)
    target, name = quality.target.bounds, task.leading
    if beat := task.baseline_to_beat(quality.target.beat, quality.baselines):
        bar = quality.baselines[beat][name]
        target[name] = max(bar, target.get(name, bar), key=lambda value: signed(name, value))
    return target


def left_out(result: Result) -> list[str]:
    """Which baselines there was no time for."""
    names = ", ".join(map(baseline, result.quality.left_out))
    return [f"no time for {names}: --baseline-seconds 0 allows all the time they take"] if names else []


def target_text(result: Result) -> str:
    """What had to be reached; empty if no target was set."""
    target, baselines = result.quality.target, result.quality.baselines
    task = named(result.task)
    beat, name = task.baseline_to_beat(target.beat, baselines), task.leading
    parts = [f"{metric(name)} {better_side(name)} {baseline(beat)} ({baselines[beat][name]:.4f})"] if beat else []
    parts += [f"{metric(name)} {limit_text(name)} {bound:g}" for name, bound in target.bounds.items()]
    return " and ".join(parts)


def quality_fact(result: Result) -> str:
    """The leading metric with its interval, and where it stands beside the best baseline; of a model that predicts
    labels, where its ranking stands, and whether its log loss or calibration is worse."""
    part, task = result.quality, named(result.task)
    name, ranking, ends = task.leading, part.ranking, leading_interval(task, part)
    text = f"{metric(name)} {plus_minus(part.metrics[name], ends) if ends else f'{part.metrics[name]:.4f}'}"
    if best := best_of(compared(task, part)):
        text += f", {stands(best)}"
    if ranking and not task.ranks_items and (best := best_of(ranking.differences)):
        text += f"; {metric(NDCG)} {stands(best)}"
    bad = [row for row in part.probabilities if tone(row) == "bad"]
    worse = " and ".join(metric(row.metric) for row in bad)
    return f"{text}; {worse} worse than that of {baseline(bad[0].baseline)}" if bad else text


def limit_fact(limit: QualityLimit | None) -> str:
    """What limits the quality, in a line; empty where nothing was looked at."""
    if limit is None:
        return ""
    confidence = "" if limit.limit in (NOT_MEASURED, UNCLEAR) else f" ({limit.confidence} confidence)"
    return f"{limit.limit}{confidence}: {limit.because[0]}"


def certainty(result: Result) -> list[str]:
    """How certain the leading metric of labels is, and the difference to the best baseline."""
    part, leading, sentences = result.quality, named(result.task).leading, []
    bounds, best = part.interval, best_of(part.differences)
    if bounds:
        sentences.append(
            f"{metric(leading)} {plus_minus(part.metrics[leading], bounds)} (95 %), from {bounds.replicates} bootstrap "
            f"samples of {count(bounds.units)} {bounds.by}."
        )
    if best:
        seeds = f"{best.seeds} seed{'s' * (best.seeds > 1)}"
        worse = 1 - best.below_zero if better_side(leading) == "below" else best.below_zero
        sentences.append(
            f"{metric(leading)} {stands(best)}, {seeds}; the baseline is better in {percent(worse, 1)} of the "
            "bootstrap samples."
        )
    for row in part.probabilities:
        # A gain in AUC may be a loss in log loss or calibration.
        better = {"bad": ", which is worse", "good": ", which is better"}.get(tone(row), "")
        sentences.append(f"{metric(row.metric)} {part.metrics[row.metric]:.4f}, {stands(row)}{better}.")
    return sentences


def lists_text(lists: Metrics) -> str:
    """What users complain of that accuracy does not show."""
    popularity = f"; popularity {lists['popularity']:.2f} of 1" if "popularity" in lists else ""
    return (
        f"lists: {lists['coverage']:.1%} of all items are in one, two users share {lists['overlap']:.1%} of "
        f"theirs, {lists['same_first']:.1%} of the users have the same first item{popularity}"
    )


def _ranked_by(ranking: Ranking, task: Task) -> str:
    if ranking.split and ranking.split in task.held_out:
        own = "compete too" if ranking.repeats else "do not compete"
        return (
            f"Ranked is {task.held_out[ranking.split]}; items that the user already had {own}; ties count against it."
        )
    if meeting := ranking.meeting:
        return (
            f"Candidates are ranked by the probability that the user sees the item, {meeting}, times the predicted "
            "probability of a positive label."
        )
    return "Candidates are ranked by the predicted probability of a positive label."


def to_beat(result: Result) -> Difference | None:
    """The difference to the baseline that the model had to beat, by default the best; None if it is not known."""
    task, quality = named(result.task), result.quality
    beat = task.baseline_to_beat(quality.target.beat or "best", quality.baselines)
    return next((row for row in compared(task, quality) if row.baseline == beat), None)


def standing_text(result: Result) -> str:
    """How far the model is above or below that baseline; empty if that is not known."""
    row = to_beat(result)
    return stands(row) if row else ""


def outcome(result: Result) -> str:
    """Whether the target was met and, where it was not or where there is none, how the model stands, in few words."""
    row, asked = to_beat(result), target_text(result)
    if asked and result.quality.met:
        return "target met"
    missed = ["target missed"] if asked else []
    if row is None or (missed and tone(row) == "good"):
        return "".join(missed)
    where = row.standing if row.standing != "level" else f"{place(row).partition(' (')[0]} from"
    return ": ".join([*missed, f"{where} {baseline(row.baseline)}"])


def _ranking(result: Result) -> list[Block]:
    part, task = result.quality, named(result.task)
    ranking = part.ranking
    if not ranking:
        why = part.not_ranked
        return [Text(f"Items were not ranked: {why}.", "note")] if why else []
    lists = [Text(sentence(lists_text(ranking.lists)), "note")] if ranking.lists else []
    if task.ranks_items:
        return [_ranking_table(result.workload, ranking, _ranked_by(ranking, task)), *lists]
    among = f"all {count(ranking.catalogue)} items"
    if ranking.negatives:
        among = f"{count(ranking.negatives)} items drawn for each user from {count(ranking.catalogue)}"
    own = "compete too, because users of this data repeat" if ranking.repeats else "do not compete: users hardly repeat"
    note = (
        f"The first positive held-out row of {count(ranking.users)} users, ranked among {among} that "
        f"have training rows. Items that a user already had {own} items; ties "
        f"count as if broken at random. {_ranked_by(ranking, task)}"
    )
    if ranking.meeting:
        note += " So are those of baselines that predict labels; the others are ranked by how many rows an item has."
    return [_ranking_table(result.workload, ranking, note), *lists]


def _ranking_table(workload: str, ranking: Ranking, note: str) -> Table:
    names = list(ranking.metrics)
    own = [Cell(f"{ranking.metrics[name]:.4f}", "strong") for name in names]
    rows = [(Cell(workload, "strong", "accent"), *own, Cell(NONE))]
    for row in ranking.differences:
        values = [f"{ranking.baselines[row.baseline][one]:.4f}" for one in names]
        difference = Cell(plus_minus(row.difference, row), tone(row), second_line=place(row))
        rows.append(cells(Cell(baseline(row.baseline), swatch="other"), *values, difference))
    return Table(("", *(metric(name) for name in names), f"{metric(NDCG)} of the model less it"), rows, note)


def _segments(result: Result) -> list[Block]:
    segments = result.quality.segments
    if not segments:
        return []
    best = best_of(result.quality.differences)
    rule = best.baseline if best else None
    ranked = next((list(segment.ranking) for segment in segments if segment.ranking), [])
    rows = []
    for segment in segments:
        counted = segment.counted
        few = f"at most {count(segment.at_most)} {counted}" if segment.name != "the_rest" else ""
        ranking = segment.ranking or {}
        rows.append(
            cells(
                Cell(SEGMENTS.get(segment.name, segment.name), second_line=few),
                count(segment.rows),
                NONE if segment.auc is None else f"{segment.auc:.4f}",
                *([f"{segment.baselines[rule]:.4f}" if rule in segment.baselines else NONE] if rule else []),
                *(f"{ranking[name]:.4f}" if name in ranking else NONE for name in ranked),
            )
        )
    leading = metric(named(result.task).leading)
    beside = (f"{leading}, {baseline(rule)}",) if rule else ()
    head = ("", "scored rows", f"{leading}, {result.workload}", *beside, *(metric(name) for name in ranked))
    counted = segments[0].counted
    note = f"The tenth of the scored rows whose user has the fewest {counted}, the same by item, and the others."
    return [Table(head, rows, note)]


def _calibration(result: Result) -> list[Block]:
    bins = result.quality.calibration
    columns: dict[str, Callable[[CalibrationBin], str]] = {
        "predicted": lambda row: f"{row.predicted:.3f}",
        "observed": lambda row: f"{row.observed:.3f}",
        "rows": lambda row: count(row.rows),
    }
    note = "Calibration: the scored rows in tenths, by prediction, with their share of positives."
    return [table_of(bins, columns, note)] if bins else []
