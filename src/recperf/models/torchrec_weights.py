"""Conversion of weights between TorchRec's DLRM and DLRM_DCN and ours.

The models compute the same under other names, with one difference: TorchRec lists the pairs of a dot interaction by the
upper triangle, (0,1), (0,2) ... (1,2) ..., and we, like the public DLRM, by the lower one, (1,0), (2,0), (2,1) ... So
the columns of the first layer after the interaction are permuted. `published.py` has the public DLRM's names.

Shapes: V vectors a sample, P pairs, O and W output and input width of the first layer after the interaction.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import ConfigError
from .config import DLRMConfig
from .cross import LowRankCross
from .dlrm import DLRM
from .published import copy_weights, require_same

TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t_{}.weight"
FIRST = "over_arch.model.0._mlp.0._linear.weight"
"""The layer that reads the interaction."""
FIX = "use the sizes, features and interaction of the saved model in the config"


@runtime_checkable
class TablePerFeature(Protocol):
    def table(self, key: str) -> Tensor: ...


def lower_places(vectors: int) -> Tensor:
    """For each pair in the order of the upper triangle, its place in that of the lower one."""
    first_P, second_P = torch.triu_indices(vectors, vectors, offset=1)
    places_P: Tensor = second_P * (second_P - 1) // 2 + first_P
    return places_P


def to_upper(weight_OW: Tensor, config: DLRMConfig) -> Tensor:
    """Permute columns from the order of the lower triangle, ours, to that of the upper one, into a new tensor."""
    dense = config.bottom[-1]
    places_P = lower_places(config.vectors).to(weight_OW.device)
    return torch.cat([weight_OW[:, :dense], weight_OW[:, dense:][:, places_P]], dim=1)


def to_lower(weight_OW: Tensor, config: DLRMConfig) -> Tensor:
    """The inverse: `to_lower(to_upper(w)) == w`, bit for bit."""
    dense = config.bottom[-1]
    permuted_OW = weight_OW.clone()
    places_P = lower_places(config.vectors).to(weight_OW.device)
    permuted_OW[:, dense + places_P] = weight_OW[:, dense:]
    return permuted_OW


def torchrec_parameters(model: DLRM) -> dict[str, Tensor]:
    """Our parameters with TorchRec's names and order: views, except for the layer whose columns are permuted."""
    parameters = _renamed(model)
    if model.config.interaction == "dot":
        parameters[FIRST] = to_upper(parameters[FIRST], model.config)
    return parameters


def load_torchrec_parameters(model: DLRM, values: dict[str, Tensor]) -> None:
    """Copy TorchRec's parameters into ours; everything is checked before anything is copied."""
    ours = _renamed(model)
    # Older versions store the bias of a cross layer as a column.
    loaded = {n: v.reshape(-1) if n.startswith("inter_arch.crossnet.bias.") else v for n, v in values.items()}
    require_same(ours, loaded, fix=FIX)
    if model.config.interaction == "dot":
        loaded[FIRST] = to_lower(loaded[FIRST], model.config)
    copy_weights(ours, loaded, fix=FIX)


def _renamed(model: DLRM) -> dict[str, Tensor]:
    """Our parameters under TorchRec's names, as views, columns still in our order."""
    config = model.config
    _require_counterpart(model)
    assert isinstance(model.embeddings, TablePerFeature)
    parameters = {TABLE.format(key): model.embeddings.table(key) for key in config.features}
    for index, layer in enumerate(model.bottom.linears()):
        parameters[f"dense_arch.model._mlp.{index}._linear.weight"] = layer.weight.detach()
        parameters[f"dense_arch.model._mlp.{index}._linear.bias"] = layer.bias.detach()
    if isinstance(model.interaction, LowRankCross):
        for index, (down_KN, up_NK, bias_N) in enumerate(model.interaction.layers):
            parameters[f"inter_arch.crossnet.V_kernels.{index}"] = down_KN.detach()
            parameters[f"inter_arch.crossnet.W_kernels.{index}"] = up_NK.detach()
            parameters[f"inter_arch.crossnet.bias.{index}"] = bias_N.detach()
    last = len(config.top) - 1
    for index, layer in enumerate(model.top.linears()):
        # The layer of the logit has no activation and is apart from the stack of those that do.
        prefix = "over_arch.model.1" if index == last else f"over_arch.model.0._mlp.{index}._linear"
        parameters[f"{prefix}.weight"] = layer.weight.detach()
        parameters[f"{prefix}.bias"] = layer.bias.detach()
    return parameters


def _require_counterpart(model: DLRM) -> None:
    """Raise an error for models that TorchRec cannot express."""
    config = model.config
    if config.interaction == "concat" or config.diagonal:
        option = "a diagonal" if config.diagonal else "interaction concat"
        raise ConfigError(f"TorchRec's DLRM has no counterpart of {option}", fix="--model.interaction dot or dcn")
    if len(config.top) < 2:
        raise ConfigError("TorchRec's DLRM has at least two layers after the interaction", fix="--model.top 64 1")
    if not isinstance(model.embeddings, TablePerFeature):
        raise ConfigError("TorchRec's DLRM has a table per feature; this model shares one")
