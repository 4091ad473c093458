"""Next-item models as one would write them in plain torch: padded, eager, operator by operator; the peers of
hstu and of the transformer.

Shapes: B sequences, N positions of a padded sequence, D width, H heads, A width of a head, K drawn items.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recperf.data.next_item import NextItemData, Targets

LENGTH, NEGATIVES, TEMPERATURE = 200, 128, 0.05


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dim, self.heads, self.dropout = dim, heads, dropout
        self.uvqk = nn.Parameter(torch.randn(dim, 4 * dim) * 0.02)
        self.relative = nn.Parameter(torch.randn(2 * LENGTH - 1) * 0.02)
        self.out = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x_BND: Tensor) -> Tensor:
        batch, length, _ = x_BND.shape
        u, v, q, k = F.silu(F.layer_norm(x_BND, (self.dim,)) @ self.uvqk).chunk(4, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        place = torch.arange(length, device=x_BND.device)
        bias_NN = self.relative[place[:, None] - place + LENGTH - 1]
        scores = F.silu(q @ k.transpose(-1, -2) + bias_NN) / LENGTH
        scores = scores * torch.ones_like(bias_NN).tril()
        attended = (scores @ v).transpose(1, 2).reshape(batch, length, self.dim)
        gated = F.dropout(u * F.layer_norm(attended, (self.dim,)), self.dropout, self.training)
        out: Tensor = self.out(gated) + x_BND
        return out


class PlainHSTU(nn.Module):
    """Item 0 is padding."""

    def __init__(self, items: int, *, dim: int = 50, blocks: int = 8, heads: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.dim, self.dropout = dim, dropout
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, dim) * math.sqrt(1 / dim))
        nn.init.normal_(self.items.weight, std=0.02)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, dropout) for _ in range(blocks))

    def forward(self, items_BN: Tensor) -> Tensor:
        there_BN1 = (items_BN > 0).unsqueeze(-1)
        x_BND = self.items(items_BN) * math.sqrt(self.dim) + self.positions[: items_BN.shape[1]]
        x_BND = F.dropout(x_BND, self.dropout, self.training) * there_BN1
        for block in self.blocks:
            x_BND = block(x_BND) * there_BN1
        return F.normalize(x_BND, dim=-1)

    def loss(self, items_BN: Tensor, targets_BN: Tensor) -> Tensor:
        users_BND = self(items_BN)
        drawn_BNK = torch.randint(1, self.items.num_embeddings, (*targets_BN.shape, NEGATIVES), device=items_BN.device)
        own_BN1 = (users_BND * F.normalize(self.items(targets_BN), dim=-1)).sum(-1, keepdim=True)
        other_BNK = torch.einsum("bnd,bnkd->bnk", users_BND, F.normalize(self.items(drawn_BNK), dim=-1))
        other_BNK = other_BNK.masked_fill(drawn_BNK == targets_BN[..., None], -torch.inf)
        scores = torch.cat([own_BN1, other_BNK], -1) / TEMPERATURE
        each_BN = torch.logsumexp(scores, -1) - scores[..., 0]
        there_BN = targets_BN > 0
        return (each_BN * there_BN).sum() / there_BN.sum()


class PlainTransformer(nn.Module):
    """Pre-norm causal attention, a gated feed-forward layer, cosine, and softmax over all items."""

    def __init__(
        self, items: int, *, length: int, dim: int, blocks: int, heads: int, dropout: float, temperature: float
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.temperature, self.dim = heads, dropout, temperature, dim
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(length, dim) * 0.02)
        nn.init.normal_(self.items.weight, std=0.02)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * blocks + 1))
        self.qkv, self.out, self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(before, after, bias=False) for _ in range(blocks))
            for before, after in ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (dim, 4 * dim), (4 * dim, dim))
        )

    def forward(self, items_BN: Tensor) -> Tensor:
        batch, length = items_BN.shape
        x = self.items(items_BN) * math.sqrt(self.dim) + self.positions[:length]
        x = F.dropout(x, self.dropout, self.training)
        for number in range(len(self.qkv)):
            parts = self.qkv[number](self.norms[2 * number](x)).chunk(3, -1)
            q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.dropout(self.out[number](attended), self.dropout, self.training)
            normed = self.norms[2 * number + 1](x)
            fed = self.down[number](F.silu(self.gate[number](normed)) * self.up[number](normed))
            x = x + F.dropout(fed, self.dropout, self.training)
        return F.normalize(self.norms[-1](x), dim=-1)

    def loss(self, items_BN: Tensor, targets_BN: Tensor) -> Tensor:
        there_BN = targets_BN > 0
        scores = self(items_BN)[there_BN] @ F.normalize(self.items.weight[1:], dim=-1).t() / self.temperature
        return F.cross_entropy(scores, targets_BN[there_BN] - 1)


class PlainTraining:
    """Training over shuffled batches of padded sequences."""

    def __init__(self, data: NextItemData, device: str, seed: int, *, batch: int = 128, **sizes: float) -> None:
        """With a `length` a transformer of AdamW, else HSTU blocks of Adam."""
        torch.manual_seed(seed)
        self.data, self.device, self.batch = data, device, batch
        self.length = int(sizes.get("length", LENGTH))
        made = PlainTransformer if "length" in sizes else PlainHSTU
        self.model: nn.Module = made(data.items, **sizes).to(device)  # type: ignore[arg-type]
        decay, betas = (0.01, (0.9, 0.999)) if "length" in sizes else (0.0, (0.9, 0.98))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=betas, weight_decay=decay)
        train = data.train()
        self.rows_SN = np.zeros((len(train), self.length + 1), np.int64)
        for row, (begin, end) in enumerate(zip(train.begins_S, train.ends_S)):
            items = data.items_E[max(begin, end - self.length - 1) : end]
            self.rows_SN[row, : len(items)] = items
        self.random = np.random.default_rng(seed)

    def epoch(self, number: int) -> None:
        self.model.train()
        for rows_B in self._shuffled():
            rows_BN = torch.from_numpy(self.rows_SN[rows_B]).to(self.device)
            loss = self.model.loss(rows_BN[:, :-1], rows_BN[:, 1:])  # type: ignore[operator]
            self.adam.zero_grad()
            loss.backward()
            self.adam.step()

    def _shuffled(self) -> Iterator[np.ndarray]:
        order_S = self.random.permutation(len(self.rows_SN))
        for first in range(0, len(order_S), self.batch):
            yield order_S[first : first + self.batch]

    @torch.no_grad()
    def score(self, targets: Targets) -> Tensor:
        """Scores of items 1 and up for the history before each target."""
        self.model.eval()
        vectors_ID, parts = F.normalize(self.model.items.weight[1:], dim=-1), []  # type: ignore[union-attr, index]
        for first in range(0, len(targets), 256):
            ends_B = targets.positions_N[first : first + 256]
            begins_B = np.maximum(self.data.offsets_U1[targets.users_N[first : first + 256]], ends_B - self.length)
            rows_BN = np.zeros((len(ends_B), self.length), np.int64)
            for row, (begin, end) in enumerate(zip(begins_B, ends_B)):
                rows_BN[row, : end - begin] = self.data.items_E[begin:end]
            users_BND = self.model(torch.from_numpy(rows_BN).to(self.device))
            last_BD = users_BND[torch.arange(len(ends_B)), torch.from_numpy(ends_B - begins_B - 1)]
            parts.append(last_BD @ vectors_ID.t())
        return torch.cat(parts)
