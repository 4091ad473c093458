"""The benchmarks of HSTU and dlrm-v4 run on a small scale, count as the model does, and name the goals they miss.

Shapes: B rows, T tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from recperf.data.streaming.features import CANDIDATE, HISTORY
from recperf.models.dlrm_v4 import cost
from recperf.models.dlrm_v4.config import laptop, mlperf
from recperf.models.dlrm_v4.inputs import prepare

Script = Callable[[str], ModuleType]


@pytest.mark.parametrize(
    "name",
    ["stu_ops", *(pytest.param(n, marks=pytest.mark.long) for n in ("hstu_attention", "stu_stack", "dlrm_v4_step"))],
)
def test_a_tiny_run_prints_and_records_nothing(
    script: Script, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script(name).main(["--tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 6
    assert not list(tmp_path.iterdir())


def test_attention_is_counted_as_the_model_counts_it(script: Script) -> None:
    peer = script("_hstu_peer")
    for shape in peer.SHAPES:
        lengths_B = shape.lengths(1)
        assert shape.shortest <= int(lengths_B.min()) <= int(lengths_B.max()) <= shape.longest
        assert shape.flops(lengths_B) == cost.attention_flops(mlperf().hstu, lengths_B.tolist())
    assert [peer.SHAPES[0].goal(what) for what in ("forward", "backward", "both")] == [600, 470, 500]
    assert peer.WIDTHS[0].goal("forward") is None, "the goal is a share of the rate at 128"


def test_the_peer_of_equal_rows_is_causal_softmax_attention(script: Script) -> None:
    draw = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(10, 3, 4, generator=draw) for _ in range(4))
    module = script("_hstu_peer")
    peer = module.Softmax((q, k, v, grad), 2, module.SDPBackend.MATH)
    out = peer.forward().transpose(1, 2).reshape(10, 3, 4)
    for row in (slice(0, 5), slice(5, 10)):
        scores = torch.einsum("ihd,jhd->hij", q[row], k[row]) / 2
        seen = torch.tril(torch.ones(5, 5, dtype=torch.bool))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(2)
        torch.testing.assert_close(out[row], torch.einsum("hij,jhd->ihd", weights, v[row]))
    assert all(map(torch.equal, peer.both(), peer.backward()))
    for actual, right in zip((peer.forward(), *peer.backward()), peer.exact()):
        torch.testing.assert_close(actual.double(), right, rtol=1e-5, atol=1e-6)


def test_made_up_batches_are_like_the_benchmarks(script: Script) -> None:
    small = laptop()
    config = replace(small, rows=(1_000_000,) * 11, hstu=replace(small.hstu, max_length=128))
    batch = script("_histories").made_up(config, 200, 9, mean=77, shortest=16)
    inputs = prepare(batch, config)
    positions = inputs.tokens - 8 * 200
    assert positions == 200 * 78
    distinct = inputs.entities["item_id"].index_N.numel()
    assert distinct == inputs.rows["item_id"].numel(), "artist and album are the item's own"
    for name, share in cost.UNIQUE.items():
        assert inputs.rows[name].numel() / positions == pytest.approx(share, rel=0.05)
    for history, candidate in zip(HISTORY, CANDIDATE):
        assert batch.features[history][0].numel() == 200 * 77
        assert batch.features[candidate][0].numel() == 200
    for low, high in zip(batch.history_offsets_B1[:5].tolist(), batch.history_offsets_B1[1:6].tolist()):
        assert (batch.times_T[low:high].diff() >= 0).all()
    assert set(batch.actions_T.tolist()) == {1, 3, 4}


def entry(metric: str, p50: float, **conditions: Any) -> dict[str, Any]:
    return {"variant": "some", "metric": metric, "unit": "x", "p50": p50, "conditions": conditions}


def test_missed_goals_are_named(script: Script) -> None:
    attention, stack, step, ops = map(script, ("hstu_attention", "stu_stack", "dlrm_v4_step", "stu_ops"))
    where, fine = {"what": "backward", "timing": "one by one"}, {"relative_error": {"dq": 3e-3}}
    ours, wide = (
        entry("rate", rate, who=who, shape=shape, goal=goal, **where, **fine)
        for who, shape, rate, goal in (
            ("recperf", "B32 N2048", 400.0, 400.0),
            ("recperf", "B32 N2048 width 64", 350.0, None),
        )
    )
    attention.set_relative_goals([ours, wide])
    assert wide["conditions"]["share_of_width_128"] == 0.875
    assert attention.goals_missed([ours]) == []
    assert len(attention.goals_missed([wide])) == 1
    assert len(attention.goals_missed([entry("rate", 399.0, goal=400.0, relative_error={"dq": float("nan")})])) == 2
    assert len(attention.goals_missed([entry("first calls", 21.0, goal=20.0) | {"unit": "s"}])) == 1
    assert stack.goals_missed([entry("throughput", 2400.0, goal=2300.0), entry("peak memory", 20.0, goal=None)]) == []
    assert len(stack.goals_missed([entry("throughput", 2200.0, goal=2300.0)])) == 1
    assert len(stack.goals_missed([entry("peak memory", 24.0, goal=23.7)])) == 1
    assert step.goals_missed([entry("unexplained", 0.04), entry("throughput", 1.0, goal=None)]) == []
    assert len(step.goals_missed([entry("unexplained", 0.06), entry("throughput", 3499.0, goal=3500.0)])) == 2
    assert len(ops.goals_missed([entry("ratio", 0.5), entry("ratio", 1.2), entry("bandwidth", 0.1)])) == 1


def test_both_sides_of_an_op_compute_the_same(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = script("stu_ops")
    monkeypatch.setattr(ops, "RATE", 0.0)
    maker = ops.Maker(ops.TINY, torch.device("cpu"))
    jobs = [job for make in (maker.norms, maker.gated, maker.tokens, maker.gather, maker.sums) for job in make()]
    assert len(jobs) == 10
    for job in jobs:
        ours, theirs = job.ours(), job.torch()
        if ours is None:
            continue
        pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
        for mine, right in pairs:
            scale = float(right.float().abs().max())
            torch.testing.assert_close(
                mine.float(),
                right.float(),
                rtol=0.02,
                atol=0.02 * scale,
                msg=lambda text, job=job: f"{job.name}: {text}",
            )
