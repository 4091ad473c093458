"""What a run records of predictions beside their metrics: bootstrap replicates, segments, calibration and rankings, of
the model and of the baselines.

Shapes: N scored rows, Q ranked rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import monotonic, perf_counter
from typing import Any, TypeVar

import torch
from msgspec import convert, structs
from torch import Tensor

from ..distributed.ranks import Ranks
from ..errors import DataError
from ..jsonfile import require, sealed
from ..measure.records import Percentiles
from ..phases import phase, spent, working
from ..runs.derive import LEAKED_AUC, few_rows
from ..runs.record import Run
from ..runs.result import Baselines, CalibrationBin
from ..runs.schemas import (
    Progress,
    RankingFacts,
    SampledRanking,
    SampledScores,
    SavedScores,
    SegmentFacts,
    StrongestFeature,
)
from ..stop import poll
from ..train.baselines import Unfit
from ..train.metrics import Resampling, auc, binary_metrics, reliability
from ..train.ranking import COUNTS, REPEATS, TOP, Scorer, drawn, first_positives, gains, joint, list_quality, positions
from .own_keys import keys_of, paired, rows_digest
from .workload import MOST_ROWS, Catalogue, Predictions, Prepared, RankingConfig, ScoredRows, Trial

T = TypeVar("T")
FILE = "scores.json"
SEGMENT = 0.1
"""The share of the scored rows whose users, or items, have the fewest training rows: the new users and rare items."""
SHARE = 0.2
"""Ranking by default adds at most this to the counted work of the training."""
STEP_PASSES = 3
"""A training step has about the work of this many forward passes."""
LEAST_USERS, MOST_USERS, LEAST_NEGATIVES = 100, 10_000, 100
MOST_SCORED = 100_000_000
"""Candidates of all ranked users together, where a number of users is asked for: minutes on a CPU."""
LEAST_LISTED, MOST_LISTED = 20, 200
MOST_RECORDED = 10_000
"""Users whose ranks are recorded, by which two runs are compared."""
TIMED, FEWEST_TIMED, TIMED_S = 30, 5, 2.0
"""Users for each of whom all items are scored alone, to time it, and how long that takes about."""
Keys = tuple[Tensor | None, Tensor | None]
"""Of the users and of the items of rows; None where these are not known."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How predictions of rows are compared with their labels; each function takes both."""

    metrics: Callable[[Tensor, Tensor], dict[str, float]]
    """Of a baseline; `Trial.metrics` has those of a model."""
    leading: Callable[[Tensor, Tensor], float]
    """The leading metric of the task."""
    replicates: Callable[[Resampling, Tensor, Tensor], dict[str, list[float]]]
    """Of the leading metric, and of others, in each bootstrap replicate."""
    calibration: Callable[[Tensor, Tensor], list[dict[str, float]]] = lambda logits_N, labels_N: []


