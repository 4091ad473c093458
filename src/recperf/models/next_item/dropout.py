"""Dropout of next-item models, which ranks draw for a whole batch.

Shapes: T positions of all sequences, D width, W positions of the whole batch.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...data.next_item_batches import SequenceBatch

EPS = 1e-6
STD = 0.02


def dropped(x_TD: Tensor, share: float, training: bool, batch: SequenceBatch) -> Tensor:
    """Dropout. Ranks draw for the whole batch, so that their generators stay alike, and use what is for their part: on
    a CPU what a single process draws."""
    if batch.whole is None or not training or not share:
        return F.dropout(x_TD, share, training)
    scales_WD = x_TD.new_empty(batch.whole, x_TD.shape[1]).bernoulli_(1 - share).div_(1 - share)
    return x_TD * scales_WD[batch.numbers_T]
