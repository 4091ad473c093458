"""Meta's research trainer of HSTU on a file of sequences: time of an epoch and quality, beside next_item.py.

FOLDER is a checkout of facebookresearch/generative-recommenders; its trainer runs unchanged, on a CUDA device, with
fbgemm_gpu and gin installed:
    python benchmarks/next_item_research.py FOLDER FILE --seconds 200
It trains on all items but a user's last one, and the last one is the test, ranked among all items after each epoch. The
best epoch by the test counts, which favours it. Where pandas or tensorboard are missing, a few lines stand in for them:
the one reads a file once, the other writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from _rows import record, row, show
from next_item import GOAL, read
from recperf.data.next_item import NextItemData

CONFIG = "configs/ml-1m/hstu-sampled-softmax-n128-large-final.gin"
RESULT = re.compile(r"eval @ epoch (\d+) in ([\d.]+)s: NDCG@10 ([\d.]+).*?HR@10 ([\d.]+)")


class TimeIsUpError(Exception):
    """Raised out of their training loop after the last epoch that is wanted."""


class Results(logging.Handler):
    """Collects what the trainer logs after each epoch, with the time that its training took."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.epochs: list[dict[str, float]] = []
        self.last, self.end = time.monotonic(), time.monotonic() + seconds

    def emit(self, entry: logging.LogRecord) -> None:
        match = RESULT.search(entry.getMessage())
        if match is None:
            return
        now = time.monotonic()
        number, evaluation, ndcg, hits = (float(text) for text in match.groups())
        self.epochs.append(
            {
                "epoch": number + 1,
                "ndcg_10": ndcg,
                "hit_rate_10": hits,
                "seconds_an_epoch": now - self.last - evaluation,
            }
        )
        print(self.epochs[-1], flush=True)
        self.last = now
        if now > self.end:
            raise TimeIsUpError


def stand_in() -> None:
    """Modules that the trainer imports and the machine may not have."""

    class Frame:
        def __init__(self, path: str, delimiter: str = ",") -> None:
            with Path(path).open() as file:
                self.iloc = [SimpleNamespace(**line) for line in csv.DictReader(file, delimiter=delimiter)]

        def __len__(self) -> int:
            return len(self.iloc)

    class Writer:
        def __init__(self, **_: Any) -> None: ...
        def add_scalar(self, *_: Any, **__: Any) -> None: ...

    if importlib.util.find_spec("pandas") is None:
        pandas: Any = ModuleType("pandas")
        pandas.DataFrame, pandas.Series, pandas.read_csv = Frame, object, Frame
        sys.modules["pandas"] = pandas
    if importlib.util.find_spec("tensorboard") is None:
        board: Any = ModuleType("torch.utils.tensorboard")
        board.SummaryWriter = Writer
        sys.modules["torch.utils.tensorboard"] = board


def write_sequences(data: NextItemData, path: Path) -> None:
    """The sequences in the format that the trainer reads."""
    with path.open("w") as file:
        lines = csv.writer(file)
        lines.writerow(["user_id", "sequence_item_ids", "sequence_ratings", "sequence_timestamps"])
        for user in range(data.users):
            items = data.items_E[data.offsets_U1[user] : data.offsets_U1[user + 1]].tolist()
            columns = (items, [5] * len(items), range(1, len(items) + 1))
            lines.writerow([user, *(",".join(map(str, column)) for column in columns)])


def rows_of(epochs: list[dict[str, float]], data: NextItemData, file: Path) -> list[dict[str, Any]]:
    """The best epoch by the test, and the times."""
    best = max(epochs, key=lambda epoch: epoch["ndcg_10"])
    reached = [number for number, epoch in enumerate(epochs) if epoch["ndcg_10"] >= GOAL]
    seconds = [epoch["seconds_an_epoch"] for epoch in epochs]
    values = {"ndcg_10": [best["ndcg_10"]], "hit_rate_10": [best["hit_rate_10"]]}
    times = {"seconds_an_epoch": seconds[1:]}
    if reached:
        times["seconds_to_goal"] = [sum(seconds[: reached[0] + 1])]
    conditions = {
        "file": file.name, "users": data.users, "items": data.items, "device": "cuda", "seeds": 1,
        "config": CONFIG, "epochs": len(epochs), "best_epochs": [best["epoch"]],
    }  # fmt: skip
    variant = f"{file.stem}: research trainer"
    return [
        row("next_item", variant, metric, "s" if metric in times else "", value, conditions)
        for metric, value in {**values, **times}.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0, help="no epoch begins after so long")
    parser.add_argument("--dry", action="store_true", help="print rows and do not store them")
    options = parser.parse_args()
    data, folder = read(options.file), options.folder.resolve()
    stand_in()
    sys.path.insert(0, str(folder))
    import fbgemm_gpu  # noqa: F401
    import gin
    from generative_recommenders.research.data.dataset import DatasetV2
    from generative_recommenders.research.data.reco_dataset import RecoDataset
    from generative_recommenders.research.trainer import train

    results = Results(options.seconds)
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(results)
    logging.raiseExceptions = True
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_sequences(data, Path("sequences.csv"))

        def dataset(dataset_name: str, max_sequence_length: int, chronological: bool, **_: Any) -> RecoDataset:
            parts = [
                DatasetV2("sequences.csv", max_sequence_length + 1, ignore_last_n=ignored, chronological=chronological)
                for ignored in (1, 0)
            ]
            return RecoDataset(max_sequence_length, data.items, data.items, list(range(1, data.items + 1)), *parts)

        train.get_reco_dataset = dataset
        gin.parse_config_file(str(folder / CONFIG))
        results.last = time.monotonic()
        with contextlib.suppress(TimeIsUpError):
            train.train_fn(0, 1, 29517)
    rows = rows_of(results.epochs, data, options.file)
    for one in rows:
        print(show(one))
    if not options.dry:
        record(rows)


if __name__ == "__main__":
    main()
