"""Training steps of dlrm-v4's laptop model on a CPU: attention by C beside the same step with plain torch's.

Both ways train on the same batches of embedded events, from the same weights, in turn; nothing else differs. A step is
forward, backward and both updates; its batch is prepared before, and how long that takes is a row of its own.
"""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import Any

import torch

from _clock import readings
from _rows import record, row, show
from recperf.data.known import event_files as catalogue
from recperf.data.known.yambda.yambda_like import of_size
from recperf.data.streaming.config import HistoryConfig, WindowConfig
from recperf.data.streaming.history import Histories
from recperf.data.streaming.loader import StreamOrder
from recperf.data.streaming.windows import WindowIndex
from recperf.models.dlrm_v4 import hstu
from recperf.models.dlrm_v4.config import laptop
from recperf.models.dlrm_v4.inputs import Inputs, prepare
from recperf.models.dlrm_v4.model import DLRMv4
from recperf.ops import hstu_attention


def histories(events: int, length: int, batch: int) -> tuple[Histories, StreamOrder]:
    store = catalogue.embedded(say=lambda _: None, config=of_size(events))
    index = WindowIndex.open(store, WindowConfig(min_history=20, seconds=10 * 86_400, shuffle=1.0))
    order = StreamOrder(index, windows=range(index.windows), batch_size=batch, leftover="carry", users="all")
    return Histories(store, HistoryConfig(length=length, scan=400), pin=False), order


class Steps:
    """One model trained with one body of the attention, batch after batch."""

    def __init__(self, batches: list[Inputs], body: ModuleType) -> None:
        self.batches, self.body, self.number = batches, body, 0
        self.model = DLRMv4(laptop(), seed=0).train()
        self.adam = torch.optim.Adam(self.model.dense_parameters(), lr=1e-3, betas=(0.95, 0.999), fused=True)

    def __call__(self) -> None:
        hstu.attention_body = lambda _: self.body  # type: ignore[assignment]
        self.model.set_step(0, self.number)
        self.model.loss(self.batches[self.number % len(self.batches)]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.dense_parameters(), 1.0)
        self.adam.step()
        self.adam.zero_grad()
        self.model.tables.update(0.01)
        self.number += 1


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--events", type=int, default=40_000)
    words.add_argument("--length", type=int, default=36, help="events of a history, at most")
    words.add_argument("--batch", type=int, default=128)
    words.add_argument("--threads", type=int, default=2)
    words.add_argument("--samples", type=int, default=9)
    words.add_argument("--dry", action="store_true", help="print, keep no rows")
    chosen = words.parse_args()
    torch.set_num_threads(chosen.threads)
    gathered, order = histories(chosen.events, chosen.length, chosen.batch)
    raw = [gathered.batch(order.batch(len(order) // 2 + number)) for number in range(8)]
    batches = [prepare(one, laptop()) for one in raw]
    device = torch.device("cpu")
    bodies = {name: hstu_attention.choose(name, device)[0] for name in ("reference", "native")}
    ways: dict[str, Any] = {name: Steps(batches, body) for name, body in bodies.items()}
    ways["preparing a batch"] = lambda: prepare(raw[0], laptop())
    found = readings(ways, device, samples=chosen.samples, seconds=0.5)
    conditions = {
        "batch": chosen.batch,
        "length": chosen.length,
        "threads": chosen.threads,
        "tokens": sum(one.tokens for one in batches) // len(batches),
        "longest": max(one.longest for one in batches),
    }
    rows = [row("dlrm_v4_cpu", name, "seconds", "s", values, conditions) for name, values in found.items()]
    for name in bodies:
        rates = [chosen.batch / seconds for seconds in found[name]]
        rows.append(row("dlrm_v4_cpu", name, "samples_per_s", "samples/s", rates, conditions))
    ratios = [slow / fast for slow, fast in zip(found["reference"], found["native"])]
    rows.append(row("dlrm_v4_cpu", "native over reference", "speed_ratio", "x", ratios, conditions))
    for entry in rows:
        print(show(entry))
    if not chosen.dry:
        print(f"rows appended to {record(rows)}", file=sys.stderr)


if __name__ == "__main__":
    main()
