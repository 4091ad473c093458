"""Counted FLOPs against torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from recperf.data.batch import ClickBatch, JaggedFeatures
from recperf.models.cost import dlrm_step
from recperf.models.dlrm import DLRM
from recperf.workloads.micro_dlrm.config import default


@pytest.mark.parametrize("interaction", ["concat", "dot", "dcn"])
def test_matrix_products_are_counted_as_torch_counts_them(interaction: str) -> None:
    config = replace(default().model, interaction=interaction, cross_layers=2, cross_rank=5)
    batch = ClickBatch(
        torch.randn(64, 16), JaggedFeatures.from_ids(config.features, torch.ones(3, 64).long()), torch.zeros(64)
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model = DLRM(config)
        model.criterion.value(model(batch.dense_BD, batch.features), batch.labels_B).backward()
    cost = dlrm_step(config, 64)
    products = cost["bottom"].flops + cost["top"].flops
    products *= 3
    # The bottom MLP's first layer has no input gradient: nobody asks for the gradient of the data.
    products -= 2 * 64 * config.bottom[0] * config.bottom[1]
    # torch computes the full square of pairs, forward and (twice) backward; only the triangle is needed.
    full_square = 3 * 2 * 64 * config.vectors**2 * config.dim if interaction == "dot" else 0
    # A cross layer is two products forward and four backward, 32 wide and of rank 5.
    products += 2 * 6 * (2 * 64 * 32 * 5) if interaction == "dcn" else 0
    assert counter.get_total_flops() == products + full_square
    needed = 3 * 2 * 64 * config.pairs * config.dim
    scattered = 64 * 3 * config.dim
    parts = ("bottom", "top", "interaction", "bottom_backward", "top_backward", "interaction_backward")
    counted = sum(cost[name].flops for name in (*parts, "embedding_backward"))
    assert counted == products + needed + scattered
