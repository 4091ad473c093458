"""TorchRec missing, broken or working."""

from __future__ import annotations

from typing import Any

import pytest
from rank_pool import needs_torchrec

from recperf.cli import doctor
from recperf.distributed import library
from recperf.errors import MachineError


def test_a_missing_torchrec_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(library.importlib, "import_module", missing)
    with pytest.raises(MachineError, match="No module named 'fbgemm_gpu'") as caught:
        library.require_torchrec()
    assert "make setup-distributed" in str(caught.value.fix)


@needs_torchrec
def test_doctor_runs_an_fbgemm_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.distributed().state == doctor.OK
    import torch

    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", lambda lengths: lengths)
    with pytest.raises(MachineError, match="wrong numbers"):
        doctor.distributed()
