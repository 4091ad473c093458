"""`recperf ui`: by HTTP what it answers and refuses, and in a real browser what a person sees and clicks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import chromium
import example_bench as benches
import example_profiles as profiles
import example_runs as examples
import pytest
from test_page import of_program

from recperf.cli import main
from recperf.jsonfile import as_json
from recperf.runs.record import PROFILE_MARK
from recperf.runs.ui import server

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two finished runs, one with a name that is markup; one that is writing, one that was stopped long ago; one whose
    files are damaged; and a bench."""
    folder = tmp_path / "runs"
    one = examples.make_run(folder / "one", seeds=3)
    examples.make_run(folder / HOSTILE, auc=0.75, measured=())
    config = (one / "config.json").read_text()
    for name, content in (("live", config), ("halted run", config), ("damaged", '{"schema": ')):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(content)
    data = json.loads((one / "result.json").read_text())["data"]
    (folder / "halted run" / "data.json").write_text(json.dumps({**data, "name": "shop"}))
    os.utime(folder / "halted run" / "config.json", (1_700_000_000, 1_700_000_000))
    (folder / "models" / "bench.json").write_text(json.dumps(as_json(benches.bench_of(folder / "models"))))
    shutil.copytree(one, folder / "bench" / "inner")
    (folder / "bench" / "inner" / "result.json").write_text("[1, 2]")
    (folder / "live" / "events.jsonl").write_text(examples.events(1, 40))
    (folder / "program").mkdir()
    (folder / "program" / PROFILE_MARK).touch()
    of_program(profiles.eager()).save(folder / "program" / "profile.json")
    (tmp_path / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def port(home: Path) -> Iterator[int]:
    with server(home, 0) as running:
        assert running.server_address[0] == "127.0.0.1"
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_address[1]
        running.shutdown()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read().decode()
    assert "default-src 'none'" in (answer.getheader("Content-Security-Policy") or "") or answer.status == 501
    connection.close()
    return answer.status, content


def files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob("*"))}


def test_it_lists_what_is_there_and_changes_nothing(home: Path, port: int) -> None:
    before = files(home)
    runs: dict[str, dict[str, Any]] = {run["name"]: run for run in json.loads(ask(port, "/api/runs")[1])}
    states = {
        "program": "profile",
        "one": "finished",
        HOSTILE: "finished",
        "live": "running",
        "damaged": "damaged",
        "bench/inner": "damaged",
        "halted run": "stopped",
        "models": "bench",
        **{f"models/{name}": "finished" for name in ("one", "two", "items")},
    }
    assert {name: run["state"] for name, run in runs.items()} == states
    assert runs["one"]["quality"] == "AUC 0.821 ± 0.010"
    assert (runs["one"]["speed"], runs["one"]["limit"]) == ("215,052 samples/s", "dispatch")
    assert (runs["program"]["workload"], runs["program"]["limit"]) == ("program", "launch")
    assert ask(port, "/run?run=program")[0] == 200
    assert (runs["one"]["data"], runs["one"]["outcome"]) == ("movielens-like", "target met")
    halted = runs["halted run"]
    assert (halted["data"], halted["date"][:10]) == ("shop", time.strftime("%Y-%m-%d", time.localtime(1_700_000_000)))
    assert halted["resume"] == f"recperf run --resume '{home / 'halted run'}'"
    assert [name for name, run in runs.items() if run["resume"]] == ["halted run"]
    assert runs["models"]["data"] == "shop"
    assert runs["models"]["quality"].startswith("Take items: NDCG@10 0.")
    status, page = ask(port, "/run?run=models")
    assert status == 200
    assert 'href="/run?run=models/items"' in page
    assert ask(port, "/run?run=models/items")[0] == 200
    assert "config.json" in runs["damaged"]["problem"]
    assert "result.json" in runs["bench/inner"]["problem"]
    status, page = ask(port, "/compare?run=one&run=%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E")
    assert status == 200
    assert "<img" not in page
    for name in ("live", "damaged", "bench/inner"):
        status, message = ask(port, f"/run?run={name}")
        assert (status, message[:6]) == (409, "error:")
    assert files(home) == before


