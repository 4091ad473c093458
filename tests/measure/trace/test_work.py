from __future__ import annotations

import pytest

from recperf.measure.trace.read import TracedShapes
from recperf.measure.trace.work import flops, random_rows, work_of

FLOAT, LONG = "float", "long int"


def shapes(*dims: tuple[int, ...], types: tuple[str, ...] = (), **more: object) -> TracedShapes:
    return TracedShapes(dims, types or (FLOAT,) * len(dims), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "sizes", "work"),
    [
        ("addmm", shapes((16,), (64, 32), (32, 16)), 2 * 64 * 32 * 16),
        ("bmm", shapes((4, 8, 16), (4, 16, 32)), 2 * 4 * 8 * 16 * 32),
        # 3x3, stride 2, padding 1: 16x16 becomes 8x8.
        ("convolution", shapes((2, 3, 16, 16), (5, 3, 3, 3), (5,), numbers=((), (), (), (2, 2), (1, 1), (1, 1))),
         2 * 2 * 5 * 8 * 8 * 27),
        ("_scaled_dot_product_flash_attention_for_cpu", shapes(*[(2, 4, 10, 8)] * 3), 2 * 2 * 4 * 10 * 10 * 16),
        ("_scaled_dot_product_flash_attention_backward", shapes(*[(2, 4, 10, 8)] * 4), 5 * 2 * 4 * 10 * 10 * 16),
        ("mkldnn_rnn_layer", shapes((7, 3, 8), (32, 8), (32, 8)), 2 * 7 * 3 * 2 * 32 * 8),
        ("add", shapes((8,), (8,)), None),
        ("mm", shapes((10**17, 10**17), (10**17, 10**17)), None),
    ],
)  # fmt: skip
def test_flops(name: str, sizes: TracedShapes, work: int | None) -> None:
    assert flops(f"aten::{name}", sizes) == work


@pytest.mark.parametrize(
    ("name", "sizes", "work"),
    [
        ("addcdiv_", shapes((100,), (100,), (100,)), 4 * 400),
        ("fill_", shapes((100,), ()), 400),
        ("copy_", shapes((100,), (100,), types=("double", FLOAT)), 1200),
        ("_foreach_lerp_", shapes((), (), lists=(((10, 4), (5,)), ((10, 4), (5,)))), 4 * (45 + 45 + 45)),
        # Parameters, gradients and two moments are read; all but the gradients are written.
        ("_fused_adam_", shapes((), lists=(((50,),), ((50,),), ((50,),), ((50,),))), 4 * 7 * 50),
        ("cat", shapes((), lists=(((3, 4), (5, 4)),)), 2 * 4 * 32),
        ("_softmax", shapes((10, 10)), 800),
        ("sum", shapes((10, 10)), 400),
        ("sort", shapes((100,)), 400 + 1200),
        ("mm", shapes((64, 32), (32, 16), types=("c10::BFloat16",) * 2), 2 * (64 * 32 + 32 * 16 + 64 * 16)),
        ("embedding", shapes((1000, 8), (4, 5), types=(FLOAT, LONG)), 20 * 32 + 20 * 8 + 20 * 32),
        ("_unknown", shapes((8,)), None),
    ],
)
def test_bytes(name: str, sizes: TracedShapes, work: int | None) -> None:
    counted = work_of(f"aten::{name}", sizes)
    assert (counted and counted.bytes) == work


@pytest.mark.parametrize(
    ("name", "sizes", "rows"),
    [
        ("embedding", shapes((1000, 8), (4, 5), types=(FLOAT, LONG)), (20, 32, 1000)),
        ("embedding_dense_backward", shapes((20, 8), (20,), types=(FLOAT, LONG), numbers=((), (), (1000,))),
         (20, 32, 1000)),
        ("index_select", shapes((1000, 8), (), (20,), types=(FLOAT, "Scalar", LONG), numbers=((), (0,))),
         (20, 32, 1000)),
        ("gather", shapes((50, 8), (), (50, 2), types=(FLOAT, "Scalar", LONG)), (100, 4, 400)),
        ("index", shapes((1000, 8), (), types=(FLOAT, "TensorList"), lists=(((20,),),)), (20, 32, 1000)),
        ("add", shapes((8,), (8,)), None),
    ],
)  # fmt: skip
def test_random_rows(name: str, sizes: TracedShapes, rows: tuple[int, int, int] | None) -> None:
    assert random_rows(f"aten::{name}", sizes) == rows
