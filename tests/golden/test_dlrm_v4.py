"""Our DLRMv4 against the published one: intermediate values, outputs, loss and every gradient, by every switch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.ops import choice

_spec = importlib.util.spec_from_file_location("dlrm_v4_cases", Path(__file__).with_name("dlrm_v4_cases.py"))
assert _spec is not None
assert _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
sys.modules["dlrm_v4_cases"] = cases
_spec.loader.exec_module(cases)

OPS = (
    "assemble",
    "dropout",
    "hstu_attention",
    "layer_norm",
    "lookup",
    "stu_input",
    "stu_output",
)
INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
if INTERPRETED:
    # Whether Triton's interpreter runs a kernel is settled where it is defined. Other tests must not see the wish.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for op in OPS:
            importlib.import_module(f"recperf.ops.{op}.triton")

CASES = [pytest.param(path, id=path.stem) for path in cases.CASES] or [
    pytest.param(None, marks=pytest.mark.skip(f"no golden numbers at {cases.FOLDER}; set RECPERF_GOLDEN"))
]
SWITCHES = ("candidate_only", "shared_encoders", "recompute")
WAYS = [
    pytest.param(dict(zip(SWITCHES, on)), id="-".join(name for name, yes in zip(SWITCHES, on) if yes) or "plain")
    for on in product((False, True), repeat=3)
]


def test_there_are_cases(golden: Path) -> None:
    assert len(cases.CASES) >= 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("path", CASES)
def test_every_way_gives_the_published_numbers(path: Path, way: dict[str, bool]) -> None:
    cases.check(cases.Case(path), **way)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", CASES)
def test_parts_of_a_batch_add_up_to_the_published_numbers(path: Path, shared: bool) -> None:
    cases.check(cases.Case(path), parts=2, shared_encoders=shared)


@pytest.mark.parametrize("path", CASES)
def test_evaluation_gives_the_published_numbers(path: Path) -> None:
    case = cases.Case(path)
    model = cases.build(case).eval()
    with torch.no_grad():
        found_B = model(cases.prepare_parts(case.batch(), model.config, 1)[0])
    cases.close(found_B.sigmoid(), case.arrays["out/pred_eval"][0], "prediction")


@pytest.mark.skipif(not INTERPRETED, reason="no triton, or a GPU, where tests/gpu runs the kernels")
@pytest.mark.slow
@pytest.mark.parametrize("path", CASES[:1])
def test_kernels_give_the_published_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, by full layers and one for the candidate alone, because the interpreter takes its time. Tokens are put
    together without kernels here: thousands of ages are as many programs, whoever has them."""
    chosen = choice.choose

    def kernels(package: str, name: str, *rest: Any, **more: Any) -> Any:
        interpreted = name == "auto" and package.rpartition(".")[2] in OPS
        return chosen(package, "triton" if interpreted else name, *rest, **more)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice, "choose", kernels)
    cases.check(cases.Case(path))
