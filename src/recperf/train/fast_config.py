"""Which ways to be fast a user may switch, each on its own. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["auto", "fused", "plain"]


@dataclass(frozen=True, kw_only=True)
class FastConfig:
    input: Literal["auto", "device", "pinned", "pageable"] = "auto"
    """Where batches come from: drawn on the device that trains, or made on the host and copied to it from pinned or
    from pageable memory. Auto: drawn on the device; rows of a file go through pinned memory."""
    graph: Literal["auto", "on", "off"] = "auto"
    """Replay the whole step as one CUDA graph; auto: on a GPU, unless a batch is taken in slices."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """What the MLPs' products are taken in; weights and their gradients stay float32. Auto: bfloat16 on a GPU that has
    it, float32 elsewhere."""
    embedding: Way = "auto"
    """Lookups and sparse updates of all tables: fused is one kernel (Triton on a GPU, C on a CPU), plain is torch."""
    interaction: Way = "auto"
    """The dot interaction: fused is one kernel each way (Triton on a GPU, C on a CPU), plain is torch."""
    mlp: Way = "auto"
    """The MLPs: fused puts bias and ReLU into the products and runs weight gradients beside the chain; plain is one
    operator after the other."""
    optimizer: Way = "auto"
    """The dense optimizer: fused is one kernel for all parameters, plain a few operators for each."""
    deterministic: bool = True
    """Equal bits in every repeat. Off: SGD of tables adds by atomics on a GPU, without sorting ids."""


PLAIN = FastConfig(
    input="pageable",
    graph="off",
    precision="float32",
    embedding="plain",
    interaction="plain",
    mlp="plain",
    optimizer="plain",
)
"""Every switch at its plain position: batches from the host, an operator at a time, float32."""
