"""RecTools' sequential models on a file of sequences, beside next_item.py: SASRec with a sampled softmax, eSASRec (the
same with LiGR blocks) and HSTU, in the sizes that their authors published for leave-one-out.

    python benchmarks/next_item_rectools.py FILE --device cuda --seconds 120
RecTools with PyTorch Lightning must be installed (0.19 was tried). Training is theirs, some epochs at a time; after
these the ten highest items are theirs too, items of the history left out. The epoch with the best validation HR@10
counts, as their authors choose; it ends after 50 epochs without a better one, or after the seconds.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel
from rectools.models.nn.transformers.ligr import LiGRLayers

from _rows import record, row, show
from next_item import read
from recperf.data.next_item import NextItemData

LIGR = {
    "transformer_layers_type": LiGRLayers, "use_key_padding_mask": True,
    "transformer_layers_kwargs": {"ff_factors_multiplier": 4},
}  # fmt: skip
SAMPLED = {"loss": "sampled_softmax", "n_negatives": 256}
SPARSE = {"n_factors": 256, "session_max_len": 50, "n_blocks": 1, "n_heads": 1, "dropout_rate": 0.2}
DENSE = {"n_factors": 64, "session_max_len": 200, "n_blocks": 2, "n_heads": 1, "dropout_rate": 0.1}
"""As published for logs as Amazon Beauty and as ML-1M."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SASRec": (SASRecModel, SAMPLED),
    "eSASRec": (SASRecModel, SAMPLED | LIGR),
    "HSTU": (HSTUModel, {"loss": "softmax", "relative_time_attention": False}),
}
EPOCHS, PATIENCE, TOP = 200, 50, 10


def events(data: NextItemData, held_back: int) -> pd.DataFrame:
    """Events of all users but the last ones."""
    lengths_U = np.diff(data.offsets_U1)
    ages_E = np.arange(len(data.items_E)) - np.repeat(data.offsets_U1[:-1], lengths_U)
    there_E = ages_E < np.repeat(np.maximum(lengths_U - held_back, 1), lengths_U)
    users_E = np.repeat(np.arange(data.users), lengths_U)
    columns = {Columns.User: users_E, Columns.Item: data.items_E, Columns.Weight: 1.0}
    times = pd.to_datetime(ages_E, unit="D")
    return pd.DataFrame(columns | {Columns.Datetime: times})[there_E]


def gains(model: Any, log: Dataset, data: NextItemData, held_back: int) -> tuple[float, float]:
    """NDCG@10 and HR@10 of the item so many places before the end of each user's."""
    users_N = np.flatnonzero(np.diff(data.offsets_U1) > 2)
    targets_N = data.items_E[data.offsets_U1[users_N + 1] - held_back]
    lists = model.recommend(users_N, log, k=TOP, filter_viewed=True, on_unsupported_targets="ignore")
    wanted = pd.Series(targets_N, index=users_N)
    hits = lists[lists[Columns.Item] == lists[Columns.User].map(wanted)]
    return float((1 / np.log2(hits[Columns.Rank] + 1)).sum()) / len(users_N), len(hits) / len(users_N)


def trained(name: str, data: NextItemData, options: argparse.Namespace) -> dict[str, float]:
    kind, settings = MODELS[name]
    sizes = DENSE if len(data.items_E) >= 50 * data.users else SPARSE
    seed_everything(options.seed)

    def trainer() -> Trainer:
        return Trainer(
            max_epochs=EPOCHS, accelerator="gpu" if options.device == "cuda" else "cpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    model = kind(**sizes, **settings, get_trainer_func=trainer, recommend_torch_device=options.device)
    log, whole = Dataset.construct(events(data, 2)), Dataset.construct(events(data, 1))
    seconds, best = 0.0, {"chosen": -1.0}
    for epoch in range(options.every, EPOCHS + 1, options.every):
        start = time.perf_counter()
        model.fit_partial(log, min_epochs=options.every, max_epochs=options.every)
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        validation, test = gains(model, log, data, 2), gains(model, whole, data, 1)
        if validation[1] > best["chosen"]:
            best = {"ndcg_10": test[0], "hit_rate_10": test[1], "seconds": seconds, "epoch": epoch}
            best["chosen"] = validation[1]
        print(f"{name}  epoch {epoch}  {seconds:.1f} s  validation {validation}  test {test}", flush=True)
        if seconds > options.seconds or epoch - best["epoch"] >= PATIENCE:
            break
    return {**best, "seconds_an_epoch": seconds / epoch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=4, help="evaluate after so many epochs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of training after which a model stops")
    parser.add_argument("--dry", action="store_true", help="print rows and do not store them")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    data, rows = read(options.file), []
    for name in options.models:
        best = trained(name, data, options)
        conditions = {
            "file": options.file.name, "users": data.users, "items": data.items, "device": options.device, "seeds": 1,
            "set": [], "best_epochs": [best["epoch"]], "seconds": options.seconds,
        }  # fmt: skip
        for metric in ("ndcg_10", "hit_rate_10", "seconds", "seconds_an_epoch"):
            facts = conditions | {"by_seed": [best[metric]]}
            unit = "s" if metric.startswith("seconds") else ""
            rows.append(row("next_item", f"{options.file.stem}: RecTools {name}", metric, unit, [best[metric]], facts))
            print(show(rows[-1]), flush=True)
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
