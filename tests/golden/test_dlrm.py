"""Our DLRM against the public one: probabilities, loss and every gradient, by each implementation for a CPU."""

from __future__ import annotations

from pathlib import Path

import dlrm_paths as paths
import pytest
from golden_cases import cases, close, interpret, needs_native, needs_triton

from recperf.models.published import MicroDLRM
from recperf.train.loop import slices

interpret("bag", "dot", "mlp")
pytestmark = pytest.mark.usefixtures("interpreter")
CASES = cases("dlrm")
BODIES = [
    pytest.param(paths.PLAIN, id="plain"),
    pytest.param(paths.SPARSE, id="reference"),
    pytest.param(paths.NATIVE, id="native", marks=needs_native),
    pytest.param(paths.TRITON, id="triton", marks=needs_triton),
    pytest.param(paths.COPIES, id="copies", marks=needs_triton),
]


@pytest.mark.parametrize("bodies", BODIES)
@pytest.mark.parametrize("path", CASES)
def test_every_implementation_gives_the_public_numbers(path: Path, bodies: paths.Bodies) -> None:
    case = paths.load(path)
    model = paths.build(case, bodies)
    paths.agree(model, paths.step(model, case.batch), case)


@pytest.mark.parametrize("bodies", [paths.PLAIN, paths.SPARSE], ids=["dense gradients", "sparse gradients"])
@pytest.mark.parametrize("path", CASES)
def test_slices_of_a_batch_add_up_to_the_public_numbers(path: Path, bodies: paths.Bodies) -> None:
    case = paths.load(path)
    model, batch = paths.build(case, bodies), case.batch
    parts = slices(batch, 3)
    assert len(parts) == 3
    losses = [model.loss(part) * (len(part) / len(batch)) for part in parts]
    close(sum(part.detach() for part in losses), case.arrays["out/loss"])
    for part in losses:
        part.backward()
    ours, theirs = paths.gradients(model), case.named("grad/")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        close(value, theirs[name], name)


@pytest.mark.parametrize("path", CASES)
def test_the_published_calling_convention_gives_the_same(path: Path) -> None:
    case = paths.load(path)
    model = paths.build(case, paths.SPARSE)
    features = range(len(model.config.features))
    probabilities = MicroDLRM(model)(
        case.batch.dense_BD,
        [case.arrays[f"in/sparse_index/{i}"] for i in features],
        [case.arrays[f"in/sparse_offset/{i}"] for i in features],
    )
    close(probabilities, case.arrays["out/prob"])
