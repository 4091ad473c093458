"""How many rows `recperf score` scores in a second, beside the same model in a plain loop of torch and pandas.

Two models are trained for a moment on synthetic data: micro-dlrm, whose rows are pairs of user and item, and dlrm-v4
(preset laptop), whose rows also have a history. A million rows, for dlrm-v4 20,000, are read from a Parquet file with
two further columns, encoded, scored and written to a Parquet file with those columns. The plain loop reads the file
with pandas, takes the features of users and items from arrays by their ids, calls the model on batches of the same size
and writes with pandas; for dlrm-v4 it gathers the histories of a batch, then calls the model. Both run in turn in one
process; opening the model is not part of it. Their logits have to agree.

Run as `python benchmarks/score_rows.py [--rows N] [--dry]`. Rows are recorded at the full size only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ROWS, V4_SHARE, ROUNDS = 1_000_000, 50, 5
MODELS = {
    "micro-dlrm": ("--data.source", "embedded", "--train.epochs", "1"),
    "dlrm-v4": ("--train.max-steps", "50",),
}  # fmt: skip


def write_rows(model: Any, path: Path, rows: int) -> None:
    """Random pairs of known users and items, with two columns that a model does not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = np.random.default_rng(7)
    columns = {
        role: ids.values.take(pa.array(draw.integers(0, len(ids), rows)))
        for role, ids in (("user", model.served.users), ("item", model.served.items))
    }
    pq.write_table(pa.table({**columns, "price": draw.random(rows), "note": draw.integers(0, 99, rows)}), path)


def plain_clicks(model: Any) -> Callable[[Any], Any]:
    """Logits of a frame of micro-dlrm: features by id from arrays, then the model, batch after batch."""
    import torch

    from recperf.data.batch import JaggedFeatures

    served = model.served
    tables = served.more_tables()
    own = {role: tables[f"{role}s"].to_pandas().set_index(role) for role in ("user", "item")}
    known = {role: frame.index.max() + 1 for role, frame in own.items()}
    numbers: dict[str, Any] = {}
    for role, frame in own.items():
        for name in frame.columns:
            column = np.zeros(known[role], np.float64)
            column[frame.index] = frame[name]
            numbers[name] = (role, column)
    rows = {}
    for role in ("user", "item"):
        ids, numbers_of = served.own_ids(role)
        rows[role] = np.zeros(known[role], np.int64)
        rows[role][ids.slice(1).to_numpy()] = numbers_of[1:]

    def logits(frame: Any) -> Any:
        parts = []
        columns = {role: frame[role].to_numpy() for role in ("user", "item")}
        for first in range(0, len(frame), served.batch_size):
            here = {role: ids[first : first + served.batch_size] for role, ids in columns.items()}
            dense = np.stack([numbers[name][1][here[numbers[name][0]]] for name in served.dense_names], 1)
            sparse = [
                rows[key][here[key]]
                if key in rows
                else numbers[f"row of {key}"][1][here[numbers[f"row of {key}"][0]]].astype(np.int64)
                for key in served.keys
            ]
            features = JaggedFeatures.from_ids(served.keys, torch.from_numpy(np.stack(sparse)))
            parts.append(served.model(torch.from_numpy(dense.astype(np.float32)), features))
        return torch.cat(parts).numpy()

    return logits


def plain_histories(model: Any) -> Callable[[Any], Any]:
    """Logits of a frame of dlrm-v4: the histories of a batch, then the model."""
    import pyarrow as pa
    import torch

    from recperf.models.dlrm_v4.inputs import prepare

    served = model.served

    def logits(frame: Any) -> Any:
        parts = []
        for first in range(0, len(frame), served.batch_size):
            batch = frame.iloc[first : first + served.batch_size]
            queries, _ = served.row_queries.queries({role: pa.array(batch[role]) for role in ("user", "item")})
            parts.append(served.model(prepare(served.histories.queried(queries), served.config.model)))
        return torch.cat(parts).numpy()

    return logits


def measured(name: str, folder: Path, rows: int) -> list[dict[str, Any]]:
    import pandas as pd
    import torch

    import recperf
    from _rows import row
    from recperf.cli import main as command
    from recperf.execution.scoring import score_file
    from recperf.train.device import applied

    run, source = folder / name, folder / f"{name}.parquet"
    code = command(["run", name, *MODELS[name], "--no-report", "--no-peaks", "--quiet", "--run-dir", str(run)])
    assert code in (0, 5), code
    model = recperf.open(run, device="cpu").model
    write_rows(model, source, rows)
    plain = (plain_clicks if name == "micro-dlrm" else plain_histories)(model)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        began = perf_counter()
        score_file(model, source, folder / "ours.parquet")
        ours.append(rows / (perf_counter() - began))
        began = perf_counter()
        frame = pd.read_parquet(source)
        with applied(model.served.settings), torch.no_grad():
            logits = plain(frame)
        frame = frame.assign(score=1 / (1 + np.exp(-logits)), logit=logits)
        frame.to_parquet(folder / "plain.parquet", index=False)
        theirs.append(rows / (perf_counter() - began))
    same = pd.read_parquet(folder / "ours.parquet")["logit"].to_numpy()
    difference = float(np.abs(same - logits).max())
    assert difference < 1e-4, difference
    conditions = {
        "model": name, "rows": rows, "threads": model.served.settings.threads, "batch": model.served.batch_size,
        "largest_difference": difference, "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    return [
        row("score_rows", f"{name} recperf score", "rate", "rows/s", ours, conditions),
        row("score_rows", f"{name} torch and pandas", "rate", "rows/s", theirs, conditions),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dry", action="store_true", help="measure and print, but record nothing")
    chosen = parser.parse_args()

    from _rows import record, show

    with tempfile.TemporaryDirectory() as temporary:
        os.environ["RECPERF_HOME"] = f"{temporary}/home"
        entries = measured("micro-dlrm", Path(temporary), chosen.rows)
        entries += measured("dlrm-v4", Path(temporary), max(1, chosen.rows // V4_SHARE))
    for entry in entries:
        print(show(entry))
    if chosen.rows == ROWS and not chosen.dry:
        print(f"rows appended to {record(entries).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
