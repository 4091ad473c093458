"""Counts the training events for the counted parts of a model's scores, and fits the weights of all parts.

The weights are those that make validation targets most likely among the items that any part ranks high: a convex
problem in a few numbers, pulled towards weights that are good on most data. Where they do not rank the validation
targets better than the best counted part alone, by more than the standard error, that part alone counts.

Shapes: N validation targets, J candidates of a target, P parts, C facts, I items, W entries, M moments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.next_item import NextItemData, Targets
from ..models.next_item.counting import (
    ALIKE,
    EARLIER,
    FOLLOWS,
    MODEL,
    OWN,
    POPULARITY,
    RECENT,
    CountedRows,
    Counting,
)
from ..stop import poll
from .item_rules import ItemToItem, RecentPopularity
from .next_item import Longs, Scorer, Seen, item_counts, left_out

ENTRIES = 1 << 24
"""Counts that are stored, about: of each item those of the items that followed it most."""
FEWEST, MOST = 100, 1000
"""Counts that are stored of an item, at least and at most."""
MOMENTS = 1 << 22
"""Numbers of recent popularity that are stored."""
BLOCK = 1 << 12
"""Items whose counts are selected at a time."""
CANDIDATES = 30
"""Items that each part suggests for a target."""
LISTED = 10
USUAL = {MODEL: 0.5, FOLLOWS: 0.25, ALIKE: 0.1, POPULARITY: 0.03, RECENT: 0.03, OWN: 0.25, EARLIER: 0.1}
"""Weights of parts that are good on most data."""
COUNTS = "counts"
"""All counted parts together."""
PULL, FACT_PULL = 30.0, 100.0
"""How strongly a weight is pulled to the usual one, and the influence of a fact to none, in validation targets."""
FITTED = 1000
"""Validation targets that weights are fitted on, of those among the candidates."""
STEPS, SHORTEST, CLOSE = 30, 1e-4, 1e-9
"""Steps at most, the shortest one, and the share of the loss that another step must gain."""
TIES = 1e-4
"""Weight of the popularity that breaks ties of a part that counts alone."""


def counted(data: NextItemData, scorers: Mapping[str, Scorer], seen: Seen, *, started: bool = False) -> Counting:
    """The counted parts with the settings that the baselines have; of a run that started from another `take_over` adds
    the counts of that one."""
    others = {"events_I": torch.from_numpy(item_counts(data).astype(np.float32))}
    recent = scorers.get("recent_popularity")
    if isinstance(recent, RecentPopularity):
        others |= _recent(data, recent)
    tables = {
        FOLLOWS: _rows(data, scorers["item_to_item"]),
        ALIKE: _rows(data, scorers["item_knn"]),
        "others": others,
    }
    return Counting(recent=recent is not None, own=seen == "kept", started=started, tables=tables)


def _rows(data: NextItemData, scorer: Any) -> dict[str, Tensor]:
    """The highest entries of each row of the matrix that a baseline adds up."""
    assert isinstance(scorer, ItemToItem)
    blocks = []
    for first in range(0, data.items, BLOCK):
        poll()
        items_R = np.arange(first, min(first + BLOCK, data.items), dtype=np.int32)
        blocks.append(_highest(data.items, *scorer.entries(items_R), rows=len(items_R)))
    offsets = [block["offsets_I1"].diff() for block in blocks]
    return {
        "offsets_I1": torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(offsets).cumsum(0)]),
        **{name: torch.cat([block[name] for block in blocks]) for name in ("columns_W", "values_W")},
        "decay_1": torch.tensor([scorer.decay]),
    }


def _highest(items: int, rows_W: Longs, columns_W: Any, values_W: Any, *, rows: int | None = None) -> dict[str, Tensor]:
    """The highest entries of each row, of entries in the order of their rows."""
    most = min(MOST, max(FEWEST, ENTRIES // max(1, items)))
    counts_R, chosen_W = np.bincount(rows_W, minlength=items if rows is None else rows), np.arange(len(rows_W))
    if len(rows_W) and counts_R.max() > most:
        place_W = chosen_W - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        chosen_W = np.sort(np.lexsort((-values_W, rows_W))[place_W < most])
    return {
        "offsets_I1": torch.from_numpy(np.append(0, np.cumsum(np.minimum(counts_R, most)))),
        "columns_W": torch.from_numpy(columns_W[chosen_W].astype(np.int32)),
        "values_W": torch.from_numpy(values_W[chosen_W].astype(np.float32)),
    }


def take_over(counting: Counting, saved: Mapping[str, Tensor], rows_2N: tuple[Tensor, Tensor]) -> None:
    """Add what followed items in the data of another run, and in that of the one which it started from: `rows_2N` are
    the numbers that items have there and here."""
    items, rows, columns, values = len(counting.events_I), [], [], []
    for name in (FOLLOWS, EARLIER):
        offsets_I1 = saved.get(f"counting.{name}.offsets_I1")
        if offsets_I1 is not None:
            number_I = torch.full((len(offsets_I1),), -1)
            number_I[rows_2N[0]] = rows_2N[1] - 1
            rows_W = torch.repeat_interleave(torch.arange(len(offsets_I1) - 1), offsets_I1.diff())
            rows_W, columns_W = number_I[rows_W + 1], number_I[saved[f"counting.{name}.columns_W"].long() + 1]
            there_W = (rows_W >= 0) & (columns_W >= 0)
            rows.append(rows_W[there_W])
            columns.append(columns_W[there_W])
            values.append(saved[f"counting.{name}.values_W"][there_W])
    if not rows:
        return
    codes_W, places_W = torch.unique(torch.cat(rows) * items + torch.cat(columns), return_inverse=True)
    sums_W = torch.zeros(len(codes_W)).index_add_(0, places_W, torch.cat(values))
    scorer_rows = _highest(items, (codes_W // items).numpy(), (codes_W % items).numpy(), sums_W.numpy())
    counting.earlier = CountedRows({**scorer_rows, "decay_1": counting.follows.decay_1.cpu()})
    counting.to(counting.means_C.device)


def _recent(data: NextItemData, recent: RecentPopularity) -> dict[str, Tensor]:
    """Popularity just before some of the held-out targets, and after the last training event."""
    assert data.times_E is not None
    last = int(recent.shares.times_N.max()) + 1
    held_out = np.concatenate([data.validation().ends_N, data.test().ends_N])
    times_N = np.unique(np.append(np.minimum(data.times_E[held_out], last), last))
    most = max(1, MOMENTS // max(1, data.items))
    chosen = np.unique(np.linspace(0, len(times_N) - 1, min(most, len(times_N))).round().astype(np.int64))
    moments_M = torch.from_numpy(times_N[chosen] if len(chosen) > 1 else times_N[-1:])
    return {"moments_M": moments_M, "recent_MI": recent.shares.counts(moments_M, recent.seconds).float()}


@dataclass(frozen=True, eq=False)
class Candidates:
    """The items that some part ranks high for validation targets, and what each part says of them."""

    facts_NC: Tensor
    scores_NJP: Tensor
    """0 of a candidate that another one is the same as."""
    there_NJ: Tensor
    """Whether this is the first of several that are the same."""
    own_NJ: Tensor
    """Whether it is the target."""

    @staticmethod
    def of(counting: Counting, data: NextItemData, parts: Any, seen: Seen) -> Candidates:
        """From parts of the targets, each with the model's scores and the batch of its histories."""
        collected = []
        for targets, logits_BI, batch in parts:
            poll()
            history_BL = batch.newest(batch.longest)
            scores = [logits_BI, *(counting.counted(name, history_BL, batch) for name in counting.parts[1:])]
            hidden = _hidden(data, targets, seen, logits_BI.device)
            most = min(CANDIDATES, data.items)
            highest = []
            for scores_BI in scores:
                if hidden is not None:
                    scores_BI = scores_BI.index_put(hidden, scores_BI.new_tensor(-torch.inf))
                highest.append(scores_BI.topk(most, dim=1)[1])
            items_BJ = torch.cat(highest, 1).sort(1)[0]
            there_BJ = torch.ones_like(items_BJ, dtype=torch.bool)
            there_BJ[:, 1:] = items_BJ[:, 1:] != items_BJ[:, :-1]
            if hidden is not None:
                met_BI = torch.zeros_like(logits_BI, dtype=torch.bool)
                met_BI[hidden] = True
                there_BJ &= ~met_BI.gather(1, items_BJ)
            targets_B = torch.from_numpy(data.items_E[targets.positions_N].astype(np.int64) - 1).to(items_BJ.device)
            gathered = [scores_BI.gather(1, items_BJ).double() for scores_BI in scores]
            # Only differences between the items of a target matter.
            gathered[0] = gathered[0] - logits_BI.amax(1, keepdim=True)
            scores_BJP = torch.stack(gathered, 2) * there_BJ[:, :, None]
            own_BJ = (items_BJ == targets_B[:, None]) & there_BJ
            raw_BC = counting.facts(logits_BI, history_BL)
            collected.append([one.cpu() for one in (raw_BC, scores_BJP, there_BJ, own_BJ)])
        return Candidates(*(torch.cat(column) for column in zip(*collected)))

    def gains(self, weights_CP: Tensor) -> Tensor:
        """The discounted gain of each target by the sum with these weights; ties count against the target."""
        scores_NJ = self._summed(weights_CP)
        own_N1 = scores_NJ.masked_fill(~self.own_NJ, -torch.inf).amax(1, keepdim=True)
        ranks_N = (scores_NJ >= own_N1).sum(1).double()
        inside_N = self.own_NJ.any(1) & (ranks_N <= LISTED)
        return inside_N / (1 + ranks_N).log2()

    def fitted(self, usual_P: Tensor) -> Tensor:
        """The weights that make the targets most likely among their candidates, by Newton's method; a part whose usual
        weight is 0 has none."""
        parts, known_K = usual_P.nonzero()[:, 0], self.own_NJ.any(1).nonzero()[:, 0]
        known_K = known_K[:: max(1, -(-len(known_K) // FITTED))]
        facts, scores_KJP = self.facts_NC.shape[1], self.scores_NJP[known_K][:, :, parts]
        # The influence of each fact on each part.
        inputs_KJD = (self.facts_NC[known_K][:, None, :, None] * scores_KJP[:, :, None, :]).flatten(2)
        usual_D = torch.zeros(facts, len(parts), dtype=torch.float64)
        usual_D[0] = usual_P[parts]
        pull_D = torch.full_like(usual_D, FACT_PULL)
        pull_D[0] = PULL
        usual_D, pull_D, own_KJ = usual_D.flatten(), pull_D.flatten(), self.own_NJ[known_K]
        hidden_KJ, owns_D = ~self.there_NJ[known_K], inputs_KJD[own_KJ].sum(0)

        def at(weights_D: Tensor) -> tuple[float, Tensor]:
            """The loss, and the probability of each candidate."""
            log_KJ = (inputs_KJD @ weights_D).masked_fill(hidden_KJ, -torch.inf).log_softmax(1)
            return float((pull_D * (weights_D - usual_D).square()).sum() - log_KJ[own_KJ].sum()), log_KJ.exp()

        weights_D, (loss, shares_KJ) = usual_D, at(usual_D)
        for _ in range(STEPS):
            means_KD = torch.einsum("kj,kjd->kd", shares_KJ, inputs_KJD)
            slope_D = means_KD.sum(0) - owns_D + 2 * pull_D * (weights_D - usual_D)
            flat = inputs_KJD.flatten(0, 1)
            bend_DD = flat.t() @ (flat * shares_KJ.flatten()[:, None]) - means_KD.t() @ means_KD + 2 * pull_D.diag()
            step_D, scale = torch.linalg.solve(bend_DD, slope_D), 1.0
            tried = at(weights_D - step_D)
            while tried[0] > loss and scale > SHORTEST:
                scale /= 2
                tried = at(weights_D - scale * step_D)
            gained, (loss, shares_KJ), weights_D = loss - tried[0], tried, weights_D - scale * step_D
            if gained < CLOSE * max(1.0, abs(loss)):
                break
        weights_CP = torch.zeros(facts, len(usual_P), dtype=torch.float64)
        weights_CP[:, parts] = weights_D.view(facts, len(parts))
        return weights_CP

    def _summed(self, weights_CP: Tensor) -> Tensor:
        scores_NJ = (self.scores_NJP * (self.facts_NC @ weights_CP)[:, None, :]).sum(2)
        return scores_NJ.masked_fill(~self.there_NJ, -torch.inf)


def _hidden(data: NextItemData, targets: Targets, seen: Seen, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Rows and columns of the items that do not compete."""
    rows_P, columns_P = left_out(data, targets, seen)
    return (torch.from_numpy(rows_P).to(device), torch.from_numpy(columns_P).to(device)) if len(rows_P) else None


def fit(counting: Counting, candidates: Callable[[], Candidates]) -> dict[str, float]:
    """Set the weights, and return how well the model, counting and both rank the validation targets."""
    counting.means_C.zero_()
    counting.scales_C.fill_(1.0)
    found = candidates()
    means_C, scales_C = found.facts_NC.mean(0), found.facts_NC.std(0, correction=0)
    means_C[0], scales_C[0] = 0.0, 1.0
    scales_C[scales_C < 1e-9] = 1.0
    found = Candidates((found.facts_NC - means_C) / scales_C, found.scores_NJP, found.there_NJ, found.own_NJ)
    usual_P = torch.tensor([USUAL[part] for part in counting.parts], dtype=torch.float64)
    counts_P = usual_P.clone()
    counts_P[0] = 0.0
    options = [found.fitted(usual_P), found.fitted(counts_P)]
    for number in range(len(counting.parts)):
        alone_CP = torch.zeros_like(options[0])
        alone_CP[0, counting.parts.index(POPULARITY)] = TIES
        alone_CP[0, number] = 1.0
        options.append(alone_CP)
    gains = [found.gains(weights_CP) for weights_CP in options]
    best = _surely_best(gains, counted=range(3, len(gains)))
    for into, value in (
        (counting.weights_CP, options[best]),
        (counting.means_C, means_C),
        (counting.scales_C, scales_C),
    ):
        into.copy_(value)
    means = [float(gains_N.mean()) for gains_N in gains]
    return {MODEL: means[2], COUNTS: max(means[1], *means[3:]), "both": means[best]}


def _surely_best(gains: list[Tensor], counted: range) -> int:
    """The option with the highest mean of gains, of the best one that is counted by one rule and those that are better
    than it by more than the standard error: few targets cannot tell more."""
    means = [float(gains_N.mean()) for gains_N in gains]
    safe = max(counted, key=lambda number: means[number])
    more = [gains_N - gains[safe] for gains_N in gains]
    surely = [number for number, more_N in enumerate(more) if more_N.mean() > more_N.std() / len(more_N) ** 0.5]
    return max([safe, *surely], key=lambda number: means[number])
