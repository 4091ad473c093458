"""The log of a made-up shop, as a CSV file to import: the tutorial and the tests follow it.

A customer likes two kinds of products. An order is of one of these or, more often, of the kind that goes with the last
order; of a kind the k-th product is taken in proportion to 1 / k, nobody takes one twice. Stars follow from the product
and from whether the customer likes its kind.
"""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from ...config import require
from ...files import open_dataset_file, write_atomic
from ...outputs import output_file

NAME = "shop"
COLUMNS = ("customer", "product", "title", "kind", "price", "when", "stars")
KINDS = ("tea", "coffee", "honey", "spices", "biscuits", "chocolate", "cups", "kettles")
PRODUCTS = 60
"""Products of each kind."""
FOLLOWS = 0.6
"""Share of the orders whose kind follows from the order before."""
START = datetime(2025, 1, 6, tzinfo=UTC)
WEEKS = 40
"""Weeks in which customers come for the first time."""


def write(path: Path, *, customers: int, seed: int, force: bool = False) -> dict[str, Any]:
    """Write the orders in the order of time, and say how many there are."""
    require(customers >= 1, "customers", customers, "at least 1")
    require(seed >= 0, "seed", seed, "0 or more")
    place = output_file(path, endings=(".csv",), ours=_is_log, what="the log of a shop", force=force)
    draw = np.random.default_rng(seed)
    prices = 2 + draw.gamma(2.0, 6.0, (len(KINDS), PRODUCTS))
    liked = draw.normal(0, 0.5, (len(KINDS), PRODUCTS))
    shares = 1 / np.arange(1, PRODUCTS + 1)
    orders = []
    for customer in range(customers):
        tastes = draw.choice(len(KINDS), 2, replace=False)
        when = START + timedelta(days=float(draw.uniform(0, 7 * WEEKS)))
        left = np.tile(shares, (len(KINDS), 1))
        kind = int(draw.choice(tastes))
        for _ in range(3 + int(draw.geometric(0.06))):
            product = int(draw.choice(PRODUCTS, p=left[kind] / left[kind].sum()))
            left[kind, product] = 0
            stars = 3.2 + liked[kind, product] + 0.9 * (kind in tastes) + draw.normal(0, 0.8)
            orders.append((when, customer, kind, product, int(np.clip(round(stars), 1, 5))))
            kind = (kind + 3) % len(KINDS) if draw.random() < FOLLOWS else int(draw.choice(tastes))
            when += timedelta(hours=float(draw.exponential(60)))
            if not left[kind].any():
                break
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for when, customer, kind, product, stars in sorted(orders):
        title = f"{KINDS[kind].capitalize()} no. {product + 1}"
        price = f"{prices[kind, product]:.2f}"
        name = f"{KINDS[kind][:2].upper()}-{product + 1:02d}"
        time = when.isoformat(timespec="seconds")
        rows.writerow((f"c{customer + 1:04d}", name, title, KINDS[kind], price, time, stars))
    write_atomic(place, text.getvalue().encode(), fix="choose another --out")
    items = len({order[2:4] for order in orders})
    return {"name": NAME, "file": str(path), "events": len(orders), "users": customers, "items": items, "seed": seed}


def _is_log(path: Path) -> bool:
    """Whether a file begins as `write` begins one."""
    header = ",".join(COLUMNS).encode() + b"\n"
    with open_dataset_file(path) as file:
        return file.read(len(header)) == header
