"""Our DLRM against the public one: probabilities, loss and every gradient."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.models.config import DLRMConfig
from recperf.models.dlrm import DLRM
from recperf.models.published import MicroDLRM, jagged, load_public_parameters, public_parameters
from recperf.train.loop import slices

FOLDER = Path(os.environ.get("RECPERF_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "dlrm"
CASES = sorted(FOLDER.glob("*.npz"))


def load(path: Path) -> tuple[DLRM, ClickBatch, dict[str, torch.Tensor]]:
    shape = json.loads(path.with_suffix(".json").read_text())
    arrays = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
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
    model = DLRM(config)
    prefix = "param/"
    load_public_parameters(model, {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)})
    count = range(len(shape["rows"]))
    features = jagged(
        config.features,
        [arrays[f"in/sparse_index/{i}"] for i in count],
        [arrays[f"in/sparse_offset/{i}"] for i in count],
    )
    return model, ClickBatch(arrays["in/dense"], features, arrays["in/label"].squeeze(1)), arrays


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-5 * float(theirs.abs().max()))


def test_there_are_cases(golden: Path) -> None:
    assert len(CASES) >= 3


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("way", ["loss", "plain_loss"])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_matches_the_public_dlrm(path: Path, way: str, micro_batches: int) -> None:
    model, batch, arrays = load(path)
    logits = model(batch.dense_BD, batch.features)
    close(logits.sigmoid().unsqueeze(1), arrays["out/prob"])
    parts = slices(batch, micro_batches)
    assert len(parts) == micro_batches
    losses = [getattr(model, way)(part) * (len(part) / len(batch)) for part in parts]
    close(sum(loss.detach() for loss in losses), arrays["out/loss"])
    for loss in losses:
        loss.backward()
    gradients = {name: value for name, value in arrays.items() if name.startswith("grad/")}
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    ours = public_parameters(model)
    assert {f"grad/{name}" for name in ours} == gradients.keys()
    for name, value in ours.items():
        close(value, gradients[f"grad/{name}"])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_published_calling_convention_gives_the_same(path: Path) -> None:
    model, batch, arrays = load(path)
    count = range(len(model.config.features))
    probabilities = MicroDLRM(model)(
        batch.dense_BD,
        [arrays[f"in/sparse_index/{i}"] for i in count],
        [arrays[f"in/sparse_offset/{i}"] for i in count],
    )
    close(probabilities, arrays["out/prob"])
