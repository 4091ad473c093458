"""Drawn training steps over embedding tables, and whether a profile leaves them as plain steps would: for tests on any
device, with torch, numpy and hypothesis alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, nn

import recperf
from recperf.measure.experiments import confirm

HOT = "ids of a few hot rows"


@dataclass(frozen=True)
class Case:
    """A drawn model and its training."""

    tables: list[tuple[str, int]]
    """How each table is read (embedding, bag, index), and its rows."""
    sparse: bool = False
    optimizer: str = "sgd"
    dropout: float = 0.0
    schedule: bool = False
    keep_gradients: bool = False
    """Whether gradients are set to zero at the start of a step, not to None at its end."""
    batches: int = 1 << 30
    """An iterator of few batches ends while steps are timed, traced or counted."""
    width: int = 4
    batch: int = 16


def cases(most: int = 26) -> st.SearchStrategy[Case]:
    rows = st.one_of(st.sampled_from([3, 100_000]), st.integers(3, 100_000))
    tables = st.lists(st.tuples(st.sampled_from(["embedding", "bag", "index"]), rows), min_size=1, max_size=most)
    flags = {name: st.booleans() for name in ("sparse", "schedule", "keep_gradients")}
    batches = st.one_of(st.just(1 << 30), st.integers(1, 18))
    optimizer, dropout = st.sampled_from(["sgd", "momentum", "adam"]), st.sampled_from([0.0, 0.3])
    return st.builds(Case, tables, optimizer=optimizer, dropout=dropout, batches=batches, **flags)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

        def weight(rows: int) -> Tensor:
            # Drawing ten million rows would take a second.
            return torch.linspace(-1, 1, rows * case.width).view(rows, case.width)

        build: dict[str, Callable[[int], nn.Module]] = {
            "embedding": lambda rows: nn.Embedding.from_pretrained(weight(rows), False, sparse=case.sparse),
            "bag": lambda rows: nn.EmbeddingBag.from_pretrained(weight(rows), False, sparse=case.sparse),
            "index": lambda rows: nn.ParameterList([weight(rows)]),
        }
        self.tables = nn.ModuleList(build[kind](rows) for kind, rows in case.tables)
        self.norm, self.drop = nn.BatchNorm1d(case.width), nn.Dropout(case.dropout)
        self.top = nn.Linear(case.width, 1)

    def forward(self, ids: list[Tensor]) -> Tensor:
        rows = [
            table[0][one].sum(1) if kind == "index" else table(one) if kind == "bag" else table(one).sum(1)
            for (kind, _), table, one in zip(self.case.tables, self.tables, ids)
        ]
        return self.top(self.drop(self.norm(torch.stack(rows).sum(0)))).squeeze(1)


class Training:
    """One step with all that it changes; two of the same case start alike."""

    def __init__(self, case: Case, device: str) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        self.case, self.device = case, device
        self.model = Net(case).to(device)
        tables = [one.weight for one in self.model.tables if getattr(one, "sparse", False)]
        dense = [one for one in self.model.parameters() if all(one is not table for table in tables)]
        rate = {"lr": 0.01}
        build: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda some: torch.optim.SGD(some, **rate),
            "momentum": lambda some: torch.optim.SGD(some, **rate, momentum=0.9),
            "adam": lambda some: torch.optim.Adam(some, **rate),
        }
        self.optimizers = [build[case.optimizer](dense)]
        if tables:
            self.optimizers.append(torch.optim.SparseAdam(tables) if case.optimizer == "adam" else build["sgd"](tables))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3, 0.9) if case.schedule else None
        self.noise = torch.Generator().manual_seed(5)

    def batches(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        for _ in range(self.case.batches):
            ids = [torch.randint(0, rows, (self.case.batch, 3)).to(self.device) for _, rows in self.case.tables]
            yield ids, torch.rand(self.case.batch).to(self.device)

    def step(self, ids: list[Tensor], labels: Tensor) -> None:
        if self.case.keep_gradients:
            for one in self.optimizers:
                one.zero_grad(set_to_none=False)
        jitter = random.random() + float(np.random.rand()) + float(torch.rand((), generator=self.noise))
        # On a GPU a loss outside of 0 to 1 would be an assertion that ends every later call.
        loss = nn.functional.binary_cross_entropy(torch.sigmoid(self.model(ids)), labels)
        (loss * (1 + 1e-3 * jitter)).backward()
        for one in self.optimizers:
            one.step()
        if self.schedule:
            self.schedule.step()
        if not self.case.keep_gradients:
            self.model.zero_grad()

    def state(self) -> dict[str, Any]:
        """All that a step changes."""
        found = {
            "model": self.model.state_dict(),
            "gradients": {name: one.grad for name, one in self.model.named_parameters()},
            "optimizers": [one.state_dict() for one in self.optimizers],
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "random": (random.getstate(), np.random.get_state(), torch.get_rng_state(), self.noise.get_state()),
        }
        return found | ({"cuda": torch.cuda.get_rng_state()} if self.device == "cuda" else {})


def every_experiment(step: Any, batch: Any, has_batch: bool, attribution: Any, observed: Any, *rest: Any, **more: Any):  # type: ignore[no-untyped-def]
    """All experiments that the step allows, whatever its shares are."""
    rows = [replace(row, random_ms=float(row.rows > 0)) for row in attribution.operators]
    shares = {**dict.fromkeys(attribution.shares, 0.0), "latency": 0.5, "launch": 0.3, "input": 0.2}
    return confirm(
        step, batch, has_batch, replace(attribution, random=0.8, operators=rows, shares=shares), observed, *rest, **more
    )


def require_equal(one: Any, other: Any, where: str) -> None:
    """Two states are the same, bit for bit."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.layout == other.layout, where
        if one.layout == torch.sparse_coo:
            assert one.is_coalesced() == other.is_coalesced(), where
            require_equal(one._indices(), other._indices(), where)
            require_equal(one._values(), other._values(), where)
        else:
            assert (one.dtype, one.shape) == (other.dtype, other.shape), where
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            require_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other)):
            require_equal(*pair, f"{where}.{number}")
    else:
        assert one == other, where


def profiled_like_plain(case: Case, device: str = "cpu") -> recperf.Report:
    """Profile a step, and require that it left what plain steps leave."""
    profiled = Training(case, device)
    report = recperf.profile(profiled.step, profiled.batches(), profiled.model, confirm=True, quiet=True)
    # State before anything else draws random numbers.
    state = profiled.state()
    identity = [id(one) for one in profiled.model.parameters()]
    plain = Training(case, device)
    assert report.steps_trained
    for batch in islice(plain.batches(), report.steps_trained):
        plain.step(*batch)
    assert report.steps_trained <= case.batches
    assert report.steps.counted >= 2
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in profiled.model.modules())
    require_equal(state, plain.state(), "")
    assert identity == [id(one) for one in profiled.model.parameters()]
    return report
