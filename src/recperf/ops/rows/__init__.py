"""Moves rows of tables between a batch and where all rows lie: `reference` (numpy, anywhere) and `native` (C threads).

implementation, why = choose("auto")
implementation.gather(table_RW, rows_N, out_NW)     # host memory; scatter is the other direction
implementation.read_records(files, Request.of(rows_N, places_N), out_NW)     # files; write_records is the other
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from .. import choice
from .reference import Fault, RecordFault, RecordFiles, Request

Name = Literal["auto", "reference", "native"]

__all__ = ["Fault", "Name", "RecordFault", "RecordFiles", "Request", "choose"]


def choose(name: Name) -> tuple[ModuleType, str]:
    """The implementation and the reason for it; an explicit request that cannot be met is an error."""
    return choice.choose(__name__, name, torch.device("cpu"), moves=True)
