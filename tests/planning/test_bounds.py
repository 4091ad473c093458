"""Every figure that a plan is asked for has a range: its ends are accepted, what lies beyond is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from toy_plan import PLAIN, WIRES, table, work, workload

from recperf.errors import ConfigError
from recperf.planning import skew, target
from recperf.planning.devices import Attention, Efficiency, KnownRates
from recperf.planning.link import Link
from recperf.planning.predict import predict
from recperf.planning.sharding import Parallelism
from recperf.planning.summary import Question, Setting, plan

Use = Callable[[float], object]


def attention(**fields: object) -> Attention:
    return Attention(**{"lengths": (1,), "forward": (1e12,), "backward": (1e12,), **fields})  # type: ignore[arg-type]


def link(**fields: float) -> Link:
    return Link(**{"backend": "gloo", "latency_s": 0.0, "bytes_per_s": 1e9, "late": 0.0, **fields})  # type: ignore[arg-type]


def planned(hours: float) -> object:
    return plan(
        Setting(
            workload=workload(), device=PLAIN, network=WIRES, parallelism=Parallelism(),
            question=Question(mtbf_hours=hours), skew=lambda batch, ranks: None,
        ),
        [1],
    )  # fmt: skip


BOUNDS: dict[str, tuple[float, float, Use]] = {
    "efficiency.products": (1e-300, 1.0, lambda value: Efficiency(products=value)),
    "efficiency.bytes": (1e-300, 1.0, lambda value: Efficiency(bytes=value)),
    "efficiency.link": (1e-300, 1.0, lambda value: Efficiency(link=value)),
    "attention.lengths": (1, 1 << 40, lambda value: attention(lengths=(value,))),
    "attention.forward": (1e3, 1e18, lambda value: attention(forward=(value,))),
    "attention.backward": (1e3, 1e18, lambda value: attention(backward=(value,))),
    "device.flops.float32": (1e6, 1e18, lambda value: KnownRates(float32=value)),
    "device.flops.bfloat16": (1e6, 1e18, lambda value: KnownRates(float32=1e12, bfloat16=value)),
    "device.memory_bytes": (1 << 20, 1 << 50, lambda value: replace(PLAIN, memory_bytes=value)),  # type: ignore[arg-type]
    "device.bytes_per_s": (1e6, 1e16, lambda value: replace(PLAIN, bytes_per_s=value)),
    "device.link_bytes_per_s": (1e6, 1e16, lambda value: replace(PLAIN, link_bytes_per_s=value)),
    "device.host_bytes_per_s": (1e6, 1e16, lambda value: replace(PLAIN, host_bytes_per_s=value)),
    "device.copy_bytes_per_s": (1e6, 1e16, lambda value: replace(PLAIN, copy_bytes_per_s=value)),
    "device.call_s": (0.0, 60.0, lambda value: replace(PLAIN, call_s=value)),
    "device.kernel_s": (0.0, 60.0, lambda value: replace(PLAIN, kernel_s=value)),
    "device.threads": (1, 1 << 32, lambda value: replace(PLAIN, threads=value)),  # type: ignore[arg-type]
    "device.late": (0.0, 10.0, lambda value: replace(PLAIN, late=value)),
    "network.bytes_per_s": (1e3, 1e16, lambda value: replace(WIRES, bytes_per_s=value)),
    "network.latency_s": (0.0, 60.0, lambda value: replace(WIRES, latency_s=value)),
    "network.link_latency_s": (0.0, 60.0, lambda value: replace(WIRES, link_latency_s=value)),
    "network.ranks_per_node": (1, 1 << 16, lambda value: replace(WIRES, ranks_per_node=value)),  # type: ignore[arg-type]
    "link.latency_s": (0.0, 60.0, lambda value: link(latency_s=value)),
    "link.bytes_per_s": (1e3, 1e16, lambda value: link(bytes_per_s=value)),
    "link.late": (0.0, 10.0, lambda value: link(late=value)),
    "rank batch": (1, 1 << 24, lambda value: Parallelism(rank_batch=value)),  # type: ignore[arg-type]
    "skew exponent": (0.0, 20.0, lambda value: skew.zipf(work(), 1, 1, value)),
    "samples to target": (1.0, 1e18, lambda value: target.samples_to_target({}, 1, value)),
    "mtbf": (1e-3, 1e12, lambda value: target.failures(value, 1.0, 1.0)),
    "checkpoint seconds": (0.0, 1e9, lambda value: target.failures(1.0, value, 1.0)),
    "restart seconds": (0.0, 1e9, lambda value: target.failures(1.0, 1.0, value)),
    "mtbf hours": (1e-6, 277_777_777.0, planned),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_range_ends_where_it_says(name: str) -> None:
    low, high, use = BOUNDS[name]
    use(low)
    use(high)
    whole = isinstance(low, int)
    less, more = (low - 1, high + 1) if whole else (math.nextafter(low, -1), math.nextafter(high, math.inf))
    for outside in (less if low != 1e-300 else 0.0, more) if name != "mtbf hours" else (less, 1.1e9):
        with pytest.raises(ConfigError) as caught:
            use(outside)
        assert caught.value.where["field"] == name


def test_ranks_have_rows_and_samples() -> None:
    """As many ranks as samples at most, and not more than a million."""
    one = workload(batch_size=3, counted=work(tables=(table(rows=8),)))
    assert predict(one, 3, PLAIN, WIRES).rank_batch == 1
    for ranks, field in ((4, "global batch"), (0, "ranks"), ((1 << 20) + 1, "ranks")):
        with pytest.raises(ConfigError) as caught:
            predict(one, ranks, PLAIN, WIRES)
        assert caught.value.where["field"] == field
