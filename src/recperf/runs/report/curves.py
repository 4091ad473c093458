"""The figures along an axis: achieved bandwidth, the knee, and how training went."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .plots import _decades, _steps, _ticks
from .svg import WIDE, Sheet, family, tone
from .words import component, scaled, size
