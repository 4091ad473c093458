"""What one training shows of what limits its quality: the rows that choose the epoch scored again with each input
exchanged, how far weights moved, and where the losses of the scored rows lie.

It changes nothing that is saved, draws from generators of its own, and takes at most a share of the training's time.

Shapes: N scored rows, Q parts of them.
"""

from __future__ import annotations

import math
from itertools import chain
from time import monotonic

import torch
from torch import Tensor
from torch.nn import functional as F

from ..learn.movement import Sampled, moved, sampled
from ..learn.records import FEW, GroupSeen, InputSeen, Mean, QualityEvidence
from ..train.ranking import gains
from .workload import TRAINED, HeldOutFacts, Predictions, Prepared, Trial

SHARE, SECONDS = 0.08, 4.0
"""Inputs are exchanged as long as all this took at most this share of the training and so many seconds."""
AGES, LEAST = 4, 20
"""Parts of the held-out time, and rows of which a mean says something."""


def mean_of(values_N: Tensor) -> Mean:
    values_N = values_N.double()
    error = float(values_N.std()) / math.sqrt(len(values_N)) if len(values_N) > 1 else 0.0
    return Mean(value=float(values_N.mean()), error=error, rows=len(values_N))


def start_of(trial: Trial) -> list[Sampled]:
    """A sample of the weights at the start of a training."""
    return sampled(trial.recipe.model, trial.tables(), trial.state().get("model", {}))


@torch.no_grad()
def evidence_of(
    trial: Trial, prepared: Prepared, predictions: Predictions, start: list[Sampled] | None, trained_s: float
) -> QualityEvidence:
    """What a training of so many seconds shows, whose model made these predictions at its end."""
    began, evidence = monotonic(), QualityEvidence()
    limit = began + SHARE * trained_s + SECONDS
    if start is None:
        evidence.notes.append("how far weights moved is not known of a training that starts from another run")
    else:
        evidence.parts = moved(start)
    trial.recipe.model.train(False)
    probes = _Probes(trial, evidence)
    probes.unchanged()
    if evidence.held is None:
        evidence.notes.append("no rows choose the epoch")
    elif monotonic() < limit:
        facts = prepared.held_out_facts()
        _held_out(evidence, prepared, facts, predictions)
        probes.exchanged(limit)
        for one in evidence.inputs:
            one.alone = facts.alone.get(one.name)
        evidence.strongest = _strongest(evidence, facts)
    else:
        evidence.notes.append("there was no time for the losses of held-out rows by their history, and for inputs")
    evidence.seconds = monotonic() - began
    return evidence


class _Probes:
    """The probes of a trial: those of the model as it is, then those with an input exchanged."""

    def __init__(self, trial: Trial, evidence: QualityEvidence) -> None:
        self._left, self._evidence, self._losses_N = trial.probes(), evidence, torch.zeros(0)
        self._first: tuple[str, Tensor] | None = None

    def unchanged(self) -> None:
        for name, probed_N in self._left:
            if not name:
                self._losses_N, self._evidence.held = probed_N, mean_of(probed_N)
            elif name == TRAINED:
                self._evidence.trained = [mean_of(part_N) for part_N in probed_N.chunk(AGES)]
            else:
                self._first = name, probed_N
                return

    def exchanged(self, limit: float) -> None:
        for name, probed_N in chain([self._first] if self._first else [], self._left):
            self._evidence.inputs.append(InputSeen(name=name, costs=mean_of(probed_N - self._losses_N)))
            if monotonic() > limit:
                self._evidence.notes.append(f"there was no time for inputs after {name}")
                return


def _held_out(evidence: QualityEvidence, prepared: Prepared, facts: HeldOutFacts, predictions: Predictions) -> None:
    """Where the losses of the scored rows lie."""
    if predictions.ranks_N is not None:
        losses_N = 1 - gains(predictions.ranks_N - 1, 0 * predictions.ranks_N)["ndcg_10"]
    else:
        logits_N, labels_N = predictions.logits_N.double(), predictions.labels_N.double()
        losses_N = F.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="none")
    for name, rows_N in facts.training_rows.items():
        if len(rows_N) == len(losses_N):
            evidence.groups += _groups(name, rows_N, losses_N)
    rows = prepared.scored_rows()
    by_time = "held_out_from" in prepared.data or str(prepared.data.get("split", "")).startswith("time")
    if by_time and predictions.ranks_N is None:
        order_N = torch.arange(len(losses_N)) if rows.times_N is None else rows.times_N.argsort(stable=True)
        evidence.ages = [mean_of(part_N) for part_N in losses_N[order_N].chunk(AGES) if len(part_N) >= LEAST]
    evidence.repeats, evidence.targets, evidence.later = facts.repeats, facts.targets, dict(facts.later)
    evidence.known_users = dict(facts.known_users)
    evidence.at_most = facts.at_most
    evidence.lists = dict(predictions.lists)


def _strongest(evidence: QualityEvidence, facts: HeldOutFacts) -> InputSeen | None:
    """The input that alone predicts the label best."""
    if not facts.alone:
        return None
    name = max(facts.alone, key=lambda one: facts.alone[one])
    costs = next((one.costs for one in evidence.inputs if one.name == name), Mean(value=0.0, error=0.0, rows=0))
    return InputSeen(name=name, costs=costs, alone=facts.alone[name])


def _groups(name: str, rows_N: Tensor, losses_N: Tensor) -> list[GroupSeen]:
    """Losses by the number of training rows; groups of few rows are left out."""
    seen, before = [], -1
    for at_most in (*FEW, None):
        inside_N = rows_N > before if at_most is None else (rows_N > before) & (rows_N <= at_most)
        if int(inside_N.sum()) >= LEAST:
            seen.append(GroupSeen(name=name, at_most=at_most, loss=mean_of(losses_N[inside_N])))
        before = before if at_most is None else at_most
    return seen
