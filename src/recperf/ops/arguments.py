"""The one entry to C: a tensor or array becomes an address only here, after its type, device, layout and shape fit.

C trusts the addresses it receives: a wrong type or shape would be read as garbage or past its end. Ids are checked
inside the C loops, which return the place of the first id outside its table, and inside the kernels, which skip
an id outside its table and leave it in a flag. Reading the flag waits for the device, so no op reads it: the training
loop calls `raise_if_any` when it reads losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

ANY = -1
"""In an allowed shape: any size."""


def address(name: str, array: Any, dtype: Any, shape: tuple[int, ...], *, strided: bool = False) -> int:
    """The address of a tensor in CPU memory or of a numpy array; with `strided` only the last dimension is dense."""
    if isinstance(array, Tensor):
        dense = array.is_contiguous() or (strided and array.stride(-1) == 1)
        # Comparing whole shapes first keeps the cost of a check below a microsecond.
        if dense and array.is_cpu and array.dtype is dtype and (array.shape == shape or _fits(array.shape, shape)):
            return array.data_ptr()
        raise _mismatch(name, array, dense, array.device, dtype, shape, "cpu")
    if not array.flags.c_contiguous or array.dtype != dtype or not (array.shape == shape or _fits(array.shape, shape)):
        raise _mismatch(name, array, array.flags.c_contiguous, "cpu", dtype, shape, "cpu")
    return int(array.ctypes.data)


def require_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> None:
    """Fail unless a kernel can read the tensor: of this type and shape, contiguous, on the device."""
    dense = tensor.is_contiguous()
    if not dense or tensor.device != device or tensor.dtype != dtype or not _fits(tensor.shape, shape):
        raise _mismatch(name, tensor, dense, tensor.device, dtype, shape, device)


def require_offsets(name: str, offsets: Sequence[int], end: int) -> None:
    """Fail unless the offsets start at 0, never decrease and end at the number of things they divide."""
    if not offsets or offsets[0] != 0 or offsets[-1] != end or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ArgumentError(f"{name} is not a list of offsets: it must start at 0, never decrease and end at {end}")


def unknown_id(name: str, place: int, value: int, rows: int) -> ArgumentError:
    return ArgumentError(f"{name}[{place}] is {value}; allowed: 0 to {rows - 1}, the rows of its table")


def widened(tensor: Tensor) -> Tensor:
    """Half precision as float32; other types stay, for `address` to accept or refuse."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _fits(shape: Sequence[int], allowed: Sequence[int]) -> bool:
    return len(shape) == len(allowed) and all(want in (size, ANY) for size, want in zip(shape, allowed))


def _mismatch(
    name: str, array: Any, dense: bool, place: Any, dtype: Any, shape: Sequence[int], device: Any
) -> ArgumentError:
    layout = "" if dense else "non-contiguous "
    return ArgumentError(
        f"{name} is {layout}{_described(array.dtype, array.shape)} on {place}; "
        f"it must be contiguous {_described(dtype, shape)} on {device}"
    )


def _described(dtype: Any, shape: Sequence[int]) -> str:
    name = getattr(dtype, "__name__", str(dtype)).removeprefix("torch.").rstrip("_")
    sizes = ", ".join("any" if size == ANY else str(size) for size in shape)
    return f"{name} of shape ({sizes})"


_flags: dict[torch.device, Tensor] = {}


def flag(device: torch.device) -> Tensor:
    """Where kernels on the device leave an id outside its table, and the rows of that table."""
    if device not in _flags:
        # The warm-up steps before a CUDA graph is captured make it, so that a graph only holds its address.
        _flags[device] = torch.zeros(2, dtype=torch.int64, device=device)
    return _flags[device]


def raise_if_any(device: torch.device) -> None:
    """Fail if a kernel on the device has met an id outside its table since the last call. Waits for the device."""
    if device not in _flags:
        return
    value, rows = _flags[device].tolist()
    if rows:
        _flags[device].zero_()
        raise ArgumentError(
            f"an id of a batch on {device} is {value}; allowed: 0 to {rows - 1}, the rows of its table",
            fix="check the data; steps since the last check ignored this id",
        )
