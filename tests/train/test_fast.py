"""Which switches are on, why, and what is refused; training configs refuse conflicting fields."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from recperf.errors import ConfigError, MachineError
from recperf.train.config import PLAIN, DLRMTrainConfig, FastConfig
from recperf.train.device import BETWEEN_RANKS, Switches, resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WAYS = ("embedding", "interaction", "mlp", "optimizer")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a GPU with bfloat16 and Triton."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else find(name))


def switched(
    device: torch.device, fast: FastConfig | None = None, *, drawn: bool = True, slices: int = 1,
    tables: str = "sgd", lack: str = "", **change: Any,
) -> Switches:  # fmt: skip
    values = replace(fast or FastConfig(), **change)
    return resolve(values, device, drawn=drawn, slices=slices, optimizer=tables, lack=lack)


def test_defaults_on_a_cpu_and_their_reasons() -> None:
    switches = switched(CPU)
    assert asdict(switches) == {
        "input": "device", "graph": False, "precision": "float32", "embedding": True, "interaction": True,
        "mlp": True, "optimizer": True,
        "reasons": {
            "input": "device: synthetic batches are drawn where they are used",
            "graph": "off: no GPU",
            "precision": "float32: a CPU",
            "embedding": "fused: on cpu",
            "interaction": "fused: on cpu",
            "mlp": "fused: on cpu",
            "optimizer": "fused: on cpu",
            "deterministic": "yes: no implementation in use varies from run to run",
        },
    }  # fmt: skip
    assert switches.low == torch.float32


@pytest.mark.usefixtures("gpu")
def test_defaults_on_a_gpu_and_their_reasons() -> None:
    switches = switched(CUDA)
    assert all(getattr(switches, name) for name in ("graph", *WAYS))
    assert (switches.input, switches.precision, switches.low) == ("device", "bfloat16", torch.bfloat16)
    assert switches.reasons["graph"] == "on: a GPU, and shapes that do not change"
    assert switches.reasons["precision"].startswith("bfloat16: a GPU that supports it")
    assert {switches.reasons[name] for name in WAYS} == {"fused: on cuda"}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_plain_disables_every_switch(device: torch.device) -> None:
    switches = switched(device, PLAIN)
    assert not any(getattr(switches, name) for name in ("graph", *WAYS))
    assert (switches.input, switches.precision) == ("pageable", "float32")
    requested = {name: reason for name, reason in switches.reasons.items() if name != "deterministic"}
    assert all(reason.endswith(": requested") for reason in requested.values())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "more", "message", "fix"),
    [
        (CPU, {"graph": "on"}, "a step cannot be a CUDA graph: no GPU", "--fast.graph off"),
        (CUDA, {"graph": "on", "slices": 2}, "a step cannot be a CUDA graph: a batch is split", "--fast.graph off"),
        (CPU, {"precision": "tf32"}, "a CPU has no tf32", "--fast.precision float32"),
        (CPU, {"input": "device", "drawn": False}, "rows of a file cannot be drawn", "--fast.input pinned"),
    ],
)
def test_impossible_values_are_refused(device: torch.device, more: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(MachineError, match=message) as caught:
        switched(device, **more)
    assert caught.value.fix == fix


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"slices": 2}, "off: a batch is split into micro-batches"),
        ({"lack": BETWEEN_RANKS}, "off: ranks communicate in the middle of a step"),
        ({"embedding": "plain"}, "off: plain embeddings have shapes that depend on a batch's distinct rows"),
        ({"tables": "adamw"}, "off: adamw needs a dense gradient of the tables, whose lookups read sizes on the host"),
    ],
)
def test_auto_leaves_the_graph_off_where_it_cannot_be_captured(more: dict[str, Any], why: str) -> None:
    switches = switched(CUDA, **more)
    assert not switches.graph
    assert switches.reasons["graph"] == why
    atomics = "embedding" in more or "tables" in more
    assert switches.reasons["deterministic"].startswith("no: torch adds" if atomics else "yes: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_weights": (0.5, 1.0)}, "train.loss_weights .* with train.loss wbce"),
        ({"loss": "wbce", "loss_weights": (0.0, 0.0)}, "at least one above 0"),
        ({"loss": "wbce", "loss_weights": (float("nan"), 1.0)}, "numbers 0 to 1e6"),
        ({"loss": "wbce", "loss_weights": (1.0, 1.0, 1.0)}, "two numbers"),
        ({"warmup_steps": 5}, "train.warmup_steps .* with train.schedule warmup-decay"),
        ({"schedule": "one-cycle", "decay_steps": 5}, "train.decay_steps .* with train.schedule warmup-decay"),
        (
            {"schedule": "warmup-decay", "warmup_steps": 9, "decay_steps": 5, "decay_start": 8},
            "warm-up and decay cannot overlap",
        ),
        ({"schedule": "warmup-decay", "decay_start": 8}, "train.decay_steps is 0; allowed: at least 1"),
        ({"weight_decay": 0.1}, "train.weight_decay .* with train.optimizer adamw"),
        ({"micro_batches": 5, "batch_size": 4}, r"at most train.batch_size \(4\)"),
        ({"eps": 0.0}, "train.eps"),
        ({"evaluate_steps": -1}, "train.evaluate_steps"),
    ],
)
def test_conflicting_fields_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DLRMTrainConfig(**changes)
