"""Imports, compiles and sets up everything a command needs once in the fork server, so that a start is a fork. Leaves
no thread running."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import tiny_v4

import short
from recperf.cli.options import choose, read_options
from recperf.cli.run import Options
from recperf.ops.bag import native as bag
from recperf.ops.history import native as history
from recperf.ops.hstu_attention import native as attention

short.shorten()
for op in (bag, history, attention):
    op.library()
for workload in ("micro-dlrm", "dlrm-v4"):
    # Building the parser of a command line takes most of the start.
    read_options(Options, choose([workload]), verb="run", description="")

tiny_v4.run_straight(Path(os.environ["RECPERF_HOME"]))
gc.collect()
gc.freeze()
