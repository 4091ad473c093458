"""A service that recommends next items: RECPERF_RUN=runs/next uvicorn app:app

    curl localhost:8000/recommend --json '{"history": ["TE-03", "HO-12"], "k": 3}'

Requests that arrive while the model computes are answered together, so that many clients cost little more than one.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

import recperf
from recperf.errors import RecperfError, RecperfWarning

MOST = 64
"""Requests that are answered together."""


class Request(BaseModel):
    """The ids of the items that a user had, the newest last: the user need not be in the data."""

    history: list[str] = Field(min_length=1, max_length=1000)
    k: int = Field(10, ge=1, le=100)


def answers(model: Any, requests: list[Request]) -> list[list[dict[str, Any]]]:
    """The items of each request, the best first."""
    histories = [request.history for request in requests]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecperfWarning)  # items that are not in the data are left out
        rows = model.recommend(histories, k=max(request.k for request in requests), allow_unknown=True)
    item = rows.columns[2]  # named as in the file that was imported
    listed: list[list[dict[str, Any]]] = [[] for _ in requests]
    for number, name, score in zip(rows["history"], rows[item], rows["score"]):
        if len(listed[number - 1]) < requests[number - 1].k:
            listed[number - 1].append({"item": name, "score": round(float(score), 6)})
    return listed


async def work(model: Any, queue: asyncio.Queue[tuple[Request, asyncio.Future[Any]]]) -> None:
    while True:
        waiting = [await queue.get()]
        while len(waiting) < MOST and not queue.empty():
            waiting.append(queue.get_nowait())
        requests, replies = zip(*waiting)
        try:
            results: list[Any] = await asyncio.to_thread(answers, model, list(requests))
        except RecperfError as error:
            results = [HTTPException(422, str(error))] * len(requests)
        for reply, result in zip(replies, results):
            reply.set_result(result)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    model = recperf.open(os.environ["RECPERF_RUN"])
    await asyncio.to_thread(answers, model, [Request(history=["warm-up"])])
    app.state.queue = asyncio.Queue()
    worker = asyncio.create_task(work(model, app.state.queue))
    yield
    worker.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/recommend")
async def recommend(request: Request) -> list[dict[str, Any]]:
    reply = asyncio.get_running_loop().create_future()
    await app.state.queue.put((request, reply))
    if isinstance(result := await reply, HTTPException):
        raise result
    return result
