"""What tables of single rows (tables.py) and tables of summed bags (bags.py) have in common: how TorchRec divides them.

Shapes: R rows of a table, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import DistributedConfig
from .placing import Part, free_memory, parts_of, planned
from .world import World


def sharder_of(base: type, options: DistributedConfig, **fused: Any) -> Any:
    """TorchRec's sharder of a collection; `fused` says what fbgemm does with a gradient."""

    class Sharder(base):  # type: ignore[misc]  # it has no types
        def sharding_types(self, compute_device_type: str) -> list[str]:
            """Row-wise too: TorchRec offers it for GPUs only, but its parts run on CPUs as well."""
            return ["row_wise", "column_wise", "table_wise"]

    return Sharder(fused_params={"learning_rate": 0.0, **fused}, qcomm_codecs_registry=codecs(options))


def codecs(options: DistributedConfig) -> Any:
    """What rows and gradients are sent as; none means as they are."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
    from torchrec.distributed.types import CommOp

    if options.all_to_all == "fp32":
        return None
    # TorchRec's own registry makes bf16 fp16 on a CPU, with a warning; here what was asked for is what is sent.
    precision = CommType(options.all_to_all)
    chosen = QCommsConfig(forward_precision=precision, backward_precision=precision)
    sent = (
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    )
    return {operation.name: get_qcomm_codecs(chosen) for operation in sent}


def sharded(
    module: nn.Module,
    sharder: Any,
    tables: Mapping[str, int],
    ids: Mapping[str, float],
    options: DistributedConfig,
    world: World,
    *,
    batch_size: int,
    place: torch.device,
) -> tuple[Any, list[Part]]:
    """A collection divided among the ranks, and which of them holds what."""
    from torchrec.distributed import comm_ops
    from torchrec.distributed.model_parallel import DistributedModelParallel

    # A loss here is already weighted by each rank's samples, so gradients are sums, not means over the ranks.
    comm_ops.set_gradient_division(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned(
            module, sharder, tables, ids, options, world, batch_size=batch_size, memory=free_memory(world)
        )  # fmt: skip
        # Around the collection alone: it would wrap dense parameters in DDP, whose gradients are means, one message a
        # bucket; ours are sums that travel in one buffer with the loss and the wish to stop.
        engine = DistributedModelParallel(
            module, device=place, plan=plan, sharders=[sharder], init_data_parallel=False, init_parameters=False
        )
    return engine, parts_of(plan, options)


def copied_parts(name: str, rows: int, dim: int, world: World, why: str = "--distributed.sharding") -> list[Part]:
    """Of a table of which every rank has a copy."""
    return [
        Part(
            table=name, rank=rank, kind="data-parallel", kernel="copy", first_row=0, rows=rows, first_column=0,
            columns=dim, why=why,
        )
        for rank in range(world.size)
    ]  # fmt: skip


def held(engine: Any, prefix: str, names: Iterable[str], ours: list[Part]) -> list[tuple[Part, Tensor, Tensor | None]]:
    """This rank's parts, their rows, and what the optimizer remembers of them: one number a row, or as many as the
    rows have, or nothing."""
    weights, states = engine.state_dict(), engine.fused_optimizer.state_dict()["state"]
    found = []
    for name in names:
        mine = [part for part in ours if part.table == name]
        if not mine:
            continue
        key = f"{prefix}.{name}.weight"
        kept = weights[key].local_shards()
        memory = states.get(key, {}).get(f"{name}.momentum1")
        remembered = memory.local_shards() if memory is not None else None
        for part in mine:
            place = [part.first_row, part.first_column]
            index = [list(shard.metadata.shard_offsets) for shard in kept].index(place)
            found.append((part, kept[index].tensor, remembered[index].tensor if remembered is not None else None))
    return found


def set_rate(engine: Any, rate: float) -> None:
    """Of the next update: fbgemm binds it to the lookup whose backward pass the update is."""
    for group in engine.fused_optimizer.param_groups:
        group["lr"] = rate
    engine.fused_optimizer.step()
