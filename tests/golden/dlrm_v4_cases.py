"""The published DLRMv4's numbers as our batches and models, for the tests of a CPU and of a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_cases import close
from torch import Tensor

from recperf.data.batch import HistoryBatch, JaggedFeatures
from recperf.data.streaming.features import CANDIDATE, CONTEXT, HISTORY
from recperf.models.dlrm_v4.config import DLRMv4Config, HSTUConfig
from recperf.models.dlrm_v4.inputs import Inputs, prepare_parts
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.ops.assemble import assemble

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
    """Our name of every parameter and table, by the published one. Parts 0 to 3 of an encoder are `PARTS`."""
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


class Case:
    def __init__(self, path: Path) -> None:
        self.sizes: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(arrays[name]) for name in arrays.files}

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}

    def config(self, **switches: Any) -> DLRMv4Config:
        sizes = self.sizes
        hstu = HSTUConfig(
            layers=sizes["layers"],
            dim=sizes["model_dim"],
            heads=sizes["heads"],
            qk_dim=sizes["qk_dim"],
            v_dim=sizes["v_dim"],
            max_length=sizes["max_seq_len"],
            attention_scale="batch-max",
            dropout=sizes["dropout"],
        )
        inner = {name: switches.pop(name) for name in ("candidate_only", "recompute") if name in switches}
        return DLRMv4Config(
            hstu=replace(hstu, **inner),
            table_dim=sizes["table_dim"],
            rows=tuple(sizes["table_rows"][name] for name in DLRMv4Config.tables),
            encoder_hidden=sizes["preprocessor_hidden"],
            action_dim=sizes["action_embedding_dim"],
            item_hidden=sizes["item_mlp_hidden"],
            head_hidden=sizes["head_hidden"],
            positions=sizes["position_buckets"],
            time_buckets=sizes["time_buckets"],
            input_dropout=sizes["dropout"],
            loss_scale=sizes["loss_scale"],
            **switches,
        )

    def batch(self) -> HistoryBatch:
        keys = (*CONTEXT, *HISTORY, *CANDIDATE)
        values, lengths = [], [torch.zeros(1, dtype=torch.int64)]
        ones_B = torch.ones(self.sizes["batch"], dtype=torch.int64)
        for key in keys:
            of_candidate = key in CANDIDATE
            values.append(self.arrays[f"in/{'cand' if of_candidate else 'uih'}/{key}"])
            lengths.append(ones_B if of_candidate else self.arrays[f"in/uih_len/{key}"])
        history_B = self.arrays["in/uih_len/item_id"]
        return HistoryBatch(
            JaggedFeatures(keys, torch.cat(values), torch.cat(lengths).cumsum(0)),
            torch.cat([history_B.new_zeros(1), history_B.cumsum(0)]),
            self.arrays["in/uih/action_weight"],
            self.arrays["in/uih/action_timestamp"],
            self.arrays["in/cand/item_query_time"],
            self.arrays["out/label"][0],
        )


def build(case: Case, device: str = "cpu", **switches: Any) -> DLRMv4:
    model = DLRMv4(case.config(**switches), seed=1)
    values, names = case.named("param/"), ours_by_reference(model.config)
    assert values.keys() == names.keys()
    loaded = model.load_state_dict({ours: values[theirs] for theirs, ours in names.items()}, strict=False)
    assert not loaded.unexpected_keys
    return model.to(device)


def check(case: Case, device: str = "cpu", *, parts: int = 1, **switches: Any) -> None:
    """Compare every intermediate value, the outputs, the loss and every gradient."""
    model = build(case, device, **switches)
    config = model.config
    seen: dict[str, Any] = {}
    for index, layer in enumerate(model.hstu.layers):
        layer.register_forward_hook(lambda _, __, out, index=index: seen.__setitem__(f"mid/stu{index}/0", out))
    for name in ("tokens", "user"):
        _remember(model, name, seen)
    model.item_tower.register_forward_hook(lambda _, __, out: seen.__setitem__("item", out))
    batch = case.batch().to(device)
    losses = []
    for inputs in prepare_parts(batch, config, parts):
        loss = model.loss(inputs) * (len(inputs) / len(batch))
        loss.backward()
        losses.append(loss.detach())
    if parts == 1:
        _values(case, config, inputs, seen)
        close(loss.logits_B.sigmoid(), case.arrays["out/pred"][0], "prediction")
    close(sum(losses), case.arrays["out/loss"], "loss")
    expected = case.named("grad/")
    names = ours_by_reference(config)
    assert expected.keys() == names.keys()
    for theirs, ours in names.items():
        if ours.startswith("tables."):
            actual = model.tables.dense_gradient(ours.removeprefix("tables."))
        else:
            actual = model.get_parameter(ours).grad
        close(actual, expected[theirs], theirs)


def _remember(model: DLRMv4, name: str, seen: dict[str, Any]) -> None:
    method = getattr(model, name)

    def watched(*arguments: Any) -> Any:
        seen[name], seen[f"of {name}"] = method(*arguments), arguments[1:]
        return seen[name]

    object.__setattr__(model, name, watched)


def _unplaced(inputs: Inputs, context_BCD: Tensor, entity_ND: Tensor, action_ND: Tensor) -> Tensor:
    """Tokens before they are scaled and positions and times are added."""
    if inputs.plan.actions == 1:
        entity_ND, action_ND = entity_ND + action_ND, action_ND.new_zeros(1, entity_ND.shape[1])
    nowhere, never = (entity_ND.new_zeros(rows, entity_ND.shape[1]) for rows in (64, inputs.plan.ages))
    return assemble(context_BCD, entity_ND, action_ND, nowhere, never, inputs.plan, scale=1.0)


def _values(case: Case, config: DLRMv4Config, inputs: Inputs, seen: dict[str, Any]) -> None:
    mid = case.named("mid/")
    lengths, offsets, times, tokens, targets = (mid[f"preprocessor/{place}"] for place in range(3, 8))
    assert inputs.offsets_B1.diff().tolist() == lengths.tolist()
    assert inputs.offsets_B1.tolist() == offsets.tolist()
    assert inputs.times_T.tolist() == times.tolist()
    assert set(targets.tolist()) == {1}
    assert inputs.longest == int(lengths.max())
    close(_unplaced(inputs, *seen["of tokens"]), tokens, "tokens")
    close(seen["tokens"], mid["positional/0"], "positions")
    last = config.hstu.layers - 1
    for index in range(config.hstu.layers):
        expected = mid[f"stu{index}/0"]
        if config.hstu.candidate_only and index == last:
            expected = expected[offsets[1:] - 1]
        close(seen[f"mid/stu{index}/0"], expected, f"layer {index}")
    close(seen["user"], mid["postprocessor/0"], "postprocessor")
    close(seen["user"], case.arrays["out/user_embedding"], "user")
    close(seen["item"], case.arrays["out/item_embedding"], "item")
