"""What a user may choose about a stack of STU layers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import require, within

AttentionScale = Literal["fixed", "batch-max"]


@dataclass(frozen=True, kw_only=True)
class HSTUConfig:
    layers: int = 3
    """STU layers, one after the other."""
    dim: int = 512
    """Width of a token."""
    heads: int = 4
    """Heads of the attention."""
    qk_dim: int = 128
    """Width of a query and a key, a head."""
    v_dim: int = 128
    """Width of a value, a head."""
    max_length: int = 4096
    """Tokens a row has at most: context, history and candidate."""
    attention_scale: AttentionScale = "fixed"
    """What scores are divided by: the most a row may have, or the tokens of the batch's longest row. The latter is the
    published model's; it makes a score depend on who else is in the batch."""
    dropout: float = 0.1
    """Share of a layer's output features that is dropped in training."""
    candidate_only: bool = True
    """Compute the last layer's output for the candidate alone, which is all that is read of it."""
    recompute: bool = False
    """Keep only a layer's input for the backward pass and compute the rest again: less memory, more work."""
    eps: float = 1e-6
    """Added to a variance before its root is taken."""

    def __post_init__(self) -> None:
        within(1, self.layers, 1024, "hstu.layers")
        within(1, self.dim, 1 << 16, "hstu.dim")
        within(1, self.heads, 1024, "hstu.heads")
        within(1, self.qk_dim, 1 << 12, "hstu.qk_dim")
        within(1, self.v_dim, 1 << 12, "hstu.v_dim")
        within(1, self.max_length, 1 << 20, "hstu.max_length")
        require(0 <= self.dropout < 1, "hstu.dropout", self.dropout, "0 to below 1")
        require(0 < self.eps < 1, "hstu.eps", self.eps, "above 0 and below 1")

    @property
    def attention_width(self) -> int:
        """Of the values, and of the attention's output, of all heads together."""
        return self.heads * self.v_dim

    @property
    def key_width(self) -> int:
        """Of the queries, and of the keys, of all heads together."""
        return self.heads * self.qk_dim

    @property
    def uvqk_width(self) -> int:
        """Gates, values, queries and keys side by side."""
        return 2 * (self.attention_width + self.key_width)

    @property
    def layer_parameters(self) -> int:
        """Of one layer: two norms, the projection with its bias, the output's matrix without one."""
        projection = (self.dim + 1) * self.uvqk_width
        return 2 * self.dim + projection + 2 * self.attention_width + 3 * self.attention_width * self.dim
