from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recperf.config import from_json, to_json
from recperf.errors import ConfigError, RecperfError
from recperf.workloads import WORKLOADS, find
from recperf.workloads.micro_dlrm.config import MicroDLRMConfig, default


@pytest.mark.parametrize("workload", [find(name) for name in WORKLOADS], ids=list(WORKLOADS))
def test_every_preset_survives_json(workload) -> None:
    for preset in workload.presets.values():
        config = preset()
        assert from_json(workload.config, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.batch_size", "many", "train.batch_size is 'many'; allowed: an integer"),
        ("train.batch_size", True, "train.batch_size is true"),
        ("train.batch_size", 2.5, "train.batch_size is 2.5"),
        ("train.batch_size", 0, "allowed: 1 to"),
        ("train.threads", 100_000, "allowed: 0 to 256"),
        ("train.learning_rate", float("inf"), "at most 1e6"),
        ("train.learning_rate", 10**400, "a number of many digits"),
        ("train.epochs", 10**400, "train.epochs"),
        ("model.dim", 10**12, "allowed: 1 to 65,536"),
        ("train.batchsize", 3, "did you mean 'batch_size'"),
        ("data.split", "newest", "allowed: time, leave-one-out, random, last, cold"),
        ("data.path", 3, "data.path is 3"),
        ("model.rows", 5, "model.rows is 5; allowed: an array"),
        ("model.rows", [1, "x", 2], "model.rows.1 is 'x'"),
        ("target.auc", 1.5, "between 0 and 1"),
        ("train", 3, "train is 3; allowed: an object"),
    ],
)
def test_a_bad_value_names_its_field(path: str, value: object, message: str) -> None:
    values = to_json(default())
    *parents, last = path.split(".")
    place = values
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(ConfigError, match=message):
        from_json(MicroDLRMConfig, values)


def test_missing_fields_take_defaults_and_required_ones_are_named() -> None:
    assert from_json(MicroDLRMConfig, {}) == default()
    with pytest.raises(ConfigError, match="lacks features"):
        from_json(MicroDLRMConfig, {"model": {"rows": [1], "dim": 1, "bottom": [1, 1], "top": [1]}})


def test_an_error_says_what_where_and_what_to_do() -> None:
    error = RecperfError("it broke", where={"file": Path("x")}, fix="mend it")
    assert error.lines() == ["error: it broke", "  file: x", "  try:  mend it"]
    assert error.as_json()["error"]["try"] == "mend it"


@pytest.mark.long
def test_workloads_can_be_imported_where_only_torch_is_installed() -> None:
    """A GPU image may have none of the packages of the command line."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('tyro', 'jinja2', 'pyarrow', 'duckdb', 'safetensors'))\n"
        "import recperf.workloads.dlrm.build, recperf.workloads.dlrm_v4.build, recperf.execution.training"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
