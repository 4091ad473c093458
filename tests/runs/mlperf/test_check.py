"""The official checkers' verdicts on logs: what passes, what fails and by which rule, and that they never crash us."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from golden_numbers import REPOSITORY

from recperf.errors import DataError
from recperf.runs.mlperf.check import verdict
from recperf.runs.record import CONFIG_SCHEMA

pytestmark = pytest.mark.usefixtures("made")


def rules(path: Path) -> list[str]:
    result = verdict(path)
    assert result.passed is not bool(result.failures)
    return list(result.failures)


@pytest.mark.parametrize(("batch", "first"), [(8192, 25), (32768, 41)])
def test_a_log_at_the_real_sizes_passes_completely(
    write: Callable[..., Path], made: ModuleType, batch: int, first: int
) -> None:
    assert made.first_block(batch) == first
    result = verdict(write(batch=batch, last=first + 3))
    assert result.passed
    assert (result.failures, result.warnings, result.division) == ({}, [], "closed")


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        (
            {"learning_rate": 1e-7, "table_learning_rate": 1e-7},
            ["opt_base_learning_rate"],
        ),
        ({"table_learning_rate": 1.2e-6}, ["opt_sparse_base_learning_rate"]),
        ({"warmup_steps": 2400}, ["opt_learning_rate_warmup_steps", "train_loss"]),
        ({"clip": 0.0}, ["opt_gradient_clip_norm"]),
        ({"train_samples": 1000}, ["train_samples"]),
        ({"last": 24}, ["eval_accuracy"]),
    ],
)
def test_a_wrong_value_fails_by_its_rule(
    write: Callable[..., Path], changed: dict[str, Any], failing: list[str]
) -> None:
    assert rules(write(**changed)) == failing


def test_messages_of_failures(write: Callable[..., Path]) -> None:
    path = write(learning_rate=1e-7, train_samples=1000)
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"run_stop"' not in line))
    texts = verdict(path).failures
    assert texts["run_stop"].startswith("Required EXACTLY_ONE occurrence of 'run_stop' but found 0")
    rule = "CHECK for 'train_samples' failed in line 35 breaks the rule v['value'] == s['train_samples']"
    assert texts["train_samples"].startswith(rule)
    assert '"value": 1000' in texts["train_samples"]


def test_a_published_log_of_another_name_fails_without_side_effects(
    write: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    result = verdict(REPOSITORY / "mlperf_logs" / "dlrmv4_gbs8192_a.log")
    assert not result.passed
    assert "calls its benchmark 'hstu'" in result.failures["submission_benchmark"]
    assert verdict(write()).passed
    assert (list(root.handlers), root.level) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"hello\n", b"\0\xff" * 100, b":::MLLOG {}\n"])
def test_a_file_that_is_not_a_log(made: ModuleType, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not an MLPerf log"):
        verdict(path)


def test_a_cut_log_and_a_log_mixed_with_other_output(write: Callable[..., Path]) -> None:
    path = write()
    content = path.read_bytes()
    path.write_bytes(b"a program says hello\n0: " + content)
    assert verdict(path).passed
    path.write_bytes(content[:-20])
    assert rules(path) == ["run_stop", "log"]


def test_rates_that_were_used_are_checked_not_only_declared_ones(write: Callable[..., Path]) -> None:
    path = write()
    text = path.read_text()
    path.write_text(text.replace('"lr": ', '"lr": 1'))
    result = verdict(path)
    expected = "lr is 1.116e-07 after 2,293,760 samples: it must be 1.162e-08 to 1.167e-08 (and 28 more)"
    assert result.failures["train_loss"] == expected
    assert not result.passed
    path.write_text(text.replace('"lr": ', '"rate": '))
    assert verdict(path).unchecked[0] == "learning rate: the log states no rates"


def test_layers_and_history_length_are_checked_in_the_config_beside_the_log(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write()
    assert verdict(path).unchecked == [
        "model.hstu.layers, data.history.length: there is no config.json of recperf beside the log"
    ]
    config = {"model": {"hstu": {"layers": 3}}, "data": {"history": {"length": 4086}}}
    for layers, length, broken in ((3, 4086, []), (5, 100, ["model.hstu.layers", "data.history.length"])):
        config["model"]["hstu"]["layers"], config["data"]["history"]["length"] = layers, length
        saved = {"schema": CONFIG_SCHEMA, "workload": "dlrm-v4", "config": config}
        (path.parent / "config.json").write_text(json.dumps(saved))
        result = verdict(path)
        assert list(result.failures) == broken
        assert (result.passed, result.unchecked) == (not broken, [])
    (path.parent / "config.json").write_text('{"schema"')
    (damaged,) = verdict(path).unchecked
    assert damaged.startswith("model.hstu.layers, data.history.length: ")
    assert "there is no" not in damaged
    assert "config.json" in damaged