def test_it_refuses_other_hosts_other_paths_and_other_methods(port: int) -> None:
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"127.0.0.1:{port}.evil",
    ):
        assert ask(port, "/api/runs", Host=host)[0] == 421
    names = ("../secret.txt", "..", "one/../..", "%2e%2e/secret.txt", "/etc", "one/config.json", "", "one%00")
    paths = [*(f"/run?run={name}" for name in names), *(f"/api/curves?run={name}" for name in names)]
    for path in (*paths, "/../secret.txt", "/runs/one/config.json", "/one", "/compare?run=one", "/api/curves", "/run"):
        status, content = ask(port, path)
        assert status == 404, path
        assert "secret" not in content
    for method in ("POST", "PUT", "DELETE"):
        assert ask(port, "/", method)[0] == 501


def test_curves_follow_a_log_that_is_written_meanwhile(home: Path, port: int) -> None:
    log = home / "live" / "events.jsonl"
    whole = log.read_text().splitlines(keepends=True)

    def last() -> float:
        return float(json.loads(ask(port, "/api/curves?run=live")[1])["training loss"][-1][0])

    assert last() == 40
    with log.open("a") as file:
        file.write('{"kind": "step", "t": 1.0, "seed": 42, "step": 41, "loss": 0.5}\n{"kind": "st')
    assert last() == 41
    with log.open("a") as file:
        file.write('ep", "t": 1.0, "seed": 42, "step": 42, "loss": 0.4}\n')
    assert last() == 42
    log.write_text("".join(whole[:20]))
    assert last() < 40, "a run that was resumed goes back"
    with log.open("a") as file:
        file.write("not an event\n")
    assert last() < 40


def test_the_command_names_what_is_wrong(home: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", str(home / "nowhere")]) == 3
    assert main(["ui", str(home), "--port", str(port)]) == 4
    assert "--port 0" in capsys.readouterr().err


@pytest.mark.skipif(chromium.BINARY is None, reason="no Chromium here: apt-get install chromium")
def test_in_a_browser(home: Path, port: int) -> None:
    with chromium.Browser() as browser:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait("document.querySelectorAll('#list tbody tr').length === 11")
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
        row = "[...document.querySelectorAll('#list tr')].find(row => row.dataset.run === '{}')"
        assert "config.json" in browser.value(f"{row.format('damaged')}.textContent")
        assert "recperf run --resume" in browser.value(f"{row.format('halted run')}.textContent")
        assert browser.value("document.querySelectorAll('img').length") == 0
        browser.wait("document.querySelector('.live figcaption').textContent.includes('after step 40')")
        with (home / "live" / "events.jsonl").open("a") as file:
            file.write('{"kind": "step", "t": 1.0, "seed": 42, "step": 41, "loss": 0.5}\n')
        browser.wait("document.querySelector('.live figcaption').textContent.includes('after step 41')")
        for name in ("one", HOSTILE):
            browser.value(f"{row.format(name)}.querySelector('input').click()")
        browser.value("document.getElementById('compare').click()")
        browser.wait("location.pathname === '/compare' && document.querySelector('.verdict') !== null")
        assert "AUC 0.8212" in browser.value("document.querySelector('.verdict').textContent")
        browser.open(f"http://127.0.0.1:{port}/run?run=one")
        width = "document.querySelector('.track svg').clientWidth / document.querySelector('.track').clientWidth"
        browser.wait("document.querySelector('.axis').children.length > 3")
        browser.value("document.querySelector('.timeline button').click()")
        assert browser.value(width) == pytest.approx(2, abs=0.05)
        point = "dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
        browser.value(f"document.querySelectorAll('.call rect')[1].{point}")
        assert browser.value("document.querySelector('.pointed').textContent").startswith("aten::addmm · ")
    assert not any(os.path.basename(path) == "report.html" for path in files(home))


@pytest.mark.parametrize("request_line", [b"GET //[ HTTP/1.1", b"GET http://[/ HTTP/1.1"])
def test_a_malformed_address_is_answered(port: int, request_line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        client.sendall(request_line + f"\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    assert capfd.readouterr().err == ""


def test_a_client_that_leaves_early_is_no_error(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recperf.errors.quiet", False)
    with server(home, 0) as running:
        for error in (BrokenPipeError(), ConnectionResetError(), TimeoutError()):
            try:
                raise error
            except OSError:
                running.handle_error(None, ("127.0.0.1", 1))
        assert capfd.readouterr().err == ""
        try:
            raise ValueError("something else")
        except ValueError:
            running.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr().err.splitlines() == ["note: a request could not be answered: ValueError: something else"]


def test_an_unknown_option_is_named(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["ui", "--no-open"]) == 2
    assert capfd.readouterr().err.startswith("error: unknown option '--no-open'")
