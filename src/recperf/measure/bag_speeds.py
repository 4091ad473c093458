"""Whether C or torch is faster at bags of a table in memory, on this CPU: a short comparison, kept with the ceilings.

It takes a fraction of a second, once for a width and a number of threads, on a table whose size depends on the cache
only; and again after native.c, this file or the ceilings have changed. Lookups and updates are judged separately.

Shapes: V ids, B bags, R rows, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..errors import MachineError, RecperfError
from ..jsonfile import as_json
from ..ops.bag import native, reference
from ..ops.bag.native import HUGE_PAGE, ask_for_huge_pages
from ..stop import poll
from ..units import size
from .peaks import load, save
from .peaks.other_work import DISTURBED, OtherWork, not_judged
from .peaks.records import BagRatios
from .peaks.sampling import MIB, allowed_bytes, figure

BAG = 32
ROUNDS = 5
READ, UPDATED = 32 * MIB, 8 * MIB
"""Bytes of the rows that one reading looks up, and of those that it updates, which takes torch ten times as long."""
KNEES = 8
"""Size of the compared table in knees of the cache curve: of random rows, seven of eight come from memory."""


def comparison(table_RD: Tensor) -> dict[str, Any] | str | None:
    """Times of torch over those of C for lookups and updates of a table, or why they cannot be judged.

    None for a table that a cache holds, or on a machine whose ceilings are not known: measuring those takes longer.
    """
    if table_RD.device.type != "cpu" or table_RD.nbytes < 4 * HUGE_PAGE:
        return None
    try:
        peaks = load()
    except RecperfError:
        return None
    if peaks is None or table_RD.nbytes <= peaks.knee.bytes:
        return None
    by_width = peaks.bags.setdefault(str(torch.get_num_threads()), {})
    row_bytes = 4 * table_RD.shape[1]
    # Figures of other code, or taken in another way, say nothing about this.
    files = Path(native.__file__).with_name("native.c"), Path(__file__)
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    stored = by_width.get(str(row_bytes))
    if stored is not None and stored.source == source:
        return dict(as_json(stored))
    compared, allowed = KNEES * peaks.knee.bytes, allowed_bytes()
    if compared > allowed:
        return f"not judged: comparing C and torch takes {size(compared)}, {size(allowed)} may be used"
    other_work = OtherWork()
    ratios = measure(max(1, compared // row_bytes), table_RD.shape[1])
    others = other_work.share()
    if (others or 0.0) > DISTURBED:
        return not_judged(others or 0.0, "C and torch were compared")
    ratios.source, ratios.other_work = source, others
    by_width[str(row_bytes)] = ratios
    # A folder that cannot be written costs the comparison again, and nothing else.
    with suppress(MachineError):
        save(peaks)
    return dict(as_json(ratios))


def measure(rows: int, dim: int) -> BagRatios:
    """Times of torch over those of C, on a table of `rows` rows."""
    table_RD, state_R = torch.empty(rows, dim), torch.zeros(rows)
    ask_for_huge_pages(table_RD)
    table_RD.fill_(1.0)
    draw = torch.Generator().manual_seed(0)
    gradient_BD = torch.full((UPDATED // (4 * dim) // BAG + BAG, dim), 1e-3)

    def look_up(body: ModuleType, rows_V: Tensor, offsets_B1: Tensor) -> None:
        body.bag_sum(table_RD, rows_V, offsets_B1)

    def update(body: ModuleType, rows_V: Tensor, offsets_B1: Tensor) -> None:
        grouped = body.Grouped(rows_V, offsets_B1, rows)
        used_BD = gradient_BD[: len(offsets_B1) - 1]
        more: dict[str, Any] = {"rule": "rowwise-adagrad", "rate": 1e-3, "eps": 1e-8, "decay": 0.0, "scale": 1.0}
        body.update(table_RD, state_R, grouped, used_BD, **more)

    def ratios(work: Callable[[ModuleType, Tensor, Tensor], None], bytes_: int) -> Iterator[float]:
        ids = max(BAG, bytes_ // (4 * dim) // BAG * BAG)
        offsets_B1 = torch.arange(0, ids + 1, BAG)
        for number in range(ROUNDS + 1):
            poll()
            seconds = {}
            # Who goes first alternates, and nobody gets ids that were seen before.
            for body in (native, reference) if number % 2 else (reference, native):
                rows_V = torch.randint(0, rows, (ids,), generator=draw)
                began = perf_counter()
                work(body, rows_V, offsets_B1)
                seconds[body] = perf_counter() - began
            if number:
                yield seconds[reference] / seconds[native]

    with torch.no_grad():
        return BagRatios(figure([*ratios(look_up, READ)], "x"), figure([*ratios(update, UPDATED)], "x"))