class Assessment:
    """The scores of a run's baselines and trained seeds, kept in scores.json as they come. A task whose labels are
    scored in another way names a subclass that has another `scoring`."""

    scoring = Scoring(metrics=binary_metrics, leading=auc, replicates=Resampling.of_labels, calibration=reliability)

    def __init__(self, run: Run, world: Ranks, prepared: Prepared, notice: Callable[[str], None]) -> None:
        self.run, self.world, self.prepared, self.notice = run, world, prepared, notice
        self._earlier = self._read()
        """Scores that the run has so far."""
        self._trained_earlier = 0.0
        """Seconds of training in the processes before this one."""
        self.logits_N: Tensor | None = None
        """Of the scored rows, by the seed that was trained last."""
        if text := few_rows(prepared.data["valid_rows"]):
            notice(text)

    def _read(self) -> SavedScores | None:
        """What the run has so far. No checkpoint has a digest of it, so it has one of itself."""
        value: dict[str, Any] | None = self.run.read(FILE)
        if value is None:
            return None
        seal = value.pop("seal", None)
        if sealed(value)["seal"] != seal:
            what = f"{FILE} is damaged: it was changed after it was written"
            raise DataError(what, where={"folder": self.run.folder}, fix="start a new run")
        return require(value, SavedScores, self.run.folder / FILE, what="is damaged", fix="start a new run")

    def baselines(self) -> dict[str, Any]:
        """Metrics of the baselines, from baselines.json where it exists. All ranks ask together."""
        metrics = self.run.read("baselines.json", Baselines)
        # All ranks read together: rank 0 alone must not.
        progress: Progress | None = self.run.read("progress.json", Progress)
        self._trained_earlier = progress.waited.get("training", 0.0) if progress else 0.0
        if metrics is None or self.world.on_leader(self._outdated):
            with phase("baselines", "baselines"):
                computed, scores = self.world.on_leader(lambda: self._baselines(metrics))
            self._earlier = scores
            self.run.write(FILE, sealed(scores))
            if metrics is None:
                metrics = computed
                self.run.write("baselines.json", metrics)
        return dict(metrics)

    def _baselines(self, metrics: dict[str, Any] | None) -> tuple[dict[str, Any], SavedScores]:
        rows, computed, assessed = self.prepared.scored_rows(), dict(metrics or {}), self._assessed
        scores = assessed.facts()
        scores.seeds = self._earlier_seeds(scores)
        for name, logits_N in self.in_time(self.prepared.baseline_logits(), scores):
            if metrics is None:
                computed[name] = self.scoring.metrics(logits_N, rows.labels_N)
            if assessed.resampling and name in computed:
                scores.baselines[name] = assessed.sampled(logits_N, rows.labels_N)
        if scores.ranking:
            for name, scorer in self.in_time(self.prepared.baseline_scorers(), scores):
                scores.ranking.baselines[name] = assessed.ranks(scorer, predicts_labels=name not in COUNTS)
        return computed, scores

    def in_time(self, rules: Mapping[str, T], scores: SavedScores) -> Iterator[tuple[str, T]]:
        """The rules that can be fitted, as long as there is time; the others are noted as left out."""
        seconds = self.prepared.config.baseline_seconds
        for number, name in enumerate(rules):
            if number and seconds and spent("baselines") > seconds + self._trained_earlier + spent("training"):
                scores.left_out = (*scores.left_out, name)
                continue
            poll()
            working(f"baselines: {name.replace('_', ' ')}")
            with suppress(Unfit):
                yield name, rules[name]

    def _earlier_seeds(self, facts: SavedScores) -> dict[str, SampledScores]:
        """Seeds that an earlier process trained, without what has another meaning since the rows changed."""
        if self._earlier is None:
            return {}
        changed: dict[str, Any] = {}
        if self._earlier.segments != facts.segments:
            changed["segments"] = {}
        if not _same_ranking(self._earlier, facts):
            changed["ranking"] = None
        return {seed: structs.replace(row, **changed) for seed, row in self._earlier.seeds.items()}

    def _outdated(self) -> bool:
        """Whether no scores exist, or those of another ranking, and no seed has been ranked yet."""
        if self._earlier is None:
            return True
        return not self._earlier.seeds and not _same_ranking(self._earlier, self._assessed.facts())

    @cached_property
    def _assessed(self) -> AssessedRows:
        """The assessed rows of the first seed; where seeds have rows of their own, no user and no item is known."""
        rows, catalogue = self.prepared.scored_rows(), None
        reason = "rows have no user or no item"
        if len(rows.labels_N) > MOST_ROWS:
            reason = f"more than {MOST_ROWS:,} rows are scored"
        elif self.world.size > 1:
            reason = "several ranks hold the tables"
        else:
            catalogue = self.prepared.catalogue()
        keys = keys_of_rows(self.prepared, rows)
        if catalogue is None:
            return AssessedRows(rows, keys, None, reason, self.scoring)
        return AssessedRows(rows, keys, catalogue, self._ranked(rows, keys, catalogue), self.scoring)

    def _ranked(self, rows: ScoredRows, keys: Keys, catalogue: Catalogue) -> RankedRows | str:
        """What the config asks for; once a seed has been ranked, what was ranked then, so that seeds are comparable."""
        config, earlier = self.prepared.config, self._earlier
        trained = config.train.epochs * self.prepared.data["train_rows"]
        if config.train.max_steps:
            trained = min(trained, config.train.max_steps * config.train.batch_size)
        ranking = config.ranking
        if earlier and earlier.seeds and earlier.rows_digest == rows_digest(rows.labels_N, *keys):
            if earlier.ranking is None:
                return earlier.not_ranked or ""
            ranking = RankingConfig(users=earlier.ranking.users, negatives=earlier.ranking.negatives)
        return RankedRows.choose(ranking, trained, rows, keys, catalogue)

    def trained(self, seed: int, trial: Trial, predictions: Predictions) -> None:
        """Record the predictions of a trained model, beside those of the baselines."""
        self.baselines()
        self.logits_N = predictions.logits_N
        self._earlier = scores = self._read()
        assert scores is not None
        with phase("scoring", "scoring"):
            recorded: SampledScores | None = self.world.on_leader(lambda: self._trained(trial, predictions))
        if recorded is None:
            return
        scores.seeds[str(seed)] = recorded
        if self.scoring.leading is auc and (recorded.leading or 0.0) > LEAKED_AUC and scores.strongest_feature is None:
            alone = self.prepared.held_out_facts().alone
            strongest = max(alone.items(), key=lambda pair: pair[1], default=None)
            scores.strongest_feature = StrongestFeature(*strongest) if strongest else None
        self.run.write(FILE, sealed(scores))

    @torch.no_grad()
    def _trained(self, trial: Trial, predictions: Predictions) -> SampledScores | None:
        rows = ScoredRows(predictions.labels_N, predictions.users_N, predictions.items_N)
        if len(rows.labels_N) > MOST_ROWS:
            return None
        assessed, keys = self._assessed, keys_of_rows(self.prepared, rows)
        digest = rows_digest(rows.labels_N, *keys)
        if digest != assessed.digest:
            assessed = AssessedRows(rows, keys, None, "", self.scoring)
        recorded = assessed.sampled(predictions.logits_N, rows.labels_N)
        recorded.rows_digest = digest
        bins = self.scoring.calibration(predictions.logits_N, rows.labels_N)
        recorded.calibration = convert(bins, tuple[CalibrationBin, ...])
        if isinstance(assessed.ranked, RankedRows):
            trial.recipe.model.train(False)
            recorded.ranking = assessed.ranks(trial.candidate_logits, predicts_labels=True)
            recorded.ranking.lists = assessed.ranked.lists(trial.candidate_logits)
            recorded.ranking.one_ms = assessed.ranked.one_ms(trial.candidate_logits)
        return recorded


