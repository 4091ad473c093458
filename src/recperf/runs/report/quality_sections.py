"""Quality beyond the metrics: certainty, rankings, segments and calibration, as blocks of a page and of a terminal."""

from __future__ import annotations

from ...train.config import baseline_to_beat
from ..quality import best_of, compared, standing
from ..result import Difference, Metrics, Quality, Ranking, RankingDifference, Result, WithinUsers
from . import curves
from .blocks import Block, Cell, Figure, Table, Text, cells
from .formats import NONE, baseline, count, metric, percent, sentence

STANDINGS = {"above": "more than chance", "level": "level, since that may be chance", "below": "more than chance"}
SEGMENTS = {"new_users": "new users", "rare_items": "rare items", "the_rest": "the rest"}


def certainty(result: Result) -> list[str]:
    """How certain quality is, of the AUC and of rankings."""
    return [*auc_certainty(result), *_ranked(result)]


def auc_certainty(result: Result) -> list[str]:
    """How certain the AUC is, and the difference to the best baseline."""
    part, sentences = result.quality, []
    bounds, difference = part.interval, best_of(part.differences)
    if bounds:
        sentences.append(
            f"AUC {part.metrics['auc']:.4f} ({bounds.low:.3f} to {bounds.high:.3f}, 95 %), from "
            f"{bounds.replicates} bootstrap samples of {count(bounds.units)} {bounds.by}."
        )
    if difference:
        share = percent(difference.below_zero, 1)
        sentences.append(
            f"{_over(difference)}: {STANDINGS[standing(difference)]}; the baseline is better in {share} of the "
            "bootstrap samples."
        )
    return sentences + _probabilities(part)


def _probabilities(part: Quality) -> list[str]:
    """Log loss and calibration: a gain in AUC may be a loss there."""
    sentences = []
    for row in part.probabilities:
        own, name = part.metrics[row.metric], baseline(row.baseline)
        place = f"level with {name}" if row.standing == "level" else f"{row.standing} than {name}, more than chance"
        sentences.append(
            f"{metric(row.metric)} {own:.4f}: {place} ({own - row.difference:.4f}; difference {row.difference:+.4f}, "
            f"{row.low:+.4f} to {row.high:+.4f})."
        )
    return sentences


def _ranked(result: Result) -> list[str]:
    part, sentences = result.quality, []
    own_rows, ranking = part.within_users, part.ranking
    if own_rows:
        best = best_of(own_rows.differences)
        beside = f"; {_over(best)}" if best else ""
        sentences.append(
            f"NDCG@10 {own_rows.metrics['user_ndcg_10']:.4f} among each user's own scored rows, "
            f"{count(own_rows.users)} users{beside}."
        )
    if ranking:
        names = ", ".join(f"{metric(name)} {value:.4f}" for name, value in ranking.metrics.items())
        best = best_of(ranking.differences)
        beside = f"; NDCG@10 {_over(best)}" if best else ""
        sentences.append(f"{names} over {_candidates(ranking)}, {count(ranking.users)} users{beside}.")
        sentences.append(_ranked_by(ranking))
    return sentences


def lists_text(lists: Metrics) -> str:
    """What users complain of that accuracy does not show."""
    popularity = f"; popularity {lists['popularity']:.2f} of 1" if "popularity" in lists else ""
    return (
        f"lists: {lists['coverage']:.1%} of all items are in one, two users share {lists['overlap']:.1%} of "
        f"theirs, {lists['same_first']:.1%} of the users have the same first item{popularity}"
    )


def _ranked_by(ranking: Ranking) -> str:
    if ranking.split:
        own = "compete too" if ranking.repeats else "do not compete"
        held_out = "the last item of each user" if ranking.split == "leave-one-out" else "each user's first later item"
        return f"Ranked is {held_out}; items that the user already had {own}; ties count against it."
    if meeting := ranking.meeting:
        return (
            f"Candidates are ranked by the probability that the user meets the item, {meeting}, times the predicted "
            "probability of a positive label."
        )
    return "Candidates are ranked by the predicted probability of a positive label."


def standing_text(result: Result) -> str:
    """How far the model is above or below the baseline that it had to beat, and whether that may be chance; empty if
    the difference is not known."""
    part = result.quality
    beat = baseline_to_beat(part.target.beat, part.baselines)
    row = next((row for row in compared(part) if row.baseline == beat), None)
    if row is None:
        return ""
    place = f"level with {baseline(row.baseline)}"
    if (side := standing(row)) != "level":
        place = f"{abs(_value(row)):.4f} {side} {baseline(row.baseline)}"
    return f"{place}, the 95 % interval of the difference is {row.low:.4f} to {row.high:.4f}"


