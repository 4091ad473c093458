"""Writes docs/leaderboard.md from the rows of next_item.jsonl: one line per data, model, device and settings.

python benchmarks/leaderboard.py            # the newest row of each counts
python benchmarks/leaderboard.py --check    # exit code 1 where the page is not that of the rows
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROWS, PAGE = ROOT / "benchmarks" / "results" / "next_item.jsonl", ROOT / "docs" / "leaderboard.md"
METRICS = ("ndcg_10", "hit_rate_10", "seconds")
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Half of the 95 % interval of a mean over so many seeds, in standard errors."""
DATA = {
    "sequences_sasrec": "ML-1M, SASRec's file",
    "Beauty": "Amazon Beauty",
    "LastFM": "LastFM, S3-Rec's file",
    "Sports_and_Outdoors": "Amazon Sports, S3-Rec's file",
    "Toys_and_Games": "Amazon Toys, S3-Rec's file",
    "Yelp": "Yelp, S3-Rec's file",
    "ratings, split leave-one-out": "ML-1M, users 1 to 2,999",
    "ratings, split leave-one-out, no times": "ML-1M, users 1 to 2,999, without times",
    "ratings, split time": "ML-1M, users 1 to 2,999, split by time",
    "ratings, split time, no times": "ML-1M, users 1 to 2,999, split by time, without times in the model",
}
"""What files are called; ties of times are in the order of the file."""
PUBLISHED = (
    ("ML-1M, Meta's preparation", "HSTU-large", 0.1893, 0.3294, "generative-recommenders"),
    ("ML-1M, SASRec's file", "gSASRec", 0.1726, 0.3003, "gSASRec"),
    ("ML-1M, SASRec's file", "SASRec", 0.1259, 0.2392, "gSASRec"),
    ("Amazon Beauty", "eSASRec", None, 0.0928, "transformer_benchmark"),
    ("Amazon Beauty", "SASRec, sampled softmax", 0.0531, None, "transformer_benchmark"),
)
"""Data, model, NDCG@10, HR@10 and the repository whose README says so."""
TITLE = """# Next items: results

Each user's last item is the test, the one before it the validation; all items are ranked but those of the history. In
parentheses the 95 % interval of the mean over seeds. Seconds of training alone, to the best epoch by validation.
Written by `benchmarks/leaderboard.py` from `benchmarks/results/next_item.jsonl`; the rows come from `next_item.py`,
`next_item_research.py` and `next_item_rectools.py`.
"""


def lines_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each data, model, device and settings, from its newest rows; the best first."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        file, model = row["variant"].split(": ")
        device = row["machine"]["gpus"][0]["name"] if row["conditions"]["device"] == "cuda" else row["machine"]["cpu"]
        settings = " ".join(row["conditions"].get("set", []))
        line = found.setdefault((file, model, device, settings), {})
        line |= {"data": DATA.get(file, file), "model": model, "device": device, "settings": settings or "default"}
        line |= {"commit": row["commit"][:8], "seeds": row["conditions"]["seeds"], row["metric"]: row}
    complete = [line for line in found.values() if "ndcg_10" in line]
    return sorted(complete, key=lambda line: (line["data"], -line["ndcg_10"]["p50"]))


def shown(row: dict[str, Any] | None, digits: int) -> str:
    """The mean over seeds with its interval, or where rows do not have the seeds their median."""
    if row is None:
        return ""
    values = row["conditions"].get("by_seed", [row["p50"]])
    half = STUDENT.get(len(values), 1.96) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return f"{mean(values):.{digits}f}" + ("" if half is None else f" (± {half:.{digits}f})")


def page(rows: list[dict[str, Any]]) -> str:
    measured, published = [], []
    for line in lines_of(rows):
        numbers = shown(line["ndcg_10"], 4), shown(line.get("hit_rate_10"), 4), shown(line.get("seconds"), 1)
        facts = (str(line["seeds"]), line["device"], line["settings"], line["commit"])
        measured.append(f"| {' | '.join((line['data'], line['model'], *numbers, *facts))} |")
    for data, model, *gains, source in PUBLISHED:
        figures = ("" if gain is None else f"{gain:.4f}" for gain in gains)
        published.append(f"| {' | '.join((data, model, *figures, source))} |")
    return "\n".join(
        [
            TITLE,
            "| data | model | NDCG@10 | HR@10 | s | seeds | device | settings | commit |",
            "|---|---|---|---|---|---|---|---|---|",
            *measured,
            "",
            "Published for the same protocol, not measured here:",
            "",
            "| data | model | NDCG@10 | HR@10 | repository |",
            "|---|---|---|---|---|",
            *published,
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    text = page([json.loads(line) for line in ROWS.read_text().splitlines()])
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