def keys_of_rows(prepared: Prepared, rows: ScoredRows) -> Keys:
    """The keys of the users and items of rows; none where these are not collected."""
    if len(rows.labels_N) > MOST_ROWS:
        return None, None
    pairs = (("user", rows.users_N), ("item", rows.items_N))
    users_N, items_N = (None if ids is None else keys_of(ids, prepared.own_ids(role)) for role, ids in pairs)
    return users_N, items_N


@dataclass(frozen=True, eq=False)
class AssessedRows:
    """Scored rows, with what is needed to compare models on them."""

    rows: ScoredRows
    keys: Keys
    catalogue: Catalogue | None
    ranked: RankedRows | str
    """Which rows are ranked, or why none are."""
    scoring: Scoring

    @cached_property
    def resampling(self) -> Resampling | None:
        count = len(self.rows.labels_N)
        return None if count > MOST_ROWS else Resampling(count, self.keys[0])

    @cached_property
    def digest(self) -> str:
        return rows_digest(self.rows.labels_N, *self.keys)

    @cached_property
    def segments(self) -> dict[str, tuple[Tensor, int]]:
        """Which rows are in each segment, and the number of training rows up to which they are; the rest is in none."""
        if self.catalogue is None:
            return {}
        counts = {"new_users": self.catalogue.user_rows_N, "rare_items": self.catalogue.item_rows_N}
        segments: dict[str, tuple[Tensor, int]] = {}
        for name, rows_N in counts.items():
            bound = int(rows_N.kthvalue(max(1, int(SEGMENT * len(rows_N)))).values)
            inside_N = rows_N <= bound
            if int(inside_N.sum()) <= len(inside_N) // 2:
                segments[name] = inside_N, bound
        rest_N = torch.ones(len(self.rows.labels_N), dtype=torch.bool)
        for inside_N, _ in segments.values():
            rest_N &= ~inside_N
        return {**segments, "the_rest": (rest_N, 0)} if segments else {}

    def facts(self) -> SavedScores:
        """What scores.json says of the rows."""
        resampling, rows = self.resampling, len(self.rows.labels_N)
        counted = {"new_users": self.catalogue.user_rows_are} if self.catalogue else {}
        return SavedScores(
            rows=rows,
            rows_digest=self.digest,
            by=resampling.by if resampling else "rows",
            units=resampling.units if resampling else rows,
            segments={
                name: SegmentFacts(int(inside_N.sum()), bound, counted.get(name, "training rows"))
                for name, (inside_N, bound) in self.segments.items()
            },
            ranking=None if isinstance(self.ranked, str) else self.ranked.facts(),
            not_ranked=self.ranked if isinstance(self.ranked, str) else None,
        )

    def sampled(self, logits_N: Tensor, labels_N: Tensor) -> SampledScores:
        """The leading metric, in each segment whose labels differ, and in replicates."""
        assert self.resampling is not None
        by_segment = {}
        for name, (inside_N, _) in self.segments.items():
            inside_labels = labels_N[inside_N]
            if len(inside_labels) and inside_labels.min() < inside_labels.max():
                by_segment[name] = self.scoring.leading(logits_N[inside_N], inside_labels)
        return SampledScores(
            leading=self.scoring.leading(logits_N, labels_N),
            replicates=self.scoring.replicates(self.resampling, logits_N, labels_N),
            segments=by_segment,
        )

    def ranks(self, score: Scorer, *, predicts_labels: bool) -> SampledRanking:
        assert isinstance(self.ranked, RankedRows)
        segments = {name: inside for name, (inside, _) in self.segments.items()}
        return self.ranked.ranked(score, segments, predicts_labels=predicts_labels)


