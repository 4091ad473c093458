"""Our DLRM, with each of its implementations, against the public one: probabilities, loss and every gradient.

Used by tests/golden/test_dlrm.py on a CPU and by tests/gpu/test_fast.py on a GPU.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from golden_cases import close
from torch import Tensor

from recperf.data.batch import ClickBatch
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM, Dot, WrittenOutLoss, make_interaction
from recperf.models.embeddings import Embeddings, StackedTables
from recperf.models.mlp import Arithmetic, FastArithmetic
from recperf.models.published import jagged, load_public_parameters
from recperf.models.streams import SideStreams
from recperf.models.tables import SparseTables

WARM_UP = 2


@dataclass(frozen=True)
class Bodies:
    """The implementation of each part.

    Bag "stacked": tables with a dense gradient. ReLU "plain": the plain arithmetic; "copies": Triton, and products that
    read copies of the weights.
    """

    bag: str
    dot: str
    relu: str
    streams: bool = False
    """Use a second CUDA stream."""

    def __str__(self) -> str:
        return f"{self.bag}-{self.dot}-{self.relu}" + ("-streams" if self.streams else "")


PLAIN = Bodies("stacked", "reference", "plain")
SPARSE = Bodies("reference", "reference", "reference")
NATIVE = Bodies("native", "native", "native")
TRITON = Bodies("triton", "triton", "triton")
COPIES = Bodies("triton", "triton", "copies")


def body(op: str, name: str) -> ModuleType:
    return importlib.import_module(f"recperf.ops.{op}.{name}")


@dataclass(frozen=True)
class Case:
    """One saved example of the public DLRM."""

    config: DLRMConfig
    batch: ClickBatch
    arrays: dict[str, Tensor]

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in self.arrays.items() if name.startswith(prefix)}


def load(path: Path, device: str = "cpu") -> Case:
    shape = json.loads(path.with_suffix(".json").read_text())
    with np.load(path) as saved:
        arrays = {name: torch.from_numpy(value).to(device) for name, value in saved.items()}
    config = DLRMConfig(
        features=tuple(f"feature_{i}" for i in range(len(shape["rows"]))),
        rows=tuple(shape["rows"]),
        dim=shape["m_spa"],
        bottom=tuple(shape["bot"]),
        top=tuple(shape["top"][1:]),
        interaction="concat" if shape["interaction"] == "cat" else "dot",
        diagonal=shape["itself"],
    )
    assert config.top_widths == tuple(shape["top"])
    count = range(len(shape["rows"]))
    features = jagged(
        config.features,
        [arrays[f"in/sparse_index/{i}"] for i in count],
        [arrays[f"in/sparse_offset/{i}"] for i in count],
    )
    return Case(config, ClickBatch(arrays["in/dense"], features, arrays["in/label"].squeeze(1)), arrays)


def build(case: Case, bodies: Bodies, device: str = "cpu") -> DLRM:
    """A model of these implementations with the public one's weights."""
    config, streams = case.config, SideStreams(enabled=bodies.streams)
    model = DLRM(
        config,
        embeddings=_embeddings(config, bodies.bag, streams, device),
        interaction=(
            Dot(config.vectors, diagonal=config.diagonal, body=body("dot", bodies.dot))
            if config.interaction == "dot"
            else make_interaction(config)
        ),
        arithmetic=_arithmetic(bodies.relu, streams),
    ).to(device)
    load_public_parameters(model, case.named("param/"))
    return model


def _embeddings(config: DLRMConfig, bag: str, streams: SideStreams, device: str) -> Embeddings:
    if bag == "stacked":
        return StackedTables(config.features, config.rows, config.dim)
    chosen: Any = bag
    tables = SparseTables(config.features, config.rows, config.dim, bag=chosen, device=device)
    tables.streams = streams
    return tables


def _arithmetic(relu: str, streams: SideStreams) -> Arithmetic:
    if relu == "plain":
        return Arithmetic()
    copies = relu == "copies"
    return FastArithmetic(relu=body("mlp", "triton" if copies else relu), copies=copies, streams=streams)


def clear(model: DLRM) -> None:
    """Forget the gradients of a backward pass."""
    for parameter in model.parameters():
        parameter.grad = None
    if isinstance(model.embeddings, SparseTables):
        model.embeddings.forget()


def join(model: DLRM) -> None:
    """Wait for the side streams."""
    model.arithmetic.streams.join_all()
    if isinstance(model.embeddings, SparseTables):
        model.embeddings.streams.join_all()


def step(model: DLRM, batch: ClickBatch) -> WrittenOutLoss:
    """Compute the loss and all gradients; the current stream waits for the side streams."""
    loss = model.loss(batch)
    loss.backward()
    join(model)
    return loss


def step_as_graph(model: DLRM, batch: ClickBatch) -> WrittenOutLoss:
    """The same as a CUDA graph. Its outputs are set to NaN first, so that only the replay can compute them."""
    warm_up_stream = torch.cuda.Stream()
    warm_up_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up_stream):
        for _ in range(WARM_UP):
            step(model, batch)
            clear(model)
    torch.cuda.current_stream().wait_stream(warm_up_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, batch)
    for tensor in (loss.value, loss.logits_B, *(p.grad for p in model.parameters() if p.grad is not None)):
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    # The results live in the graph's memory.
    loss.graph = graph  # type: ignore[attr-defined]
    return loss


def gradients(model: DLRM) -> dict[str, Tensor]:
    """Under the public model's names."""
    tables = model.embeddings
    if isinstance(tables, StackedTables):
        assert tables.weight_RD.grad is not None
        whole_RD = tables.weight_RD.grad
    else:
        assert isinstance(tables, SparseTables)
        whole_RD = tables.dense_gradient()
    parts = whole_RD.split(list(tables.rows))
    named = {f"emb_l.{index}.weight": part for index, part in enumerate(parts)}
    for prefix, mlp in (("bot_l", model.bottom), ("top_l", model.top)):
        for index, layer in enumerate(mlp.linears()):
            for name, parameter in (("weight", layer.weight), ("bias", layer.bias)):
                assert parameter.grad is not None
                named[f"{prefix}.{2 * index}.{name}"] = parameter.grad
    return named


def agree(model: DLRM, loss: WrittenOutLoss, case: Case) -> None:
    """Compare everything the public model computed with a step of ours."""
    close(loss.logits_B.sigmoid().unsqueeze(1), case.arrays["out/prob"], "probabilities of the step")
    with torch.no_grad():
        probabilities = model(case.batch.dense_BD, case.batch.features).sigmoid().unsqueeze(1)
    close(probabilities, case.arrays["out/prob"], "probabilities")
    close(loss.detach(), case.arrays["out/loss"], "loss")
    ours, theirs = gradients(model), case.named("grad/")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        close(value, theirs[name], f"gradient of {name}")
