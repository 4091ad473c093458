"""TorchRec, an optional dependency: if it is missing or broken, the error says how to install it."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import MachineError
from ..stop import poll

FIX = (
    "pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 (for GPUs fbgemm-gpu==1.8.0), then pip install "
    "tensordict pyre-extensions iopath tqdm"
)
MODULES = ("fbgemm_gpu", "torchrec")


def require_torchrec() -> None:
    """Import TorchRec without its warnings; whether its operators work is checked by `jagged_op`."""
    # It logs plans and topologies, which recperf prints as a table.
    for name in ("torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch  # noqa: F401

    for name in MODULES:
        # Each import takes seconds.
        poll()
        try:
            with warnings.catch_warnings(action="ignore"), _no_log():
                importlib.import_module(name)
        except ImportError as error:
            raise MachineError(f"several ranks need TorchRec: {error}", fix=FIX) from None
        except OSError as error:
            # A build for another torch installs, and fails when its library is loaded.
            first = str(error).splitlines()[0]
            raise MachineError(f"{name} is installed but does not load: {first}", fix=FIX) from None


@contextmanager
def _no_log() -> Iterator[None]:
    """fbgemm warns a dozen times that its own list of versions lacks its own."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def jagged_op() -> str:
    """Run fbgemm operators on the CPU and on the GPU, if there is one, and return what ran. A build for another torch
    installs cleanly and fails here; one for CPUs has no operator for a GPU."""
    require_torchrec()
    import torch
    import torchrec

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        lengths, ids = torch.tensor([2, 0, 1], device=device), torch.tensor([5, 9, 1], device=device)
        order = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        try:
            sums: Any = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)
            moved: Any = torch.ops.fbgemm.permute_1D_sparse_data(order, lengths, ids)
            results = sums.tolist(), moved[1].tolist()
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            first = str(error).splitlines()[0]
            raise MachineError(f"fbgemm is installed but its operators fail on {device}: {first}", fix=FIX) from None
        if results != ([0, 2, 2, 3], [1, 5, 9]):
            raise MachineError(f"a jagged operator of fbgemm computes wrong numbers on {device}", fix=FIX)
    return f"torchrec {torchrec.__version__}, jagged operators of fbgemm ran on {' and '.join(devices)}"
