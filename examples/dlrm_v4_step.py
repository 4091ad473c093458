"""One training step of dlrm-v4 in two micro-batches, with a batch made by hand."""

import torch

from recperf.data.batch import HistoryBatch, JaggedFeatures
from recperf.data.streaming.features import CANDIDATE, CONTEXT, HISTORY
from recperf.models.dlrm_v4.config import laptop
from recperf.models.dlrm_v4.inputs import prepare_parts
from recperf.models.dlrm_v4.model import DLRMv4

# Two samples: three events and one event of history; every id of context, history and candidate is 1.
keys = (*CONTEXT, *HISTORY, *CANDIDATE)
bags = [[[1], [1]]] * len(CONTEXT) + [[[1, 1, 1], [1]]] * len(HISTORY) + [[[1], [1]]] * len(CANDIDATE)
batch = HistoryBatch(
    features=JaggedFeatures.from_bags(keys, bags),
    history_offsets_B1=torch.tensor([0, 3, 4]),
    actions_T=torch.tensor([1, 4, 3, 1]),  # bits: 1 listened, 2 liked, 4 skipped
    times_T=torch.tensor([10, 400, 500, 70]),
    query_times_B=torch.tensor([500, 70]),
    labels_B=torch.tensor([1.0, 0.0]),
)

config = laptop()
model = DLRMv4(config, seed=1).train()
parts = prepare_parts(batch, config, 2)  # two micro-batches
for number, part in enumerate(parts):
    model.set_step(seed=1, step=0, part=number)  # dropout is a function of these
    (model.loss(part) * (len(part) / len(batch))).backward()
torch.optim.Adam(model.dense_parameters(), lr=1e-3, betas=(0.95, 0.999)).step()
model.tables.update(1e-3)  # row-wise Adagrad on the rows the batch used