def _value(row: Difference | RankingDifference) -> float:
    return row.auc if isinstance(row, Difference) else row.ndcg


def _over(row: Difference | RankingDifference) -> str:
    """`+0.0120 over gradient boosting (0.0080 to 0.0160), 5 seeds`."""
    low, high, seeds, value = row.low, row.high, row.seeds, _value(row)
    over = f"{value:+.4f} over"
    if value < 0:
        over, low, high = f"{-value:.4f} below", -high, -low
    return f"{over} {baseline(row.baseline)} ({low:.4f} to {high:.4f}), {seeds} seed{'s' * (seeds > 1)}"


def _candidates(ranking: Ranking) -> str:
    if ranking.negatives:
        return f"{count(ranking.negatives)} items drawn for each user from {count(ranking.catalogue)}"
    return f"all {count(ranking.catalogue)} items"


def warnings(result: Result) -> list[Block]:
    return [Text(sentence(text), "warning") for text in result.quality.warnings]


def details(result: Result, key: str) -> list[Block]:
    """Everything that scores.json adds to a result, for its page."""
    return [
        *_within_users(result),
        *_ranking(result),
        *_segments(result),
        *_calibration(result, key),
    ]


def _difference(row: Difference | RankingDifference) -> Cell:
    tone = "good" if row.low > 0 else "bad" if row.high < 0 else ""
    return Cell(f"{_value(row):+.4f}", tone, second_line=f"{row.low:+.4f} to {row.high:+.4f}")


def _within_users(result: Result) -> list[Block]:
    rows = result.quality.within_users
    if not rows:
        return []
    note = (
        f"The scored rows of each of {count(rows.users)} users with both labels, ordered among themselves: how a "
        "model orders items that a user did meet. Ties count as if broken at random."
    )
    return [_ranking_table(result.workload, rows, note)]


def _ranking(result: Result) -> list[Block]:
    part = result.quality
    ranking = part.ranking
    if not ranking:
        why = part.not_ranked
        return [Text(f"Items were not ranked: {why}.", "note")] if why else []
    lists: list[Block] = [Text(f"{sentence(lists_text(ranking.lists))}", "note")] if ranking.lists else []
    if ranking.split:
        return [_ranking_table(result.workload, ranking, _ranked_by(ranking)), *lists]
    own = "compete too, because users of this data repeat" if ranking.repeats else "do not compete: users hardly repeat"
    note = (
        f"The first positive held-out row of {count(ranking.users)} users, ranked among {_candidates(ranking)} that "
        f"have training rows. Items that a user already had {own} items; ties "
        f"count as if broken at random. {_ranked_by(ranking)}"
    )
    if ranking.meeting:
        note += " So are those of baselines that predict labels; the others are ranked by how many rows an item has."
    return [_ranking_table(result.workload, ranking, note), *lists]


def _ranking_table(workload: str, ranking: Ranking | WithinUsers, note: str) -> Table:
    names = list(ranking.metrics)
    own = [Cell(f"{ranking.metrics[name]:.4f}", "strong") for name in names]
    rows = [(Cell(workload, "strong", "accent"), *own, Cell(NONE))]
    by_name = {row.baseline: row for row in ranking.differences}
    for name, row in by_name.items():
        values = [f"{ranking.baselines[name][one]:.4f}" for one in names]
        rows.append(cells(Cell(baseline(name), swatch="other"), *values, _difference(row)))
    return Table(("", *(metric(name) for name in names), "NDCG@10, model less baseline"), rows, note)


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
    beside = (f"AUC, {baseline(rule)}",) if rule else ()
    head = ("", "scored rows", f"AUC, {result.workload}", *beside, *(metric(name) for name in ranked))
    counted = segments[0].counted
    note = f"The tenth of the scored rows whose user has the fewest {counted}, the same by item, and the others."
    return [Table(head, rows, note)]


def _calibration(result: Result, key: str) -> list[Block]:
    bins = result.quality.calibration
    if not bins:
        return []
    pairs = [(row.predicted, row.observed) for row in bins]
    listed = ", ".join(f"{predicted:.2f} predicted {observed:.2f} observed" for predicted, observed in pairs)
    draw = lambda: curves.reliability(pairs)  # noqa: E731
    caption = "Calibration: the scored rows in tenths, by prediction. On the dashed line both rates are equal."
    return [Figure(f"{key}-calibration", f"Predicted and observed rates: {listed}", caption, draw)]
