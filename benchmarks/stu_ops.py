"""The memory-bound ops of the DLRMv4 model on a GPU, each beside torch's own way in the same run.

LayerNorm and its swish form, what an STU layer's output does before its product (SiLU, norm, gate, concatenation,
dropout), the position and time embedding, tokens put together from all they are made of, and lookups of table rows with
their row-wise Adagrad update. Both sides get the same tensors of the same types, and what a way computes from a batch
before it starts (sorting, places, ages) is inside its clock. Rates are of the bytes an op cannot avoid, its inputs read
and its outputs written once, whatever the way really moves. Activations and norms are bfloat16, tables float32. A share
is of a plain copy's bandwidth in the same run.

Shapes: T tokens, D width of a token, E of the attention, R table rows, N lookups, U different rows among them, B rows.

Run as `python benchmarks/stu_ops.py`. Exits with 5 where torch is faster; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from _clock import Work, readings
from _hstu_peer import jagged_lengths, offsets_of
from _rows import record, row, show
from recperf.ops import assemble, layer_norm, lookup, stu_output
from recperf.ops.assemble import ages_of, row_of_token
from recperf.ops.dropout import Dropout

NAME = "stu_ops"
SAMPLES, SECONDS = 25, 0.01
EPS, RATE = 1e-6, 0.1
GOAL_RATIO = 0.95
"""Times torch's own speed; below, its op should be used."""
CONTEXT = 8
SEED = 11


@dataclass(frozen=True)
class Size:
    rows: int = 256
    mean: int = 2663
    longest: int = 4096
    width: int = 512
    table: int = 4_000_000
    positions: int = 8192
    buckets: int = 2049

    @property
    def tokens(self) -> int:
        return self.rows * self.mean


TINY = Size(rows=4, mean=20, longest=30, width=32, table=100, positions=64, buckets=16)


@dataclass(frozen=True)
class Job:
    """The same work done by us and by torch, and the bytes it cannot avoid."""

    name: str
    bytes: int
    ours: Work
    torch: Work


