"""A workload, a device and a network with round figures: what a plan says of them can be worked out by hand."""

from __future__ import annotations

from typing import Any

from recperf.measure import spans
from recperf.measure.cost import Cost
from recperf.planning.devices import Attention, Device, Efficiency, KnownRates, Network
from recperf.planning.work import PlannedWorkload, Shapes, Table, Work

spans.declare("forward", "attention")

PLAIN = Device(
    name="plain",
    memory_bytes=1 << 36,
    bytes_per_s=1e12,
    flops=KnownRates(float32=1e12),
    link_bytes_per_s=1e10,
    gemm=KnownRates(float32=1e12),
    copy_bytes_per_s=1e12,
    attention=Attention(lengths=(1,), forward=(1e12,), backward=(1e12,)),
    call_s=0.0,
    efficiency=Efficiency(products=1.0, bytes=1.0, link=1.0, origin="all of it"),
)
WIRES = Network(bytes_per_s=1e9, latency_s=1e-3, link_latency_s=1e-4, ranks_per_node=4)


def table(name: str = "t", rows: int = 800, dim: int = 4, **fields: Any) -> Table:
    """A sample has two ids, of which one is new in its batch."""
    values: dict[str, Any] = {"ids": 2.0, "vectors": 2.0, "distinct": lambda samples: min(800.0, samples), **fields}
    return Table(name=name, rows=rows, dim=dim, **values)


def work(**fields: Any) -> Work:
    """Of one sample: 1 and 2 ms of products forward and backward, as much of passes over memory, and 5 ms an update."""
    values: dict[str, Any] = {
        "tables": (table(),),
        "dense_parameters": 1_000_000,
        "dense_states": 2,
        "precision": "float32",
        "parts": lambda samples: {
            "forward": Cost(samples * 10**9, samples * 10**9),
            "backward": Cost(samples * 2 * 10**9, samples * 2 * 10**9),
            "dense_update": Cost(0, 5 * 10**9),
        },
        "calls": 0,
        "shapes": Shapes(rows_per_sample=1.0, inputs=2, outputs=3),
        "activations": lambda samples: 1000 * samples,
        "input_bytes": lambda samples: 10**6 * samples,
        **fields,
    }
    return Work(**values)


def workload(batch_size: int = 8, counted: Work | None = None, **fields: Any) -> PlannedWorkload:
    one = work() if counted is None else counted
    return PlannedWorkload(batch_size=batch_size, count=lambda history, distinct: one, **fields)
