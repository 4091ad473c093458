"""What `recperf plan` needs to know about dlrm-v4. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...config import within
from ...measure.cost import Cost
from ...models.dlrm_v4 import cost, memory
from ...models.dlrm_v4.config import DLRMv4Config
from ...planning.work import (
    NO_STALLS,
    STARTUP_S,
    Evaluations,
    Lengths,
    PlannedWorkload,
    Popularity,
    Shapes,
    Spread,
    Table,
    Work,
)
from .config import DLRMv4WorkloadConfig, lacking_for_graph, table_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

PUBLISHED_HISTORY = 2663 / 4086
"""Mean length of the published interleaved histories, as a share of the maximum length."""
PUBLISHED_LIKES = 105 / 4086
"""Likes in a published history, as a share of the maximum length."""
FULL_ACTIONS = 0.6
"""Share of published histories whose thirds of listens and of skips are both full; the others have any
share of the skips. Assumed so that the mean is the published one: only this is published."""
QUANTILES = 64
"""Lengths that stand for the distribution of all."""
PREPARE_S = 13e-6
"""Seconds of one thread of a Xeon for preparing a sample of the laptop preset."""
CALLS, CALLS_PER_LAYER, CALLS_LAST = 1190, 79, 43
"""Operators called in an eager step: counted in one of the laptop preset, per layer, and more for a last layer that
computes the candidate only."""
KERNELS, KERNELS_PER_LAYER = 303, 32
"""Kernels of a CUDA graph: 367 in that of the laptop preset, and those of a layer, both as a profiler counts them."""
PUBLISHED_STALLS = Spread(1.0, (631.7 / 558 + 760.6 / 654) / 2, 760.6 / 654)
"""Published seconds of a step over those without stalls between windows: none, the mean of a pair on B200 and one on
MI350X, and the larger of the two."""
PUBLISHED_STARTUP_S = Spread(25.0, 25.0, 825.0)
"""Published seconds of initialisation, and until the first step of runs that count the samples of each window first."""
PUBLISHED_RANK_BATCH = 1024
"""Samples of one rank in the published runs."""
PUBLISHED_SAMPLES = {
    8192: Spread(61.9e6, 69.3e6, 80.3e6),
    16384: Spread(78.0e6, 87.7e6, 100.9e6),
    32768: Spread(98.6e6, 113.0e6, 128.5e6),
}
"""Samples to AUC 0.75 by global batch size, each from twenty published runs."""
PUBLISHED_ANCHORS, PUBLISHED_HOLDOUT = 2_290_835_423, 2_058_204
"""Samples of the training windows, and of the window that is scored."""
EVALUATION_S = 5.0
"""Seconds of an evaluation besides its forward passes: published medians on 8, 16 and 32 devices are 83, 44, 24 s."""
EXPONENT = 0.478
"""Exponent of the power law that gives one of 32 ranks as many ids as the one that ran out of memory had."""


def planned(config: DLRMv4WorkloadConfig) -> PlannedWorkload:
    published = config.model.row_scale == 1 and config.target.auc == 0.75

    return PlannedWorkload(
        batch_size=config.train.batch_size,
        count=lambda history, distinct: _work(config, history, distinct.get("item_id")),
        histories=True,
        rank_batch=PUBLISHED_RANK_BATCH if published and config.train.batch_size == PUBLISHED_RANK_BATCH else None,
        popularity=Popularity(
            EXPONENT,
            "it gives the hottest of 32 ranks the 81.5 GiB of rows that a published run ran out of memory with",
            # Without a shuffle a batch has many samples of one user, whose histories share most events.
            repeated=config.data.windows.shuffle == 0,
        ),
        published_samples=PUBLISHED_SAMPLES if published else {},
        published_data="yambda-5b" if published and config.data.path is None else "",
        evaluations=_evaluations(config) if published and config.evaluate.every_share else None,
        stalls=PUBLISHED_STALLS if published else NO_STALLS,
        startup_s=PUBLISHED_STARTUP_S if published else STARTUP_S,
    )


def _evaluations(config: DLRMv4WorkloadConfig) -> Evaluations:
    def every(batch: int) -> int:
        return batch * max(1, math.ceil(config.evaluate.every_share * PUBLISHED_ANCHORS / batch))

    def first(batch: int) -> int:
        return batch * config.evaluate.first_step(PUBLISHED_ANCHORS, batch)

    return Evaluations(samples=PUBLISHED_HOLDOUT, every=every, first=first, fixed_s=EVALUATION_S)


def history_lengths(config: DLRMv4WorkloadConfig, history: float | None) -> tuple[Lengths, str]:
    """Events of histories as equally likely values, and where they come from."""
    requested = config.data.history
    longest = float(requested.longest)
    if requested.strategy == "last-n" and history is None:
        return (longest,), "counted: every history has the full length"
    published = _published_lengths(longest)
    mean = sum(published) / len(published)
    if history is None:
        return published, "published mean 2,663 of at most 4,086, spread assumed"
    within(0.0, history, longest, "history")
    # Longer histories come closer to the maximum, so the spread shrinks as the mean grows towards it.
    scale = history / mean if history <= mean else (longest - history) / (longest - mean)
    return tuple(history + scale * (length - mean) for length in published), "mean as requested, spread assumed"


def _published_lengths(longest: float) -> Lengths:
    """The interleaved history has a third for each of three actions. Listens fill theirs and likes are few; skips fill
    theirs in most histories and lack up to two thirds in the others."""
    mean, most = PUBLISHED_HISTORY * longest, (2 / 3 + PUBLISHED_LIKES) * longest
    full = round(FULL_ACTIONS * QUANTILES)
    short = QUANTILES - full
    least = 2 * (mean * QUANTILES - most * full) / short - most
    return tuple(float(least + (most - least) * (i + 0.5) / short) for i in range(short)) + (most,) * full


def _work(config: DLRMv4WorkloadConfig, history: float | None, items: float | None) -> Work:
    """`items` counts the different items of a batch for each of its samples; None: the published share."""
    model: DLRMv4Config = config.model
    events, origin = history_lengths(config, history)
    tokens = tuple(max(0.0, one) + model.context_tokens + 1 for one in events)
    mean = sum(tokens) / len(tokens)

    @lru_cache(maxsize=64)
    def lengths(samples: int) -> tuple[int, ...]:
        return batch_lengths(tokens, samples, least=model.context_tokens + 1)

    @lru_cache(maxsize=64)
    def rows(samples: int) -> dict[str, int]:
        return cost.usual_rows(model, lengths(samples))

    def load(samples: int) -> Any:
        # Artist and album follow from the item, so there are as many triples as items.
        triples = rows(samples)["item_id"] if items is None else round(items * samples)
        return cost.load_of(model, lengths(samples), triples=triples)

    # The search for the largest batch that fits asks for the same batch sizes many times.
    @lru_cache(maxsize=64)
    def activations(samples: int) -> int:
        return sum(memory.activations(model, load(samples)).values())

    @lru_cache(maxsize=64)
    def input_bytes(samples: int) -> int:
        return memory.input_bytes(model, load(samples), rows(samples))

    @lru_cache(maxsize=64)
    def parts(samples: int) -> dict[str, Cost]:
        one = load(samples)
        step = dict(cost.step(model, [one], rows=0))
        del step["sparse_update"]
        passes = cost.passes(model, one) | {"dense_update": step["dense_update"].bytes}
        return {name: Cost(part.flops, passes.get(name, 0)) for name, part in step.items()}

    calls = CALLS + CALLS_PER_LAYER * model.hstu.layers + CALLS_LAST * model.hstu.candidate_only

    def kernels(samples: int, threads: int) -> int:
        replayed = config.train.graph != "off" and not lacking_for_graph(config, samples, threads)
        return KERNELS + KERNELS_PER_LAYER * model.hstu.layers if replayed else 0

    return Work(
        tables=_tables(model, mean - model.context_tokens, rows, table_state(config)),
        dense_parameters=model.dense_parameters,
        dense_states=2,
        precision=model.precision,
        parts=parts,
        calls=calls,
        kernels=kernels,
        prepare_s=PREPARE_S,
        shapes=_shapes(model, mean),
        lengths=tokens,
        sample_work=sample_work(model),
        activations=activations,
        input_bytes=input_bytes,
        origins=_origins(events, origin),
    )


def sample_work(model: DLRMv4Config) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """FLOPs of samples by their tokens, by which a run deals them to ranks."""
    constant, linear, square = cost.sample_flops(model)
    return lambda tokens_B: np.asarray(constant + (linear + square * tokens_B) * tokens_B)


def _origins(events: Lengths, origin: str) -> dict[str, str]:
    mean, square = (sum(n**power for n in events) / len(events) for power in (1, 2))
    return {
        "histories": f"{mean:,.0f} events on average, root of the mean square {square**0.5:,.0f} ({origin})",
        "distinct rows": "published shares of a batch of 1,024: item 2.4 %, album 1.5 %, artist 0.6 %",
    }


def batch_lengths(tokens: Lengths, samples: int, *, least: int) -> tuple[int, ...]:
    """Lengths of a batch: quantiles of the distribution, of its mean."""
    place_B = (np.arange(samples) + 0.5) / samples * len(tokens)
    length_B = np.asarray(tokens)[place_B.astype(np.int64)]
    length_B = np.maximum(length_B + sum(tokens) / len(tokens) - length_B.mean(), least)
    rounded_B = np.diff(np.floor(np.concatenate([[0.0], length_B.cumsum()]) + 0.5)).astype(np.int64)
    return tuple(int(length) for length in rounded_B)


def _tables(
    model: DLRMv4Config, events: float, rows: Callable[[int], Mapping[str, int]], state: int
) -> tuple[Table, ...]:
    """Tables with the ids of this many events, or of one; `rows` counts the different ones of a batch."""

    def distinct(name: str) -> Callable[[int], float]:
        return lambda samples: rows(samples)[name]

    ids = dict.fromkeys(cost.UNIQUE, events)
    return tuple(
        Table(
            name=name,
            rows=count,
            dim=model.table_dim,
            ids=ids.get(name, 1.0),
            vectors=ids.get(name, 1.0),
            distinct=distinct(name),
            skewed=name in cost.UNIQUE,
            state=state,
        )
        for name, count in model.table_rows.items()
    )


def _shapes(model: DLRMv4Config, tokens: float) -> Shapes:
    hstu = model.hstu
    return Shapes(
        rows_per_sample=tokens,
        inputs=model.dim,
        outputs=hstu.uvqk_width,
        heads=hstu.heads,
        qk=hstu.qk_dim,
        v=hstu.v_dim,
    )
