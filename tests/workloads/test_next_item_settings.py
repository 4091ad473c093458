"""Settings of next-item models follow from the events of the data, the encoder and the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.cli import main
from recperf.data.next_item import NextItemData
from recperf.workloads.next_item import own_data
from recperf.workloads.next_item.config import for_data


def data_of(users: int, events: int) -> NextItemData:
    """Each of `users` has as many events."""
    return NextItemData(
        name="even", items=5, users=users, offsets_U1=np.arange(users + 1) * events,
        items_E=np.ones(users * events, np.int32), times_E=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("users", "events", "kind", "length", "dropout"),
    [(5000, 8, "sparse", 10, 0.5), (4999, 8, "small", 10, 0.3), (800, 50, "dense", 50, 0.3), (1, 60, "small", 50, 0.3),
     (900, 300, "dense", 200, 0.3), (900, 49, "sparse", 49, 0.5)],
)  # fmt: skip
def test_settings_follow_the_events(users: int, events: int, kind: str, length: int, dropout: float) -> None:
    data = data_of(users, events)
    assert own_data.kind_of(data) == kind
    model, train = for_data(data).model, for_data(data).train
    assert train.average_steps == (0 if kind == "small" else own_data.AVERAGE)
    assert (model.max_length, model.dropout, model.encoder, model.counts) == (length, dropout, "auto", "on")


@pytest.mark.parametrize(
    ("users", "events", "batch"), [(22_363, 8, 256), (5000, 8, 64), (1090, 48, 16), (6040, 165, 128), (800, 50, 16)]
)
def test_an_epoch_has_enough_steps(users: int, events: int, batch: int) -> None:
    train = for_data(data_of(users, events)).train
    assert train.batch_size == batch
    assert users // batch >= own_data.STEPS


@pytest.fixture
def shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `recperf show` says of the model for a small log, or of what is wrong."""
    lines = (f"u{user} " + " ".join(f"i{(user + at) % 40}" for at in range(8)) for user in range(30))
    (tmp_path / "log.txt").write_text("\n".join(lines))
    store = tmp_path / "store"
    assert main(["data", "import", str(tmp_path / "log.txt"), "--sequences", "--store", str(store), "--quiet"]) == 0

    def show(workload: str, *options: str, code: int = 0) -> Any:
        capfd.readouterr()
        assert main(["show", workload, "--data", str(store), *options, "--json"]) == code
        out, err = capfd.readouterr()
        return json.loads(out)["config"]["model"] if code == 0 else err

    return show


def sizes(model: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(model[name] for name in ("encoder", "dim", "blocks", "heads", "head_dim"))


def test_sizes_follow_the_encoder_and_the_device(shown: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes(shown("next-item", "--train.device", "cpu")) == ("transformer", 64, 1, 1, 64)
    assert sizes(shown("next-item", "--train.device", "cuda")) == ("transformer", 128, 1, 1, 128)
    assert sizes(shown("next-item", "--model.encoder", "hstu")) == ("hstu", 32, 2, 2, 16)
    assert sizes(shown("next-item", "--train.device", "cpu", "--model.dim", "48")) == ("transformer", 48, 1, 1, 48)
    assert sizes(shown("next-item", "--train.device", "cpu", "--model.heads", "3")) == ("transformer", 64, 1, 3, 21)
    assert sizes(shown("hstu")) == ("hstu", 32, 2, 2, 16)
    assert shown("hstu")["counts"] == shown("next-item")["counts"] == "on"
    assert shown("hstu", "--preset", "sparse")["counts"] == "off"
    refused = shown("hstu", "--model.encoder", "transformer", code=3)
    assert "the workload hstu has HSTU blocks" in refused
    assert "recperf run next-item" in refused
    for there, expected in ((True, 128), (False, 64)):
        monkeypatch.setattr("recperf.workloads.next_item.config.has_gpu", lambda device, there=there: there)
        assert sizes(shown("next-item"))[1] == expected


def test_large_data_gets_larger_models_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, data, expected in (
        (True, data_of(5000, 8), (256, 2, 1, 256)),
        (True, data_of(800, 50), (192, 4, 4, 48)),
        (False, data_of(800, 50), (64, 2, 2, 32)),
    ):
        assert tuple(own_data.sizes_for(data, "transformer", gpu).values()) == expected
    monkeypatch.setattr(own_data, "version", lambda name: "2.13.0+cpu")
    assert (own_data.has_gpu("cuda"), own_data.has_gpu("cpu"), own_data.has_gpu("auto")) == (True, False, False)


def test_a_size_of_zero_needs_data(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "next-item", "--model.dim", "0", "--dry-run"]) == 3
    assert "model.dim is 0; allowed: above 0" in capfd.readouterr().err
