"""The attention kernels compiled for a GPU against the reference in float64: long rows, views, widths and dtypes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import attention_limit
from torch import Tensor
from torch.testing import assert_close

from recperf.ops.hstu_attention import Mask, RelativeBias, choose, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

LENGTHS = {
    "odd": [0, 1, 63, 64, 65, 127, 128, 129, 517, 1000, 0, 2],
    "one long": [16_384],
    "mixed": [4096, 3, 2663, 900, 0, 2048],
}
NAMES = ("out", "dq", "dk", "dv", "dpositions", "dbuckets")


@pytest.fixture(params=["of this chip", "of every GPU"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that are chosen, and those in Triton, which other GPUs use."""
    body, _ = choose("auto", torch.device("cuda"))
    if request.param == "of every GPU":
        monkeypatch.setattr(body, "_hopper", lambda device: None)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this chip has none of its own")


def make(
    lengths: list[int], dtype: torch.dtype, *, heads: int = 2, qk: int = 128, width: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Mask]:  # fmt: skip
    """Gradient, and q, k and v as views of one buffer with NaN behind the last token."""
    draw = torch.Generator("cuda").manual_seed(len(lengths) + qk + width)
    tokens, longest = sum(lengths), max(lengths)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    sizes = [heads * width, heads * width, heads * qk, heads * qk]
    buffer = torch.randn(tokens + 300, sum(sizes), device="cuda", generator=draw)
    buffer[tokens:] = torch.nan
    _, v, q, k = buffer.to(dtype)[:tokens].split(sizes, 1)
    grad = torch.randn(tokens, heads, width, device="cuda", generator=draw).to(dtype)
    mask = Mask(qk**-0.5, longest, longest)
    return grad, q.unflatten(1, (heads, qk)), k.unflatten(1, (heads, qk)), v.unflatten(1, (heads, width)), offsets, mask


def exact(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, mask: Mask) -> list[Tensor]:
    wide = [given.double() for given in (q, k, v)]
    return [
        reference.forward(*wide, offsets, mask),
        *reference.backward(grad.double(), *wide, offsets, mask),
    ]


def hold(dtype: torch.dtype, got: Any, right: list[Tensor]) -> None:
    for what, mine, true in zip(NAMES, got, right):
        assert mine.dtype == (torch.float32 if what in NAMES[4:] else dtype)
        assert not mine.isnan().any(), what
        off = float((mine.double() - true).norm() / true.norm())
        assert off <= attention_limit("triton", dtype), f"{what} is off by {off:.1e}"


