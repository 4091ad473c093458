"""Mapping between DLRMv4's parameters and the names of the published model.

Parts 0 to 3 of an encoder are `first`, `first_norm`, `second`, `second_norm`. Shapes are the same, so values are copied
unchanged.
"""

from __future__ import annotations

from torch import Tensor

from ..published import copy_weights
from .config import DLRMv4Config
from .model import DLRMv4

TRANSDUCER = "_hstu_transducer"
PREPROCESSOR = f"{TRANSDUCER}._input_preprocessor"
POSITIONS = f"{TRANSDUCER}._positional_encoder"
POSTPROCESSOR = f"{TRANSDUCER}._output_postprocessor"
TABLE = "_embedding_collection.embeddings.{}.weight"
ENCODERS = {
    f"{PREPROCESSOR}._content_embedding_mlp": "content",
    f"{PREPROCESSOR}._additional_embedding_mlp": "extra",
    f"{PREPROCESSOR}._action_embedding_mlp": "action",
    "_item_embedding_mlp": "item_tower",
    "_multitask_module._prediction_module": "head",
}
PARTS = ("first", "first_norm", "second", "second_norm")
SINGLE = {
    f"{PREPROCESSOR}._batched_contextual_linear_weights": "context_weight",
    f"{PREPROCESSOR}._batched_contextual_linear_bias": "context_bias",
    f"{PREPROCESSOR}._action_encoder._action_embedding_table": "action_bits",
    f"{PREPROCESSOR}._action_encoder._target_action_embedding_table": "candidate_action",
    f"{POSITIONS}._position_embeddings_weight": "position_weight",
    f"{POSITIONS}._timestamp_embeddings_weight": "time_weight",
    f"{POSTPROCESSOR}._time_feature_combiner.weight": "combine.weight",
    f"{POSTPROCESSOR}._time_feature_combiner.bias": "combine.bias",
    f"{POSTPROCESSOR}._layer_norm.weight": "combine_norm.weight",
    f"{POSTPROCESSOR}._layer_norm.bias": "combine_norm.bias",
}
LAYER = {
    "_input_norm_weight": "norm_weight",
    "_input_norm_bias": "norm_bias",
    "_uvqk_weight": "uvqk_weight",
    "_uvqk_beta": "uvqk_bias",
    "_output_norm_weight": "output_norm_weight",
    "_output_norm_bias": "output_norm_bias",
    "_output_weight": "output_weight",
}


def ours_by_reference(config: DLRMv4Config) -> dict[str, str]:
    """Our name of every parameter and table, by the published one."""
    names = {TABLE.format(table): f"tables.{table}" for table in config.tables} | SINGLE
    for theirs, ours in ENCODERS.items():
        parts = PARTS[:3] if ours == "head" else PARTS
        for index, part in enumerate(parts):
            for kind in ("weight", "bias"):
                names[f"{theirs}.{index}.{kind}"] = f"{ours}.{part}.{kind}"
    for layer in range(config.hstu.layers):
        for theirs, ours in LAYER.items():
            names[f"{TRANSDUCER}._stu_module._stu_layers.{layer}.{theirs}"] = f"hstu.layers.{layer}.{ours}"
    return names


def reference_state(model: DLRMv4) -> dict[str, Tensor]:
    """The model's values under the published names, as views."""
    return {theirs: _tensor(model, ours) for theirs, ours in ours_by_reference(model.config).items()}


def load_reference(model: DLRMv4, state: dict[str, Tensor]) -> None:
    """Copy values under published names into the model; everything is checked before anything is copied."""
    copy_weights(reference_state(model), state, fix="use the number of layers and the sizes of the saved model")


def _tensor(model: DLRMv4, name: str) -> Tensor:
    if name.startswith("tables."):
        return model.tables.table(name.removeprefix("tables."))
    return model.get_parameter(name).detach()
