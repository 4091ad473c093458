from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recperf import places
from recperf.config import from_json, to_json
from recperf.data.criteo.config import KEYS, CriteoConfig
from recperf.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [{"rows": (1,)}, {"rows": (9, 9)}, {"rows": (1 << 31,)}, {"holdout": 0.0}, {"holdout": 1.0}, {"hash_seed": -1}],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"criteo.{next(iter(wrong))}"):
        CriteoConfig(**wrong)


def test_one_number_serves_all_tables() -> None:
    assert CriteoConfig(rows=(5,)).table_rows == (5,) * 26
    assert CriteoConfig(rows=tuple(range(2, 28))).table_rows == tuple(range(2, 28))
    assert KEYS[0] == "c1"
    assert KEYS[-1] == "c26"


def test_to_json_and_back() -> None:
    config = CriteoConfig(path=Path("a"), rows=tuple(range(2, 28)), on_error="skip")
    assert from_json(CriteoConfig, to_json(config)) == config


def test_arrays_go_to_the_cache_folder() -> None:
    assert CriteoConfig().cache_folder == places.home() / "criteo"


def test_config_and_source_need_no_torch() -> None:
    code = "import sys, recperf.data.criteo.config, recperf.data.criteo.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
