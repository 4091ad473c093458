"""What a step of each model must do, counted component by component from its config. Torch-free."""

from __future__ import annotations

from ..measure.cost import FLOAT, Cost, adamw_update, bag_backward_dense, bag_forward, mlp_backward, mlp_forward
from .config import DLRMConfig


def dlrm_step(config: DLRMConfig, batch: int, *, ids_per_bag: float = 1.0) -> dict[str, Cost]:
    """A training step with dense table gradients and AdamW, by component."""
    bags = batch * len(config.features)
    ids = round(bags * ids_per_bag)
    vectors = FLOAT * batch * config.vectors * config.dim
    met = FLOAT * batch * config.interaction_width
    pair_flops = 2 * batch * config.pairs * config.dim
    return {
        "bottom": mlp_forward(config.bottom, batch),
        "embedding": bag_forward(ids, bags, config.dim),
        "interaction": Cost(pair_flops, vectors + met),
        "top": mlp_forward(config.top_widths, batch),
        "loss": Cost(10 * batch, 3 * FLOAT * batch),
        "backward": mlp_backward(config.top_widths, batch, input_gradient=True)
        + Cost(2 * pair_flops, met + 2 * vectors)
        + bag_backward_dense(ids, bags, config.dim, sum(config.rows))
        + mlp_backward(config.bottom, batch, input_gradient=False),
        "update": adamw_update(config.table_parameters + config.mlp_parameters),
    }


def dlrm_memory(config: DLRMConfig, batch: int) -> dict[str, int]:
    """Bytes a training step holds: parameters, AdamW's two moments, gradients, activations kept for backward."""
    parameters = FLOAT * (config.table_parameters + config.mlp_parameters)
    activations = FLOAT * batch * (sum(config.bottom) + config.vectors * config.dim + sum(config.top_widths))
    return {
        "parameters": parameters,
        "optimizer": 2 * parameters,
        "gradients": parameters,
        "activations": activations,
    }
