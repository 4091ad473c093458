"""Our DLRMv4 against the published one: intermediate values, outputs, loss and every gradient, by every switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dlrm_v4_cases as published
import pytest
import torch
from golden_cases import cases, close, interpret, needs_triton

from recperf.models.dlrm_v4.inputs import prepare_parts
from recperf.ops import choice

OPS = (
    "dropout",
    "hstu_attention",
    "layer_norm",
    "lookup",
    "stu_output",
)
interpret(*OPS)
CASES = cases("dlrm_v4")
SWITCHES = [
    {},
    {"candidate_only": False, "shared_encoders": False},
    {"candidate_only": False, "recompute": True},
    {"shared_encoders": False, "recompute": True},
]
"""Each code path of a layer and of the encoders, with and without recomputation."""


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "-".join(switches) or "default")
@pytest.mark.parametrize("path", CASES)
def test_every_switch_gives_the_published_numbers(path: Path, switches: dict[str, bool]) -> None:
    published.check(published.Case(path), **switches)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", CASES)
def test_parts_of_a_batch_add_up_to_the_published_numbers(path: Path, shared: bool) -> None:
    published.check(published.Case(path), parts=2, shared_encoders=shared)


@pytest.mark.parametrize("path", CASES)
def test_evaluation_gives_the_published_numbers(path: Path) -> None:
    case = published.Case(path)
    model = published.build(case).eval()
    with torch.no_grad():
        logits_B = model(prepare_parts(case.batch(), model.config, 1)[0])
    close(logits_B.sigmoid(), case.arrays["out/pred_eval"][0], "prediction")


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("path", CASES[:1])
@pytest.mark.usefixtures("interpreter")
def test_kernels_give_the_published_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case, by full layers and one for the candidate alone, because the interpreter takes its time. Tokens are put
    together without kernels here: thousands of ages are as many programs, whoever has them."""
    chosen = choice.choose

    def kernels(package: str, name: str, *rest: Any, **more: Any) -> Any:
        interpreted = name == "auto" and package.rpartition(".")[2] in OPS
        return chosen(package, "triton" if interpreted else name, *rest, **more)

    monkeypatch.setattr(choice, "choose", kernels)
    published.check(published.Case(path))
