"""All that a command imports or compiles, done once in the fork server: a start is then a fork. Starts no thread."""

from __future__ import annotations

import recperf.cli.peaks
import recperf.ops.assemble.reference
import recperf.ops.layer_norm.reference
import recperf.ops.stu_input.reference
import recperf.ops.stu_output.reference
import recperf.runs.mlperf.log
import recperf.train.checkpoint_dcp
import recperf.workloads.clicks
import recperf.workloads.dlrm_v4_build
import recperf.workloads.execute  # noqa: F401
from recperf.cli.options import choose, read_options
from recperf.cli.run import Options
from recperf.ops.bag import native as bag
from recperf.ops.history import native as history
from recperf.ops.hstu_attention import native as attention

for op in (bag, history, attention):
    op.library()
for workload in ("micro-dlrm", "dlrm-v4"):
    # Reading a command line makes its parser, which is most of what a start takes.
    read_options(Options, choose([workload]), verb="run", description="")
