"""Everything a rank imports, done once in the fork server, so that a start is a fork. Starts no thread."""

# ruff: noqa: F401
from __future__ import annotations

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import fbgemm_gpu.split_embedding_configs
    import rich.console
    import torch._dynamo
    import torchrec.distributed.embedding
    import torchrec.distributed.embeddingbag

    import recperf.execution.training
    import recperf.train.checkpoint_state
    import recperf.workloads.dlrm.build
    import recperf.workloads.dlrm_v4.build
    import recperf.workloads.micro_dlrm.build
    import recperf.workloads.ranks
from recperf.cli.options import choose, read_options
from recperf.cli.run import Options

read_options(Options, choose(["dlrm-v4"]), verb="run", description="")
gc.collect()
gc.freeze()