def check(dtype: torch.dtype, *case: Any) -> None:
    grad, q, k, v, offsets, mask = case
    body, _ = choose("auto", q.device)
    assert body.__name__.endswith("triton")
    right = exact(*case)
    out = body.forward(q, k, v, offsets, mask)
    hold(dtype, (out, *body.backward(grad, q, k, v, offsets, mask, deterministic=False)), right)
    once = body.backward(grad, q, k, v, offsets, mask, deterministic=True)
    hold(dtype, (out, *once), right)
    sums = tuple(torch.empty(one.shape[1:], device=one.device) for one in (q, k, v))
    again = body.backward(grad, q, k, v, offsets, mask, deterministic=True, sums=sums)
    assert all(map(torch.equal, once, again))
    for total, gradient in zip(sums, once):
        assert_close(total, gradient.double().sum(0).float(), rtol=1e-4, atol=1e-4 * float(gradient.abs().sum(0).max()))


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize(("lengths", "width"), [*((one, 128) for one in LENGTHS), ("mixed", 64), ("mixed", 256)])
def test_long_rows(lengths: str, width: int) -> None:
    check(torch.bfloat16, *make(LENGTHS[lengths], torch.bfloat16, qk=width, width=width))


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize(("qk", "width"), [(128, 128), (64, 64), (256, 256), (16, 256), (256, 48), (8, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype_and_width(dtype: torch.dtype, qk: int, width: int) -> None:
    check(dtype, *make(LENGTHS["odd"], dtype, qk=qk, width=width))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("times", [True, False], ids=["times", "positions alone"])
@pytest.mark.parametrize(
    ("dtype", "heads", "width"),
    [
        (torch.float32, 2, 25),
        (torch.bfloat16, 2, 25),
        (torch.float16, 3, 48),
        (torch.bfloat16, 8, 64),
        (torch.float32, 1, 16),
    ],
    ids=str,
)
def test_a_relative_bias(dtype: torch.dtype, heads: int, width: int, times: bool) -> None:
    lengths = [200, 0, 1, 63, 64, 65, 199, 128, *range(100, 180)]
    grad, q, k, v, offsets, mask = make(lengths, dtype, heads=heads, qk=width, width=width)
    draw = torch.Generator("cuda").manual_seed(width)
    positions_P = torch.randn(211, device="cuda", generator=draw)
    bias = RelativeBias(positions_P)
    if times:
        steps = torch.rand(len(q), device="cuda", generator=draw).mul(15).exp().long()
        key_times_T = 1_700_000_000 + steps.cumsum(0)
        bias = RelativeBias(positions_P, torch.randn(128, device="cuda"), key_times_T, key_times_T.roll(-1))
    wide = [one.double() for one in (q, k, v)]
    exact_bias = replace(
        bias,
        positions_P=positions_P.double(),
        buckets_K=bias.buckets_K.double() if bias.buckets_K is not None else None,
    )
    right = [
        reference.forward(*wide, offsets, mask, exact_bias),
        *reference.backward_biased(grad.double(), *wide, offsets, mask, exact_bias),
    ]
    body, _ = choose("auto", q.device)
    once = body.backward_biased(grad, q, k, v, offsets, mask, bias)
    count = 6 if times else 5
    hold(dtype, (body.forward(q, k, v, offsets, mask, bias), *once)[:count], right)
    again = body.backward_biased(grad, q, k, v, offsets, mask, bias)
    assert all(map(torch.equal, once[: count - 1], again))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_last_token_alone(dtype: torch.dtype) -> None:
    lengths = [length for rows in LENGTHS.values() for length in rows if length]
    grad, q, k, v, offsets, mask = make(lengths, dtype)
    body, _ = choose("auto", q.device)
    last = offsets[1:] - 1
    wide = (q[last].double(), k.double(), v.double())
    right = [
        reference.forward_last(*wide, offsets, mask),
        *reference.backward_last(grad[last].double(), *wide, offsets, mask),
    ]
    out = body.forward_last(q[last], k, v, offsets, mask)
    once = body.backward_last(grad[last], q[last], k, v, offsets, mask)
    hold(dtype, (out, *once), right)
    assert torch.equal(out, body.forward_last(q[last], k, v, offsets, mask))
    assert all(map(torch.equal, once, body.backward_last(grad[last], q[last], k, v, offsets, mask)))


def test_graphs_and_streams_do_not_disturb_each_other() -> None:
    """Programs of a forward pass take their work from a counter in memory; every stream and graph has its own."""
    grad, q, k, v, offsets, mask = make(LENGTHS["mixed"], torch.bfloat16)
    body, _ = choose("auto", q.device)

    def both() -> list[Tensor]:
        return [body.forward(q, k, v, offsets, mask), *body.backward(grad, q, k, v, offsets, mask, deterministic=True)]

    right = both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    results = []
    for _ in range(3):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(both())
    torch.cuda.synchronize()
    for got in (captured, *results):
        assert all(map(torch.equal, got, right))


def test_a_thread_may_begin_with_attention() -> None:
    """As one of autograd's does, when nothing else of a backward pass came before."""
    grad, *inputs = make([128, 77, 3], torch.bfloat16)
    body, _ = choose("auto", torch.device("cuda"))
    before = body.backward(grad, *inputs)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        after = thread.submit(body.backward, grad, *inputs).result()
    torch.cuda.synchronize()
    assert all(map(torch.equal, before, after))


def test_places_beyond_32_bits_are_reached() -> None:
    """A buffer of more than 2**31 numbers, its last row asked for: 4.3 GB."""
    tokens, wide = 33_000, 65_536
    buffer = torch.zeros(tokens, wide, device="cuda", dtype=torch.bfloat16)
    assert buffer.numel() > 1 << 31
    grad, q, k, v, _, mask = make([200], torch.bfloat16, heads=1)
    parts = [buffer[:, at : at + 128].unflatten(1, (1, 128)) for at in (0, 128, 256)]
    for part, given in zip(parts, (q, k, v)):
        part[-200:] = given
    offsets = torch.tensor([0, 200], device="cuda")
    far = torch.tensor([tokens - 200, tokens], device="cuda")
    body, _ = choose("auto", q.device)
    assert torch.equal(body.forward(*parts, far, mask)[-200:], body.forward(q, k, v, offsets, mask))
    wide_grad = torch.zeros(tokens, 1, 128, device="cuda", dtype=torch.bfloat16)
    wide_grad[-200:] = grad
    ours = body.backward(wide_grad, *parts, far, mask, deterministic=True)
    for mine, near in zip(ours, body.backward(grad, q, k, v, offsets, mask, deterministic=True)):
        assert torch.equal(mine[-200:], near)