@dataclass(frozen=True, eq=False)
class RankedRows:
    """Which rows are ranked, and among which items."""

    rows_Q: Tensor
    users_Q: Tensor
    """Keys of the users, ascending: of fewer users, those that are ranked of more too."""
    keys_Q: Tensor
    """Those of the users with their items."""
    negatives: int
    """Items that are drawn for each; 0: the whole catalogue."""
    catalogue: Catalogue
    items_N: Tensor
    repeats: bool
    """Whether items that a row's user already has compete."""
    meeting_is: str | None
    """What says how likely users see items; None: candidates are ranked by predicted labels alone."""
    listed: int
    """Rows for which the whole catalogue is ranked, to compare the lists of different users."""

    @staticmethod
    def choose(
        config: RankingConfig, trained: int, rows: ScoredRows, keys: Keys, catalogue: Catalogue
    ) -> RankedRows | str:
        """The rows that the config asks for, or why none are ranked; `trained` samples are trained on in all."""
        if config.users == 0:
            return "ranking.users is 0"
        users_N, items_N = keys
        assert rows.users_N is not None
        assert rows.items_N is not None
        assert users_N is not None
        assert items_N is not None
        rows_Q = first_positives(
            rows.labels_N if rows.targets_N is None else rows.targets_N, rows.users_N, rows.times_N
        )
        rows_Q = rows_Q[users_N[rows_Q].argsort()]
        size, budget = len(catalogue.items_I), int(SHARE * STEP_PASSES * trained)
        if not len(rows_Q) or not size:
            return "no user has a positive held-out row" if size else "the catalogue is empty"
        users, negatives = config.users, config.negatives
        least = min(len(rows_Q), LEAST_USERS)
        if negatives is None:
            negatives = 0
            if users is None and budget // size < least:
                negatives = budget // least
        if users is not None and not negatives:
            users = min(users, max(LEAST_USERS, MOST_SCORED // size))
        if users is None:
            users = min(MOST_USERS, budget // (min(negatives, size) or size))
            if users < least or 0 < negatives < min(size, LEAST_NEGATIVES):
                return f"it would add more than {SHARE:.0%} to the work of this training (--ranking.users {least})"
        negatives, repeats = negatives if negatives < size else 0, catalogue.repeats > REPEATS
        rows_Q = rows_Q[:users]
        users_Q, listed = users_N[rows_Q], min(len(rows_Q), MOST_LISTED, budget // size)
        return RankedRows(
            rows_Q,
            users_Q,
            paired(users_Q, items_N[rows_Q]),
            negatives,
            catalogue,
            rows.items_N,
            repeats,
            catalogue.meeting_is,
            listed,
        )

    def candidates(self) -> Iterator[Tensor]:
        """The items that each row's own competes with. Whether those that its user already has are among them is
        decided once for all rows: a choice by the row's own item would give it away."""
        for row in self.rows_Q.tolist():
            poll()
            items_I = self.catalogue.items_I
            if not self.repeats:
                items_I = items_I[~torch.isin(items_I, self.catalogue.seen(row))]
            yield drawn(items_I, self.negatives, row) if self.negatives else items_I

    def facts(self) -> RankingFacts:
        return RankingFacts(
            users=len(self.rows_Q),
            catalogue=len(self.catalogue.items_I),
            negatives=self.negatives,
            repeats=self.repeats,
            meeting=self.meeting_is,
            keys=self.keys_Q[:MOST_RECORDED].tolist(),
        )

    @cached_property
    def resampling(self) -> Resampling:
        return Resampling(len(self.rows_Q), self.users_Q)

    def ranked(self, score: Scorer, segments: dict[str, Tensor], *, predicts_labels: bool) -> SampledRanking:
        """Metrics, those of each segment of the scored rows, and replicates of the NDCG."""
        score = self._joint(score) if predicts_labels else score
        targets_Q = self.items_N[self.rows_Q]
        own_Q = score(self.rows_Q, targets_Q).double().cpu()
        higher_Q, same_Q, _ = positions(score, self.rows_Q, own_Q, targets_Q, self.candidates())
        inside = {name: inside_N[self.rows_Q] for name, inside_N in segments.items()}
        return recorded_ranks(1 + higher_Q + same_Q, self.resampling, inside)

    def one_ms(self, score: Scorer) -> Percentiles | None:
        """How long it takes to score all items for one user, and to list the ten highest."""
        score = self._joint(score)

        def scored(place: int) -> Tensor:
            items_I = self.catalogue.items_I
            return score(self.rows_Q[place].expand_as(items_I), items_I)

        return timed(scored, len(self.rows_Q))

    def _joint(self, score: Scorer) -> Scorer:
        return score if self.meeting_is is None else joint(score, self.catalogue.meeting)

    def lists(self, score: Scorer) -> dict[str, float]:
        """What the lists of different users have in common, and how popular their items are; nothing for few users."""
        if self.listed < LEAST_LISTED:
            return {}
        score, rows_Q, rows_I = self._joint(score), self.rows_Q[: self.listed], self.catalogue.rows_I
        targets_Q = self.items_N[rows_Q]
        candidates = replace(self, rows_Q=rows_Q, negatives=0).candidates()
        own_Q = score(rows_Q, targets_Q).double().cpu()
        lists_QK = positions(score, rows_Q, own_Q, targets_Q, candidates, top=TOP)[2]
        # From 1 on; the last place stands for no item.
        items_I = self.catalogue.items_I
        place_I = torch.zeros(len(rows_I) + 1, dtype=torch.int64).index_put_((items_I,), 1 + torch.arange(len(items_I)))
        return list_quality(place_I[lists_QK], len(items_I), rows_I[items_I].numpy())


def recorded_ranks(ranks_Q: Tensor, resampling: Resampling, segments: dict[str, Tensor]) -> SampledRanking:
    """What scores.json says of ranked rows, in the order of their users' keys: means, those of each segment, replicates
    of the NDCG, and ranks."""
    gain, by_segment = gains(ranks_Q - 1, 0 * ranks_Q), {}
    for name, inside_Q in segments.items():
        if bool(inside_Q.any()):
            by_segment[name] = {metric: float(gain_Q[inside_Q].mean()) for metric, gain_Q in gain.items()}
    return SampledRanking(
        metrics={name: float(gain_Q.mean()) for name, gain_Q in gain.items()},
        segments=by_segment,
        ndcg_replicates=resampling.mean(gain[f"ndcg_{TOP}"], torch.arange(len(ranks_Q))),
        ranks=ranks_Q[:MOST_RECORDED].tolist(),
    )


def timed(score: Callable[[int], Tensor], users: int) -> Percentiles | None:
    """The time in which a function scores all items for a user and lists the ten highest; None for too few users."""
    times: list[float] = []
    began = monotonic()
    for place in range(min(users, 1 + TIMED)):
        start = perf_counter()
        scores_I = score(place).view(-1)
        scores_I.topk(min(TOP, len(scores_I))).indices.cpu()
        times.append(1e3 * (perf_counter() - start))
        if len(times) > FEWEST_TIMED and monotonic() - began > TIMED_S:
            break
    # The first call may compile, or allocate.
    tenths = statistics.quantiles(times[1:], n=10, method="inclusive") if len(times) > FEWEST_TIMED else []
    return Percentiles(tenths[1], tenths[4], tenths[7]) if tenths else None


def _same_ranking(one: SavedScores, other: SavedScores) -> bool:
    """Whether two scores rank the same rows among the same items, or rank nothing."""
    first, second = (scores.ranking and structs.replace(scores.ranking, baselines={}) for scores in (one, other))
    return first == second
