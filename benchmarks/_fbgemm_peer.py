"""FBGEMM's table-batched embedding (TBE), the peer of our fused bags.

Shapes: V ids, B bags of all tables, table after table, R rows of all tables, D width.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor


def fbgemm_problem() -> str:
    """Why the TBE cannot be measured here; empty where it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except Exception as error:  # A library that does not fit this torch fails in many ways.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def fbgemm_version() -> str:
    return str(getattr(importlib.import_module("fbgemm_gpu"), "__version__", "unknown"))


class FBGEMM:
    """The TBE with row-wise Adagrad and a copy of the rows of tables of equal size; its optimizer is part of its
    backward pass. It checks no ids."""

    def __init__(
        self,
        table_RD: Tensor,
        ids_V: Tensor,
        offsets_B1: Tensor,
        gradient_BD: Tensor,
        *,
        tables: int,
        rate: float,
        eps: float,
    ) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.tables, self.dim, self.ids_V, self.offsets_B1 = tables, table_RD.shape[1], ids_V, offsets_B1
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if not table_RD.is_cuda:
            place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.bags = SplitTableBatchedEmbeddingBagsCodegen(
            [(table_RD.shape[0] // tables, self.dim, *place)] * tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=rate,
            eps=eps,
            weights_precision=SparseType.FP32,
            output_dtype=SparseType.FP32,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=table_RD.device,
        )
        with torch.no_grad():
            for weights, rows in zip(self.bags.split_embedding_weights(), table_RD.chunk(tables)):
                weights.copy_(rows)
        by_table = gradient_BD.view(tables, -1, self.dim)
        self.gradient = by_table.transpose(0, 1).reshape(by_table.shape[1], -1).contiguous()
        self.pooled: Tensor | None = None

    def forward(self) -> None:
        self.pooled = self.bags(self.ids_V, self.offsets_B1)

    def backward(self) -> None:
        """Updates the rows too."""
        assert self.pooled is not None
        self.pooled.backward(self.gradient)  # type: ignore[no-untyped-call]

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            pooled: Tensor = self.bags(self.ids_V, self.offsets_B1)
        return pooled

    def by_bag(self, pooled: Tensor) -> Tensor:
        """The sums in our order: table after table."""
        return pooled.view(-1, self.tables, self.dim).transpose(0, 1).reshape(-1, self.dim)

    def table_RD(self) -> Tensor:
        return torch.cat([weights.detach() for weights in self.bags.split_embedding_weights()])


class CachedTables(torch.nn.Module):
    """The tables of dlrm-v4 as one TBE whose rows lie in host memory that the GPU reads, with a cache on the GPU
    (MANAGED_CACHING): each distinct row of a batch is looked up once. Has the methods that a training step calls."""

    def __init__(self, rows: dict[str, int], dim: int, cache_bytes: int, device: torch.device, rate: float) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        super().__init__()
        self.names = tuple(rows)
        place = (EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA)
        # In a list, so that what it keeps as parameters are none of the model's.
        self._bags = [
            SplitTableBatchedEmbeddingBagsCodegen(
                [(count, dim, *place) for count in rows.values()],
                optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                learning_rate=rate,
                weights_precision=SparseType.FP32,
                output_dtype=SparseType.FP32,
                stochastic_rounding=False,
                pooling_mode=PoolingMode.NONE,
                bounds_check_mode=BoundsCheckMode.NONE,
                cache_load_factor=cache_bytes / (4 * dim * sum(rows.values())),
                uvm_host_mapped=True,
                device=device,
            )
        ]
        self._rows: Any = None
        self._leaves: dict[str, Tensor] = {}
        self._looked_up: Tensor | None = None

    def lookup(self, inputs: Any) -> dict[str, Tensor]:
        if inputs.rows is self._rows:
            return self._leaves
        counts = [rows_U.numel() for rows_U in inputs.rows.values()]
        offsets = torch.tensor([0, *counts], pin_memory=True).to(inputs.labels_B.device, non_blocking=True).cumsum(0)
        looked_up: Tensor = self._bags[0](torch.cat(list(inputs.rows.values())), offsets)
        self._rows, self._looked_up = inputs.rows, looked_up
        parts = torch.split(looked_up.detach(), counts)
        self._leaves = {name: part.requires_grad_() for name, part in zip(inputs.rows, parts)}
        return self._leaves

    def update(self, rate: float, eps: float) -> None:
        """The rate was set at the beginning; the backward pass of the TBE updates the rows."""
        assert self._looked_up is not None
        gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self._leaves.values()]
        self._looked_up.backward(torch.cat(gradients))  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        self._rows, self._leaves, self._looked_up = None, {}, None
