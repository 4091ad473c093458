"""States on disk: every value, every bit, every type of tensor."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recperf.train import checkpoint_state
from recperf.train.checkpoint import CheckpointStore


def round_trip(folder: Path, state: dict[str, Any], into: dict[str, Any] | None = None) -> dict[str, Any]:
    store = CheckpointStore(folder=folder, notice=pytest.fail)
    store.save(1, state, best=False)
    loaded = store.load(into=into)
    assert loaded is not None
    return loaded


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def odd_tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(40, 50, generator=draw)
    return {
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 7),
        "nothing": torch.empty(3, 0, 2),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.tensor([2**62, -1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bf16": base[0].bfloat16(),
        "half": base[1].half(),
        "double": base[2].double(),
        "view": base[:, 3],
        "shares storage": base[5:9],
        "transposed": base.t(),
        "expanded": base[0, :1].expand(9),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "parameter": torch.nn.Parameter(base[10].clone()),
        "large": torch.randn(300, 70, generator=draw),
        "large view": torch.randn(300, 70, generator=draw)[::2, 1:],
        "large transposed": torch.randn(300, 70, generator=draw).t(),
        "large bf16": torch.randn(300, 140, generator=draw).bfloat16(),
        "large flat": torch.arange(20_000),
    }


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 24])
def test_odd_tensors_are_restored_bit_for_bit(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_state, "CHUNK", chunk)
    state = odd_tensors()
    loaded = round_trip(tmp_path, state)
    assert list(loaded) == list(state)
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name
    by_library = load_file(tmp_path / "step-00000001" / "rank0-00000.safetensors")
    assert {name: bits(tensor) for name, tensor in by_library.items()} == {name: bits(state[name]) for name in state}


def test_values_are_restored_exactly(tmp_path: Path) -> None:
    state = {
        "order": {"z": 1, "a": 2},
        "floats": [0.1, 1e-323, -0.0, 1.7976931348623157e308, 2.0],
        "not finite": [math.nan, math.inf, -math.inf],
        "ints": [2**80, -1, 0],
        "bools": [True, False, None],
        "text": 'quote " \n ü \ud800',
        "empty": {"list": [], "dict": {}},
        "tuple": (1, (2, [3])),
    }
    loaded = round_trip(tmp_path, state)
    as_bits = [struct.pack("<d", value) for value in state["floats"] + state["not finite"]]
    assert [struct.pack("<d", value) for value in loaded["floats"] + loaded["not finite"]] == as_bits
    assert list(loaded["order"]) == ["z", "a"]
    assert loaded["tuple"] == [1, [2, [3]]]
    for name in ("ints", "text", "empty"):
        assert loaded[name] == state[name]
    assert [type(value) for value in loaded["bools"]] == [bool, bool, type(None)]
    assert isinstance(loaded["floats"][-1], float)
    for key in (1, "$tensor"):
        with pytest.raises(TypeError, match="a key in part is not a string"):
            round_trip(tmp_path / "refused", {"part": {key: 1}})


def test_matching_tensors_are_read_in_place_and_others_are_created(tmp_path: Path) -> None:
    saved = {"a": torch.randn(200, 100), "small": torch.randn(3), "list": [torch.ones(2)], "b": torch.randn(30_000)}
    into = {
        "a": torch.zeros(200, 100),
        "small": torch.zeros(6)[::2],
        "list": (torch.zeros(2, dtype=torch.int64),),
        "b": torch.zeros(20_000),
        "more": torch.zeros(1),
    }
    loaded = round_trip(tmp_path, saved, into)
    assert loaded["a"].data_ptr() == into["a"].data_ptr()
    assert torch.equal(into["small"], saved["small"])
    assert loaded["small"].data_ptr() == into["small"].data_ptr()
    assert torch.equal(into["a"], saved["a"])
    assert loaded["list"][0].dtype == torch.float32
    assert torch.equal(loaded["b"], saved["b"])
    assert not into["b"].any()
    assert "more" not in loaded