def ordered(index_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The picks in the order of the rows they pick, and where each row's begin."""
    sorted_N, order_N = index_N.sort(stable=True)
    return order_N, torch.searchsorted(sorted_N, torch.arange(rows + 1, device=index_N.device))


class Maker:
    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self.generator = torch.Generator(device).manual_seed(SEED)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype, generator=self.generator)

    def norms(self) -> list[Job]:
        """Forward, and forward with backward (which reads x and the gradient and writes x's)."""
        tokens, width = self.size.tokens, self.size.width
        x_TD, grad_TD = self.randn(tokens, width).requires_grad_(), self.randn(tokens, width)
        weight, bias = (self.randn(width).requires_grad_() for _ in range(2))
        once = x_TD.nbytes

        def plain(x: Tensor) -> Tensor:
            return F.layer_norm(x, (width,), weight, bias, EPS)

        def plain_swish(x: Tensor) -> Tensor:
            return x * torch.sigmoid(plain(x))

        jobs = []
        for name, ours, theirs in (
            ("layer_norm", layer_norm.layer_norm, plain),
            ("swish_layer_norm", layer_norm.swish_layer_norm, plain_swish),
        ):

            def forward_ours(ours: Any = ours) -> Tensor:
                with torch.no_grad():
                    return ours(x_TD, weight, bias, EPS)  # type: ignore[no-any-return]

            def forward_theirs(theirs: Any = theirs) -> Tensor:
                with torch.no_grad():
                    return theirs(x_TD)  # type: ignore[no-any-return]

            def both_ours(ours: Any = ours) -> object:
                return torch.autograd.grad(ours(x_TD, weight, bias, EPS), (x_TD, weight, bias), grad_TD)

            def both_theirs(theirs: Any = theirs) -> object:
                return torch.autograd.grad(theirs(x_TD), (x_TD, weight, bias), grad_TD)

            jobs.append(Job(f"{name}, forward", 2 * once, forward_ours, forward_theirs))
            jobs.append(Job(f"{name}, forward + backward", 5 * once, both_ours, both_theirs))
        return jobs

    def gather(self) -> list[Job]:
        """Rows of a table far larger than any cache, evenly drawn, and their update from a summed gradient."""
        rows, width = self.size.table, self.size.width
        count = min(rows // 2, self.size.tokens)
        table_RD, state_R = self.randn(rows, width, dtype=torch.float32), torch.zeros(rows, device=self.device)
        rows_N = torch.randint(0, rows, (count,), device=self.device, generator=self.generator)
        rows_U = torch.randperm(rows, device=self.device, generator=self.generator)[:count]
        grad_UD = self.randn(count, width, dtype=torch.float32)

        def update() -> None:
            now_U = state_R.index_select(0, rows_U).add_(grad_UD.square().mean(1))
            state_R.index_copy_(0, rows_U, now_U)
            table_RD.index_add_(0, rows_U, grad_UD / now_U.sqrt().add_(EPS).unsqueeze(1), alpha=-RATE)

        row_bytes = 4 * width
        return [
            Job(
                "lookup, gather",
                count * (2 * row_bytes + 8),
                lambda: lookup.gather(table_RD, rows_N),
                lambda: table_RD.index_select(0, rows_N),
            ),
            Job(
                "lookup, row-wise Adagrad",
                count * (3 * row_bytes + 8 + 2 * 4),
                lambda: lookup.update_rows_(
                    table_RD, state_R, rows_U, grad_UD, rule="rowwise-adagrad", rate=RATE, eps=EPS
                ),
                update,
            ),
        ]

    def gated(self) -> list[Job]:
        """What the output's matrix product is applied to, from attention and gate: 2 E in, 3 E out."""
        tokens, width = self.size.tokens, self.size.width
        attention_TE, u_TE = self.randn(tokens, width), self.randn(tokens, 4 * width)[:, :width]
        weight_E, bias_E = (self.randn(width) for _ in range(2))
        body = stu_output.choose("auto", self.device)[0]
        dropout = Dropout(RATE, SEED)

        def plain() -> Tensor:
            gate_TE = F.silu(u_TE)
            normed_TE = gate_TE * F.layer_norm(attention_TE, (width,), weight_E, bias_E, EPS)
            return F.dropout(torch.cat([gate_TE, attention_TE, normed_TE], 1), RATE)

        def ours() -> Tensor:
            z_T3E: Tensor
            z_T3E, _ = body.gated(attention_TE, u_TE, weight_E, bias_E, EPS, dropout)
            return z_T3E

        return [Job("stu_output, before its product", 5 * attention_TE.nbytes, ours, plain)]

    def tokens(self) -> list[Job]:
        """Tokens from rows that about 40 positions share, actions, positions and ages, with dropout; and back."""
        size = self.size
        lengths_B = jagged_lengths(size.rows, CONTEXT + 1, size.longest, size.mean, SEED)
        offsets_B1, count = offsets_of(lengths_B, self.device), int(lengths_B.sum())
        positions = count - CONTEXT * size.rows
        shared = max(1, positions // 40)

        def drawn(most: int, number: int) -> Tensor:
            return torch.randint(0, most, (number,), device=self.device, generator=self.generator)

        # Which rows are distinct is known to both sides: the rows are given.
        ids, action_S = lookup.unique(drawn(shared, positions)), drawn(9, positions)
        times_T = 25_000_000 - (2e7 * torch.rand(count, device=self.device, generator=self.generator) ** 3).long()
        parts = (
            self.randn(size.rows, CONTEXT, size.width),
            self.randn(ids.starts_U1.numel() - 1, size.width),
            self.randn(9, size.width),
            self.randn(size.positions, size.width, dtype=torch.float32),
            self.randn(size.buckets, size.width, dtype=torch.float32),
        )
        leaves, grad_TD = [part.requires_grad_() for part in parts], self.randn(count, size.width)

        def plain() -> Tensor:
            context, rows, actions, place, age = leaves
            row_T, token_T = row_of_token(offsets_B1, count), torch.arange(count, device=self.device)
            from_start_T = token_T - offsets_B1.index_select(0, row_T)
            from_end_T = offsets_B1[1:].index_select(0, row_T) - 1 - token_T
            place_T = torch.where(from_start_T < CONTEXT, from_start_T, from_end_T + CONTEXT)
            place_T = place_T.clamp_(max=size.positions - 1)
            row_S = row_of_token(offsets_B1 - CONTEXT * torch.arange(size.rows + 1, device=self.device), positions)
            position_at = torch.arange(positions, device=self.device) + CONTEXT * (row_S + 1)
            context_at = (offsets_B1[:-1, None] + torch.arange(CONTEXT, device=self.device)).flatten()
            x_TD = torch.empty(count, size.width, device=self.device, dtype=rows.dtype)
            x_TD = x_TD.index_copy(0, context_at, context.flatten(0, 1))
            picked = rows.index_select(0, ids.inverse_N) + actions.index_select(0, action_S)
            x_TD = x_TD.index_copy(0, position_at, picked) * size.width**0.5
            x_TD = x_TD + place.to(x_TD.dtype).index_select(0, place_T)
            age_T = ages_of(offsets_B1, times_T, size.buckets)
            return F.dropout(x_TD + age.to(x_TD.dtype).index_select(0, age_T), RATE)

        def ours() -> Tensor:
            context, rows, actions, place, age = leaves
            order_S, starts_U1 = ordered(ids.inverse_N, rows.shape[0])
            how = assemble.plan(
                offsets_B1, times_T, ids.inverse_N, order_S, starts_U1, action_S,
                actions=9, ages=size.buckets, context=CONTEXT, longest=size.longest,
            )  # fmt: skip
            dropout = Dropout(RATE, SEED)
            return assemble.assemble(context, rows, actions, place, age, how, scale=size.width**0.5, dropout=dropout)

        def forward(make: Callable[[], Tensor]) -> Tensor:
            with torch.no_grad():
                return make()

        def both(make: Callable[[], Tensor]) -> object:
            return torch.autograd.grad(make(), leaves, grad_TD)

        moved = grad_TD.nbytes + sum(part.nbytes for part in parts) + 4 * (count + 2 * positions)
        back = moved + grad_TD.nbytes + sum(part.nbytes for part in parts)
        return [
            Job("assemble, forward", moved, lambda: forward(ours), lambda: forward(plain)),
            Job("assemble, forward + backward", back, lambda: both(ours), lambda: both(plain)),
        ]

    def sums(self) -> list[Job]:
        """Gradients of all positions summed by what they were picked from, about 40 picks a row."""
        tokens, width = self.size.tokens, self.size.width
        rows = max(1, tokens // 40)
        grad_ND = self.randn(tokens, width)
        index_N = torch.randint(0, rows, (tokens,), device=self.device, generator=self.generator)

        def plain() -> Tensor:
            return torch.zeros(rows, width, device=self.device).index_add_(0, index_N, grad_ND.float())

        def ours() -> Tensor:
            return lookup.segment_sum(grad_ND, *ordered(index_N, rows))

        return [Job("lookup, sum by row", grad_ND.nbytes + 8 * tokens + 4 * rows * width, ours, plain)]


def copy_speed(size: Size, device: torch.device, samples: int, seconds: float) -> list[float]:
    source = torch.ones(size.tokens * size.width, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    taken = readings({"copy": lambda: target.copy_(source)}, device, samples=samples, seconds=seconds)["copy"]
    return [2 * source.nbytes / one / 1e9 for one in taken]


def measure(size: Size, device: torch.device, samples: int, seconds: float) -> list[dict[str, Any]]:
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "tokens": size.tokens,
        "width": size.width,
        "seed": SEED,
    }
    copies = copy_speed(size, device, samples, seconds)
    made, copy = [row(NAME, "copy", "bandwidth", "GB/s", copies, shared)], statistics.median(copies)
    maker = Maker(size, device)
    for make in (maker.norms, maker.gated, maker.tokens, maker.gather, maker.sums):
        for job in make():
            found = readings({"recperf": job.ours, "torch": job.torch}, device, samples=samples, seconds=seconds)
            for who, taken in found.items():
                speeds = [job.bytes / one / 1e9 for one in taken]
                more = {"who": who, "what": job.name, "bytes": job.bytes, "ms": statistics.median(taken) * 1e3}
                more["share_of_copy"] = statistics.median(speeds) / copy
                made.append(row(NAME, f"{who}, {job.name}", "bandwidth", "GB/s", speeds, shared | more))
            ratios = [theirs / mine for mine, theirs in zip(found["recperf"], found["torch"])]
            made.append(row(NAME, f"recperf / torch, {job.name}", "ratio", "x", ratios, shared | {"what": job.name}))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return made


def goals_missed(entries: list[dict[str, Any]]) -> list[str]:
    """Where torch's own way is clearly faster, ours has no reason to be."""
    return [
        f"{entry['variant']}: {entry['p50']:.2f} times torch's speed, the goal is {GOAL_RATIO:.2f}"
        for entry in entries
        if entry["metric"] == "ratio" and entry["p50"] < GOAL_RATIO
    ]


def main(words: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes on any device; no rows, no goals")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not chosen.tiny:
        print("nothing to measure: torch sees no GPU here")
        return 0
    entries = measure(TINY, device, 3, 0.0) if chosen.tiny else measure(Size(), device, chosen.samples, SECONDS)
    for entry in entries:
        share = entry["conditions"].get("share_of_copy")
        print(show(entry) + (f" = {share:.0%} of copy" if share else ""))
    if chosen.tiny:
        return 0
    if not chosen.no_record:
        print(f"rows appended to {record(entries).name}")
    missed = goals_missed(entries)
    for line in missed:
        print(f"goal missed: {line}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
