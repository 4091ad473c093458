"""Our DLRM against the public one: probabilities, loss and every gradient, by every way of a CPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from recperf.models.published import MicroDLRM
from recperf.ops.bag import native
from recperf.train.loop import slices

_spec = importlib.util.spec_from_file_location("dlrm_paths", Path(__file__).with_name("dlrm_paths.py"))
assert _spec is not None
assert _spec.loader is not None
paths = importlib.util.module_from_spec(_spec)
sys.modules["dlrm_paths"] = paths
_spec.loader.exec_module(paths)

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    # Whether Triton's interpreter runs a kernel is settled where it is defined. Other tests must not see the wish.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for op in ("bag", "dot", "relu"):
            paths.body(op, "triton")

CASES = [pytest.param(path, id=path.stem) for path in paths.CASES] or [
    pytest.param(None, marks=pytest.mark.skip(f"no golden numbers at {paths.FOLDER}; set RECPERF_GOLDEN"))
]
BODIES = ("reference", "native", "triton")
PLAIN = paths.Way("stacked", "reference", "plain")
SPARSE = paths.Way("reference", "reference", "plain")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def lack(way: object) -> str | None:
    """Why this machine cannot take the way."""
    words = str(way)
    if "native" in words and isinstance(native.library(), str):
        return native.library()
    if ("triton" in words or "copies" in words) and not INTERPRETED:
        return "no triton, or a GPU, where tests/gpu runs the kernels"
    return None


def test_there_are_cases(golden: Path) -> None:
    assert len(paths.CASES) >= 3


@pytest.mark.parametrize("way", paths.ways(("stacked", *BODIES), dots=BODIES), ids=str)
@pytest.mark.parametrize("path", CASES)
def test_every_way_gives_the_public_dlrms_numbers(path: Path, way: object) -> None:
    problem = lack(way)
    if problem:
        pytest.skip(problem)
    case = paths.load(path)
    model = paths.build(case, way)
    paths.agree(model, paths.step(model, case.batch), case)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("way", [PLAIN, SPARSE], ids=str)
@pytest.mark.parametrize("path", CASES)
def test_slices_of_a_batch_add_up_to_the_public_dlrms_numbers(path: Path, way: object, micro_batches: int) -> None:
    case = paths.load(path)
    model, batch = paths.build(case, way), case.batch
    parts = slices(batch, micro_batches)
    assert len(parts) == micro_batches
    losses = [model.loss(part) * (len(part) / len(batch)) for part in parts]
    paths.close(sum(loss.detach() for loss in losses), case.arrays["out/loss"])
    for loss in losses:
        loss.backward()
    ours, theirs = paths.gradients(model), case.named("grad/")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        paths.close(value, theirs[name], name)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.parametrize("path", CASES)
def test_autograd_gives_the_public_dlrms_numbers(path: Path, micro_batches: int) -> None:
    """The short way, which the written-out steps are held against elsewhere."""
    case = paths.load(path)
    model, batch = paths.build(case, PLAIN), case.batch
    losses = [model.plain_loss(part) * (len(part) / len(batch)) for part in slices(batch, micro_batches)]
    paths.close(sum(loss.detach() for loss in losses), case.arrays["out/loss"])
    for loss in losses:
        loss.backward()
    for name, value in paths.gradients(model).items():
        paths.close(value, case.arrays[f"grad/{name}"], name)


@pytest.mark.parametrize("way", [PLAIN, SPARSE], ids=str)
@pytest.mark.parametrize("path", CASES)
def test_the_published_calling_convention_gives_the_same(path: Path, way: object) -> None:
    case = paths.load(path)
    model = paths.build(case, way)
    count = range(len(model.config.features))
    probabilities = MicroDLRM(model)(
        case.batch.dense_BD,
        [case.arrays[f"in/sparse_index/{i}"] for i in count],
        [case.arrays[f"in/sparse_offset/{i}"] for i in count],
    )
    paths.close(probabilities, case.arrays["out/prob"])
