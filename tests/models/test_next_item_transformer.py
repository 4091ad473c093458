"""Transformer blocks against a few lines of plain torch, sequence by sequence; as exported; and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from recperf.data.next_item import NextItemData
from recperf.data.next_item_batches import EventsOnDevice, SequenceBatch, SequenceOrder
from recperf.models.next_item.config import NextItemConfig, step
from recperf.models.next_item.model import NextItemModel, PaddedModel
from recperf.models.next_item.transformer import Pairs
from recperf.ops.hstu_attention.reference import bucket_starts

CPU = torch.device("cpu")
CONFIG = NextItemConfig(
    encoder="transformer", items=30, dim=8, blocks=2, heads=2, head_dim=3, max_length=9, dropout=0.0, temperature=0.1,
    time_buckets=0,
)  # fmt: skip


def batch_of(times: bool) -> SequenceBatch:
    draw = np.random.default_rng(4)
    offsets_U1 = np.concatenate([[0], np.cumsum(draw.integers(4, 14, 7))])
    data = NextItemData(
        name="drawn", items=30, users=7, offsets_U1=offsets_U1,
        items_E=draw.integers(1, 31, offsets_U1[-1], np.int32),
        times_E=np.cumsum(draw.integers(1, 90_000, offsets_U1[-1])) if times else None,
    )  # fmt: skip
    order = SequenceOrder.of(data, EventsOnDevice(data, CPU), length=9, batch_size=7, seed=5, all_windows=False)
    return next(order.batches(0))


def model_of(config: NextItemConfig) -> NextItemModel:
    """With weights and biases away from what they begin with."""
    model, draw = NextItemModel(config, seed=1, device=CPU), torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def turned(rows: Tensor) -> Tensor:
    """Queries or keys of three numbers, of which two are a point, by as many radians as their place."""
    x, y, rest = rows.t()
    places = torch.arange(len(rows))
    return torch.stack([x * places.cos() - y * places.sin(), x * places.sin() + y * places.cos(), rest], 1)


def expected(model: NextItemModel, batch: SequenceBatch, row: int) -> Tensor:
    """The vectors of one sequence."""
    config, first, stop = model.config, *batch.offsets_B1[row : row + 2].tolist()
    items_L, length = batch.items_T[first:stop], stop - first
    x = model.items_ID[items_L] * math.sqrt(config.dim)
    norm = lambda part, x: F.layer_norm(x, (config.dim,), part.weight, part.bias, 1e-6)  # noqa: E731
    for block in model.blocks:
        q, k, v = ((norm(block.attention_norm, x) @ block.qkv_DF)[:, 6 * at : 6 * at + 6] for at in range(3))  # type: ignore[operator]
        heads = []
        for head in range(config.heads):
            part = slice(3 * head, 3 * head + 3)
            scores = turned(q[:, part]) @ turned(k[:, part]).t() / math.sqrt(3)
            if batch.times_T is not None and batch.next_times_T is not None:
                starts = bucket_starts(config.time_buckets, CPU)[:-1].tolist()
                for late in range(length):
                    for early in range(late + 1):
                        seconds = max(1, int(batch.next_times_T[first + late] - batch.times_T[first + early]))
                        bucket = sum(start <= seconds for start in starts) - 1
                        scores[late, early] = scores[late, early] + block.buckets_K[bucket]  # type: ignore[index]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(later, -torch.inf).softmax(1) @ v[:, part])
        x = x + torch.cat(heads, 1) @ block.output_ED
        gate, up = (norm(block.feed_norm, x) @ block.gate_DF).chunk(2, 1)  # type: ignore[operator]
        x = x + (F.silu(gate) * up) @ block.down_FD  # type: ignore[operator]
    return F.normalize(norm(model.final_norm, x), dim=1)


@pytest.mark.parametrize("times", [False, True])
def test_vectors_are_those_of_each_sequence_alone(times: bool) -> None:
    batch, model = batch_of(times), model_of(replace(CONFIG, time_buckets=40 if times else 0))
    vectors_TD = model.encode(batch)
    for row in range(len(batch)):
        first, stop = batch.offsets_B1[row : row + 2].tolist()
        torch.testing.assert_close(vectors_TD[first:stop], expected(model, batch, row), rtol=1e-4, atol=1e-5)
    whole = torch.cat([expected(model, batch, row) for row in range(len(batch))])
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for ours, theirs in zip(
        torch.autograd.grad((vectors_TD * weights).sum(), used), torch.autograd.grad((whole * weights).sum(), used)
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    # Padded as exported.
    arguments = [batch.padded(batch.items_T), batch.lengths_B]
    if batch.times_T is not None and batch.next_times_T is not None:
        arguments += [batch.padded(batch.times_T), batch.padded(batch.next_times_T)]
    arguments = [F.pad(one, (0, 9 - one.shape[1])) if one.dim() == 2 else one for one in arguments]
    torch.testing.assert_close(PaddedModel(model)(*arguments), model.last(batch), rtol=1e-4, atol=1e-5)


def test_bfloat16_blocks_come_close() -> None:
    batch, model = batch_of(False), model_of(CONFIG)
    exact = float(model.loss(batch).detach())
    model.low = True
    value = model.loss(batch)
    value.backward()
    assert model.blocks[0].qkv_DF.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert 0 < abs(float(value.detach()) - exact) < 0.02 * exact


def test_products_are_counted_as_torch_counts_them() -> None:
    batch, config = batch_of(False), replace(CONFIG, heads=1, head_dim=6)
    model = model_of(config)
    with FlopCounterMode(display=False) as counter:
        model.encode(batch).sum().backward()
    tokens, padded = len(batch.items_T), len(batch) * batch.longest
    counted = step(config, tokens, 0, tokens)
    blocks = sum(counted[name].flops for name in ("attention_input", "attention_output", "feed_forward"))
    totals = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in totals.items() if "attention" not in str(name))
    assert products == 3 * blocks
    assert padded > tokens
    forward = ("tokens", "attention_input", "attention_output", "feed_forward", "attention")
    assert counted["backward"].flops == 2 * sum(counted[name].flops for name in forward)
    dense = sum(one.numel() for name, one in model.named_parameters() if name != "items_ID")
    assert sum(config.part_parameters.values()) == dense
    assert config.table_parameters == model.items_ID.numel()


def test_gradients_of_buckets_are_sums_over_their_pairs() -> None:
    draw = torch.Generator().manual_seed(3)
    buckets_BLL, weights_BLL = torch.randint(0, 9, (4, 6, 6), generator=draw), torch.randn(4, 6, 6, generator=draw)
    expected = torch.zeros(11).index_add_(0, buckets_BLL.flatten(), weights_BLL.flatten())
    torch.testing.assert_close(Pairs(buckets_BLL, 11).summed(weights_BLL), expected)
