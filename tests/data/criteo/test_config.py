from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from recperf.data.criteo.config import CriteoConfig
from recperf.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [{"rows": (1,)}, {"rows": (9, 9)}, {"rows": (1 << 31,)}, {"holdout": 0.0}, {"holdout": 1.0}, {"hash_seed": -1}],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"criteo.{next(iter(wrong))}"):
        CriteoConfig(**wrong)


def test_config_and_source_need_no_torch() -> None:
    code = "import sys, recperf.data.criteo.config, recperf.data.criteo.source; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
