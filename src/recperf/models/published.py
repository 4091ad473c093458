"""The calling convention of the published micro-DLRM, so that course notebooks run unchanged.

model = MicroDLRM()
probabilities = model(dense, [user, item, occupation], [offsets, offsets, offsets])      # [B, 1]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..data.batch import JaggedFeatures
from ..errors import ConfigError, DataError
from .config import DLRMConfig
from .dlrm import DLRM
from .embeddings import StackedTables
from .tables import SparseTables

PUBLISHED = DLRMConfig(
    features=("user", "item", "occupation"), rows=(943, 1682, 21), dim=8, bottom=(16, 8, 8), top=(32, 16, 1)
)
"""The published sizes: no row for unknown ids, ids from 0."""


class MicroDLRM(nn.Module):
    """`forward(dense [B, 16], index tensors, offset tensors) -> probabilities [B, 1]` around any of our DLRMs."""

    def __init__(self, model: DLRM | None = None) -> None:
        super().__init__()
        self.model = model or DLRM(PUBLISHED)

    def forward(self, dense_x: Tensor, sparse_indices: list[Tensor], sparse_offsets: list[Tensor]) -> Tensor:
        features = jagged(self.model.config.features, sparse_indices, sparse_offsets)
        self.model.embeddings.check(features)
        logits_B: Tensor = self.model(dense_x, features)
        return torch.sigmoid(logits_B).unsqueeze(1)


def jagged(keys: tuple[str, ...], indices: list[Tensor], offsets: list[Tensor]) -> JaggedFeatures:
    """Convert EmbeddingBag's arguments, one pair per feature, to JaggedFeatures."""
    if len(indices) != len(keys) or len(offsets) != len(keys):
        raise ValueError(
            f"{len(keys)} features need as many index and offset tensors, not {len(indices)}, {len(offsets)}"
        )
    shifted, start = [], 0
    for index, offset in zip(indices, offsets):
        shifted.append(offset + start)
        start += index.numel()
    shifted.append(shifted[0].new_tensor([start]))
    return JaggedFeatures(keys, torch.cat(indices), torch.cat(shifted))


def public_parameters(model: DLRM) -> dict[str, Tensor]:
    """Our parameters under the public DLRM's names (`emb_l.0.weight`, `bot_l.0.weight`, ...), as views."""
    if model.config.interaction == "dcn":
        raise ConfigError("the public DLRM has no counterpart of interaction dcn", fix="--model.interaction dot")
    assert isinstance(model.embeddings, StackedTables | SparseTables), "the public model has a table per feature"
    parameters = {f"emb_l.{i}.weight": model.embeddings.table(key) for i, key in enumerate(model.config.features)}
    for prefix, mlp in (("bot_l", model.bottom), ("top_l", model.top)):
        for index, layer in enumerate(mlp.linears()):
            # The public model counts the activation between two layers as a layer.
            parameters[f"{prefix}.{2 * index}.weight"] = layer.weight.detach()
            parameters[f"{prefix}.{2 * index}.bias"] = layer.bias.detach()
    return parameters


@torch.no_grad()
def load_public_parameters(model: DLRM, values: Mapping[str, Tensor]) -> None:
    """Copy weights of the public DLRM into ours; all names and shapes are checked before anything is copied. Both take
    the lower triangle row by row, so nothing is permuted."""
    ours, fix = public_parameters(model), "use the sizes of the saved model in the config"
    if ours.keys() != values.keys():
        missing, unknown = sorted(ours.keys() - values.keys()), sorted(values.keys() - ours.keys())
        raise DataError(
            f"the weights belong to another model: {len(missing)} parameters are missing{_first(missing)}, "
            f"{len(unknown)} are unknown{_first(unknown)}",
            fix=fix,
        )
    for name, tensor in ours.items():
        if tensor.shape != values[name].shape:
            raise DataError(f"{name} has shape {tuple(values[name].shape)}, the model {tuple(tensor.shape)}", fix=fix)
    for name, tensor in ours.items():
        tensor.copy_(values[name])


def _first(names: list[str]) -> str:
    return f" (first: {names[0]})" if names else ""
