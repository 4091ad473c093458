"""All that a command imports, compiles or sets up, done once in the fork server: a start is then a fork. No thread is
left running."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import tiny_v4

from recperf.cli import main
from recperf.cli.options import choose, read_options
from recperf.cli.run import Options
from recperf.data.yambda import synthesize
from recperf.execution import measuring
from recperf.ops.bag import native as bag
from recperf.ops.history import native as history
from recperf.ops.hstu_attention import native as attention

measuring.SECONDS = 0.0
for op in (bag, history, attention):
    op.library()
for workload in ("micro-dlrm", "dlrm-v4"):
    # Reading a command line makes its parser, which is most of what a start takes.
    read_options(Options, choose([workload]), verb="run", description="")


def rehearse() -> None:
    """A whole small run: what torch sets up at its first product, backward pass and file is set up before any fork."""
    folder = Path(tempfile.mkdtemp())
    try:
        synthesize.write_store(tiny_v4.EVENTS, folder / "events")
        assert main([*tiny_v4.words(folder / "run", events=folder / "events"), "--quiet"]) == 0
    finally:
        shutil.rmtree(folder)


rehearse()
