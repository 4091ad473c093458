"""How long the service of examples/service takes to answer 100 requests a second that arrive at random, on two cores.

python benchmarks/service_latency.py --run runs/next --rate 100 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from time import perf_counter

import httpx
import numpy as np

from _rows import record, row, show

SERVICE = Path(__file__).parents[1] / "examples" / "service"


async def ask(url: str, items: list[str], rate: float, seconds: float) -> list[float]:
    """The seconds from when each request was due until its answer."""
    draw = np.random.default_rng(1)
    taken: list[float] = []

    async def one(due: float, history: list[str]) -> None:
        await asyncio.sleep(max(0.0, due - perf_counter()))
        reply = await client.post(url, json={"history": history, "k": 10})
        reply.raise_for_status()
        taken.append(perf_counter() - due)

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=256)) as client:
        began, count = perf_counter() + 0.1, int(rate * seconds)
        due = began + np.cumsum(draw.exponential(1 / rate, count))
        histories = [list(draw.choice(items, draw.integers(1, 20))) for _ in range(count)]
        await asyncio.gather(*(one(at, history) for at, history in zip(due, histories)))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--dry", action="store_true", help="measure and print, but record nothing")
    options = parser.parse_args()
    import recperf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the item is not in the data: the list is of what sells
        items = recperf.open(options.run).recommend([["any"]], k=50, allow_unknown=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "RECPERF_RUN": str(options.run.resolve())}
    server = subprocess.Popen(command, cwd=SERVICE, env=environment)
    try:
        url = f"http://127.0.0.1:{port}/recommend"
        names = [str(one) for one in items[items.columns[2]]]
        wait_for(url, names)
        asyncio.run(ask(url, names, 10, 2))
        taken = asyncio.run(ask(url, names, options.rate, options.seconds))
    finally:
        server.terminate()
        server.wait()
    conditions = {
        "rate": options.rate, "seconds": options.seconds, "k": 10, "model": "transformer and counts, CPU",
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    times = [one * 1e3 for one in taken]
    entry = row("service_latency", "recommend next items", "latency", "ms", times, conditions)
    entry |= {f"p{share}": float(np.percentile(times, share)) for share in (95, 99)}
    print(show(entry), f"p95 {entry['p95']:.1f}, p99 {entry['p99']:.1f}")
    if not options.dry:
        print(f"row appended to {record([entry]).name}")


def wait_for(url: str, names: list[str]) -> None:
    end = perf_counter() + 120
    while True:
        try:
            httpx.post(url, json={"history": names[:2]}, timeout=60).raise_for_status()
        except httpx.TransportError:
            if perf_counter() > end:
                raise
            asyncio.run(asyncio.sleep(0.2))
        else:
            return


if __name__ == "__main__":
    main()
