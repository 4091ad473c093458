"""Every optimizer of tables trains every workload on a GPU to the losses of the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_table_optimizers import WORKLOADS, losses_of

from recperf.ops.table_rules import RULES, RuleName

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact_products"),
]


def on_gpu(prepared: Any, **train: Any) -> Any:
    config = replace(prepared.config, train=replace(prepared.config.train, device="cuda", **train))
    if hasattr(config, "fast"):
        # The products of dlrm are bfloat16 by default.
        config = replace(config, fast=replace(config.fast, precision="float32"))
    return type(prepared)(config)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_losses_are_those_of_the_cpu(workload: str, rule: RuleName) -> None:
    prepared = WORKLOADS[workload](rule)
    if workload == "dlrm-v4":
        hstu = replace(prepared.config.model.hstu, dropout=0.0)
        prepared = type(prepared)(replace(prepared.config, model=replace(prepared.config.model, hstu=hstu)))
    own = losses_of(on_gpu(prepared).trial(1))
    # The first loss is that of the same weights; products are rounded otherwise, and errors grow with the steps.
    assert own == pytest.approx(losses_of(prepared.trial(1)), rel=2e-3)
    assert len(set(own)) == len(own)


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_of_the_step_has_the_same_losses(rule: RuleName) -> None:
    prepared = WORKLOADS["micro-dlrm"](rule)
    graph, plain = (losses_of(on_gpu(prepared, graph=switch).trial(1)) for switch in ("auto", "off"))
    assert graph == pytest.approx(plain, rel=1e-5)
