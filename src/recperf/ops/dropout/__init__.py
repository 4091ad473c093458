"""Dropout that a seed, a row and a column decide: the same values in every body, in a recomputation, after a resume.

Other ops apply it: `assemble` to its tokens, `stu_output` to its features.

dropout = Dropout(0.2, dropout_seed(seed, step, layer, "tokens"))
kept_TD = keep_mask(dropout, rows, columns, device)        # the values that stay
"""

from __future__ import annotations

from .reference import keep_mask
from .rule import Dropout, dropout_seed

__all__ = ["Dropout", "dropout_seed", "keep_mask"]
