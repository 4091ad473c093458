"""The service of examples/service answers requests together, each with as many items as it asks for."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recperf.cli import main

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

FILE = Path(__file__).parents[2] / "examples" / "service" / "app.py"
FEW = ["--data.users", "100", "--data.groups", "4", "--data.group-items", "5", "--train.max-steps", "4", "--no-report"]


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert main(["run", "next-item", *FEW, "--no-peaks", "--quiet", "--run-dir", str(tmp_path / "run")]) == 0
    monkeypatch.setenv("RECPERF_RUN", str(tmp_path / "run"))
    spec = importlib.util.spec_from_file_location("service_app", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # pydantic looks up annotations in the module of a class.
    monkeypatch.setitem(__import__("sys").modules, "service_app", module)
    spec.loader.exec_module(module)
    return module


def test_requests_are_answered_together(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    together = []
    alone = app.answers

    def answers(model: Any, requests: list[Any]) -> Any:
        together.append(len(requests))
        # Meanwhile others come, however fast this machine answers one.
        time.sleep(0.3 if len(together) == 2 else 0.0)
        return alone(model, requests)

    monkeypatch.setattr(app, "answers", answers)
    with TestClient(app.app) as client, ThreadPoolExecutor(12) as pool:
        asked = [{"history": [str(1 + number % 3)], "k": 1 + number % 4} for number in range(24)]
        replies = list(pool.map(lambda one: client.post("/recommend", json=one), asked))
        assert [len(reply.json()) for reply in replies] == [one["k"] for one in asked]
        model = app.recperf.open(app.os.environ["RECPERF_RUN"])
        for reply, one in zip(replies, asked):
            (expected,) = alone(model, [app.Request(**one)])
            assert [item["item"] for item in reply.json()] == [item["item"] for item in expected]
        assert client.post("/recommend", json={"history": []}).status_code == 422
    assert sum(together[1:]) == 24
    assert max(together) > 1
