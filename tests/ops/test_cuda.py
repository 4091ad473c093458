"""Kernels are started from C: what reaches the driver, shown by a library that takes the driver's place."""

from __future__ import annotations

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recperf.errors import MachineError
from recperf.ops import compile, cuda

DRIVER = """
#include <stdint.h>
#include <string.h>
static __thread void *context;
static __thread int sequence;
__thread int retained, zeroed, launched;
__thread uint64_t seen[16];
int cuCtxGetCurrent(void **current) { *current = context; return 0; }
int cuCtxSetCurrent(void *current) { context = current; return 0; }
int cuDeviceGet(int *handle, int device) { *handle = device + 70; return 0; }
int cuDevicePrimaryCtxRetain(void **current, int handle) { *current = &context; retained = handle; return 0; }
int cuMemsetD32Async(uint64_t address, unsigned value, uint64_t words, void *stream) {
  seen[8] = address; seen[9] = words; zeroed = ++sequence; return value || stream != (void *)5;
}
int cuTensorMapEncodeTiled(uint64_t *map, int kind, uint32_t dimensions, void *address, const uint64_t *sizes,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int a, int b,
                           int c, int d) {
  if (!context || (uint64_t)map % 64 || dimensions != 2 || !address) return 201;
  uint64_t words[8] = {kind, (uint64_t)address, sizes[0], sizes[1], strides[0], box[0], box[1], b * 10 + c};
  memcpy(map, words, sizeof words);
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  memcpy(seen, arguments[1], 64);
  seen[10] = *(uint32_t *)arguments[0]; seen[11] = *(uint64_t *)arguments[2]; seen[12] = x; seen[13] = threads;
  seen[14] = shared; memcpy(&seen[15], arguments[3], 4); launched = ++sequence;
  return function != (void *)9 || stream != (void *)5;
}
int cuGetErrorString(int code, const char **text) { *text = code == 201 ? "no context" : "other"; return 0; }
uint64_t look(int place) { return seen[place]; }
int order(void) { return retained * 100 + zeroed * 10 + launched; }
"""


def test_arguments_reach_the_driver_from_a_thread_without_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "home", lambda: tmp_path)
    source = tmp_path / "driver" / "driver.c"
    source.parent.mkdir()
    source.write_text(DRIVER)
    driver = compile.load(source, {"look": [ctypes.c_int], "order": []}, {"look": ctypes.c_uint64})
    if isinstance(driver, str):
        pytest.skip(driver)
    driver = ctypes.CDLL(driver._name, mode=ctypes.RTLD_GLOBAL)
    driver.look.restype = ctypes.c_uint64
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    launch = cuda._launch.__wrapped__()
    kernel = cuda.Kernel(torch.device("cuda", 1), launch, 9, cuda.Entry("iMZf", 384, 4096))
    matrix = 640, 30, 256, 1024, 9, 64

    def start() -> tuple[int, list[int]]:
        kernel.start(3, 7, *matrix, 1 << 40, 12, 1.5)
        return driver.order(), [driver.look(place) for place in range(16)]

    with ThreadPoolExecutor(1) as thread:
        order, seen = thread.submit(start).result()
        assert order == 71 * 100 + 12, "the device's own context, then zeros, then the kernel"
        again, _ = thread.submit(start).result()
        assert again == 71 * 100 + 34
    assert seen[:8] == [9, 640, 256, 30, 1024, 64, 64, 33]
    assert seen[8:15] == [1 << 40, 12, 7, 1 << 40, 3, 384, 4096]
    assert seen[15] & 0xFFFFFFFF == struct.unpack("I", struct.pack("f", 1.5))[0]
    kernel(0, None)  # No programs: nothing to start.
    with pytest.raises(MachineError, match="a CUDA kernel could not be started: no context"):
        kernel.start(3, 7, 0, *matrix[1:], 1 << 40, 12, 1.5)
