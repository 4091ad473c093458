"""Deepchecks on the planted clicks of limits_of_quality.py: which causes its failed checks name.

    python benchmarks/deepchecks_peer.py --peer PYTHON [--seed 2] [--only TEXT] [--every N] [--dry]

PYTHON is an interpreter that has deepchecks; 0.19.1 needs numpy<2 pandas<2.3 scikit-learn<1.6 category-encoders<2.7.
Each case is trained as there; the peer gets the rows of both sides of the split and the model's probabilities of them,
and runs the checks of its suites that MEANS lists. A cause counts as named where a check fails that means one of the
limits expected, by MEANS, which is generous: no check says which change would help. Checks that fail of a case without
a flaw count as wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEANS = {
    "Train Test Samples Mix": ("leak",),
    "Data Duplicates": ("leak",),
    "Date Train Test Leakage Duplicates": ("leak",),
    "Date Train Test Leakage Overlap": ("leak",),
    "Feature Label Correlation": ("leak",),
    "Identifier Label Correlation": ("leak",),
    "Feature Label Correlation Change": ("leak", "drift"),
    "Conflicting Labels": ("noise",),
    "Feature Drift": ("drift",),
    "Label Drift": ("drift",),
    "Prediction Drift": ("drift",),
    "Multivariate Drift": ("drift",),
    "New Category Train Test": ("unseen",),
    "New Label Train Test": ("unseen",),
    "Train Test Performance": ("overfit", "drift", "unseen"),
    "Simple Model Comparison": ("rate", "steps", "capacity", "dead", "ignored"),
    "Datasets Size Comparison": ("protocol",),
    "Is Single Value": ("ignored",),
}
"""What a failed check says, as limits."""
LABEL = "label"


def checked(folder: Path) -> list[str]:
    """In the peer's interpreter: the checks that fail on the rows in a folder."""
    try:
        import pandas
        from deepchecks.tabular import Dataset, Suite, suites  # type: ignore[import-not-found]
    except ImportError as error:
        sys.exit(f"no deepchecks in {sys.executable}: {error}")
    facts = json.loads((folder / "facts.json").read_text())
    sides, chances = [], []
    for name in ("train", "valid"):
        frame = pandas.read_csv(folder / f"{name}.csv")
        chances.append(frame.pop("chance").to_numpy())
        date = {"datetime_name": "time"} if "time" in frame else {}
        sides.append(Dataset(frame, label=LABEL, cat_features=facts["categorical"], **date))
    one, other = ([[1 - chance, chance] for chance in side.tolist()] for side in chances)
    import numpy

    given = {
        "y_proba_train": numpy.array(one), "y_proba_test": numpy.array(other), "model_classes": [0, 1],
        "y_pred_train": (chances[0] > 0.5).astype(int), "y_pred_test": (chances[1] > 0.5).astype(int),
    }  # fmt: skip
    parts = (suites.data_integrity(), suites.train_test_validation(), suites.model_evaluation())
    checks = [check for part in parts for check in part.checks.values() if check.name() in MEANS]
    result = Suite("peer", *checks).run(train_dataset=sides[0], test_dataset=sides[1], **given)
    failed = [one.check.name() for one in result.get_not_passed_checks(fail_if_warning=False)]
    return sorted(set(failed))


def rows_of(case: Any, seed: int, folder: Path) -> None:
    """Train a case, and write the rows of both sides with the model's probabilities."""
    from dataclasses import replace

    import torch
    from planted_quality import prepare, train  # type: ignore[import-not-found]

    from recperf.data.order import ClickOrder
    from recperf.data.tables import MemoryRows, pyarrow

    trials: list[Any] = []
    workload, config, log = prepare(replace(case, flaws=(*case.flaws, trials.append)), "small", seed)
    train(workload, config, folder / "run")
    clicks = trials[-1].prepared.source.clicks
    for split in ("train", "valid"):
        store = MemoryRows(clicks.keys, clicks.slots, clicks.every(split, 1))
        batches = ClickOrder(store=store, batch_size=8192, seed=0, split="valid").cut()
        with torch.no_grad():
            chances_N = torch.cat([trials[-1].logits_of(batch) for batch in batches]).sigmoid().numpy()
        columns = {name: log.columns[name][clicks.index[split]] for name in log.columns}
        table = pyarrow().table({**columns, "chance": chances_N})
        pyarrow(".csv").write_csv(table, str(folder / f"{split}.csv"))
    named = {name for name in str(log.options["categorical"]).split(",") if name}
    facts = {"categorical": sorted(named | ({"user"} & log.columns.keys()))}
    (folder / "facts.json").write_text(json.dumps(facts))


def judged(case: Any, failed: list[str]) -> dict[str, Any]:
    meant = {limit for one in failed for limit in MEANS.get(one, ())}
    if case.healthy:
        outcome = "wrong" if meant - set(case.expected) else "silent"
    else:
        outcome = "named" if meant & set(case.expected) else "wrong" if meant else "silent"
    print(f"{case.name:46} {outcome:7} {', '.join(failed)}", flush=True)
    return {"case": case.name, "expected": case.expected, "failed": failed, "meant": sorted(meant), "outcome": outcome}


def every(cases: list[Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the peer says of each case; it looks at all of them in one process."""
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(cases):
            (folder := Path(name, str(number))).mkdir()
            rows_of(case, options.seed, folder)
        done = subprocess.run(
            [options.peer, "-W", "ignore", __file__, "--check", name], stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr.strip()[-600:])
        failed = [json.loads(Path(name, str(number), "failed.json").read_text()) for number in range(len(cases))]
    return [judged(case, one) for case, one in zip(cases, failed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that has deepchecks")
    parser.add_argument("--seed", type=int, default=2, help="of the logs and of the trainings")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth case")
    parser.add_argument("--dry", action="store_true", help="store no rows")
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        for folder in options.check.iterdir():
            (folder / "failed.json").write_text(json.dumps(checked(folder)))
        return 0
    if not options.peer or subprocess.run([options.peer, "-c", "import deepchecks"], capture_output=True).returncode:
        sys.exit("deepchecks is missing: name an interpreter that has it with --peer")
    # The peer's interpreter has none of these.
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "learn"))
    from planted_quality import CASES

    from _rows import record, row, show

    rows = []
    cases = [case for case in CASES if case.workload == "micro-dlrm" and options.only in case.name]
    cases = cases[:: options.every]
    facts = every(cases, options)
    flawless = {case.name for case in cases if case.healthy}
    for variant, group, right in (
        ("clicks with flaws", [one for one in facts if one["case"] not in flawless], "named"),
        ("clicks, nothing wrong", [one for one in facts if one["case"] in flawless], "silent"),
    ):
        values = [float(one["outcome"] == right) for one in group]
        counts = {name: sum(one["outcome"] == name for one in group) for name in ("named", "wrong", "silent")}
        if group:
            rows.append(row("deepchecks_peer", variant, right, right, values, {**counts, "cases": group}))
    print("\n".join(map(show, rows)))
    if not options.dry:
        print(f"rows in {record(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
