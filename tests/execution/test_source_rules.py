"""Rules over the source of a program: what they find in planted programs, and that their edits train the same."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from planted_programs import PROGRAMS, PlantedProgram

from recperf.execution.source_rules import advise_on_sources, sources_of
from recperf.measure.records import Advice, PlaceTime


def advised(script: Path, line: str, share: float = 0.5) -> list[Advice]:
    """What the rules say about a program where a line takes this share of the step."""
    lines = script.read_text().splitlines()
    place = PlaceTime("f", script.name, 1 + next(n for n, text in enumerate(lines) if line in text), limit="python",
                      share=share, ms=1.0)  # fmt: skip
    double = SimpleNamespace(precision="float64", ms=1.0)
    facts = SimpleNamespace(loader=SimpleNamespace(padding=0.75))
    softmax = [Advice("catalogue softmax", "A softmax over 50,000 items.", "")]
    report: Any = SimpleNamespace(places=[place], operators=[double], waits={}, advice=softmax, program_facts=facts)
    advise_on_sources(report, [script])
    return report.advice  # type: ignore[no-any-return]


def losses(text: str, steps: int = 3) -> list[float]:
    """The losses of a program from the same seeds."""
    random.seed(0)
    numpy.random.seed(0)
    threads, found = torch.get_num_threads(), []
    backward = torch.Tensor.backward

    def recorded(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        found.append(float(loss.detach()))
        backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", recorded)
        try:
            exec(compile(text.replace("STEPS", str(steps)), "<program>", "exec"), {"__name__": "__main__"})
        finally:
            torch.set_num_threads(threads)
            torch.autograd.set_detect_anomaly(False)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [one for one in PROGRAMS if one.edit], ids=lambda program: program.name)
def test_a_planted_defect_is_found_and_its_edit_trains_the_same(program: PlantedProgram, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program.text)
    advice = {one.name: one for one in advised(script, program.slow)}
    one = advice[program.advice]
    (text,) = sources_of(one.settings).values()
    # What no line tells is tried first.
    assert program.advice not in ("anomaly mode", "padding") or next(iter(advice)) == program.advice
    assert text != program.text
    assert ("75% of the ids of a batch" in one.seen) == (program.advice == "padding")
    before, after = losses(program.text), losses(text)
    assert len(after) == len(before) >= 3
    assert bool(one.changes) or program.same
    if program.same:
        assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(
    "line",
    [
        "loss.backward(); print(loss)",
        "total += float(loss)",
        "kept.append(loss)",
        "group.setdefault('lr', 1)",
        "score = model(x)",
        "loss = asymmetric_loss(x)",
        "torch.save(x, memory)",
        "x.add_(1)",
        "noise = np.random.rand()",
    ],
)
def test_what_trains_or_is_used_later_stays(line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import io, torch\nimport numpy as np\nfrom losses import asymmetric_loss\nkept, total = [], 0.0\n"
        f"memory = io.BytesIO()\nfor group in groups:\n    {line}\n    send(kept, total, score, loss, memory, noise)\n"
    )
    assert not [one for one in advised(script, line) if one.name == "reports"]


@pytest.mark.parametrize(
    "body",
    [
        "return 0.5 * x * (1 + torch.tanh(x))",
        "return x * torch.sigmoid(1.702 * x)",
        "return 0.5 * x * (1 + torch.erf(y / 1.4142135623730951))",
        "u = x.mean(-1, keepdim=True)\n    s = (x - u).pow(2).mean(0)\n    x = (x - u) / torch.sqrt(s + 1e-5)\n"
        "    return w * x + b",
        "return torch.stack([x[i : 2 * i] for i in y])",
        "return torch.stack([x[i : i + i] for i in y])",
        "out, weights = attention(x, x, x)\n    return out + weights.sum()",
    ],
)
def test_what_only_looks_like_one_operator_stays(body: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = f"import torch\nattention = torch.nn.MultiheadAttention(8, 2)\ndef forward(x, y, w, b):\n    {body}\n"
    script.write_text(text)
    own = {"activation", "layer norm", "windows", "attention"}
    assert not own & {one.name for one in advised(script, "return")}
