"""micro-dlrm trains as plain autograd does in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from recperf.data.config import MovieLensConfig
from recperf.train.device import applied
from recperf.train.loop import take_step
from recperf.workloads.micro_dlrm.build import PreparedClicks
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig, default, dot


@pytest.mark.parametrize("preset", [default, dot])
def test_the_first_losses_are_those_of_autograd_in_float64(preset: Callable[[], MicroDLRMConfig]) -> None:
    config = replace(preset(), data=MovieLensConfig(source="embedded"))
    config = replace(config, train=replace(config.train, device="cpu"))
    prepared = PreparedClicks(config)
    trial, exact = prepared.trial(config.seed), prepared.trial(config.seed)
    model = exact.model.double()
    decays = [(model.dense_parameters(), config.train.weight_decay)]
    decays.append((list(model.embeddings.parameters()), config.train.table_weight_decay))
    optimizer = torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in decays])
    batches, worst = trial.recipe.order.batches(0), 0.0
    with applied(prepared.settings):
        for step, batch in zip(range(50), exact.recipe.order.batches(0)):
            loss, _ = take_step(trial.recipe, batches, step)
            for group in optimizer.param_groups:
                group["lr"] = trial.recipe.learning_rate(step)
            batch = replace(batch, dense_BD=batch.dense_BD.double(), labels_B=batch.labels_B.double())
            expected = model.criterion.value(model(batch.dense_BD, batch.features), batch.labels_B)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            worst = max(worst, abs(float(loss) / float(expected.detach()) - 1))
    assert worst < 5e-6
