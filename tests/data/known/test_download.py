"""Downloads from a local HTTP server that behaves like the hub and records every request."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recperf.data.known.yambda import download
from recperf.data.known.yambda.schema import REPOSITORY, REVISION
from recperf.errors import DataError, MachineError, RecperfError

pytest.importorskip("huggingface_hub")
SIZE = "50m"
NAMES = download.files_of(SIZE)
EVENTS = NAMES[-1]
RESOLVE = f"/datasets/{REPOSITORY}/resolve/{REVISION}/"


@dataclass
class Hub:
    endpoint: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, file and range of every request for content or metadata, redirects left out."""
    agents: set[str] = field(default_factory=set)
    others: list[str] = field(default_factory=list)
    """Requests for anything that is not a file."""
    break_after: int | None = None
    """Bytes after which a transfer breaks off, once each."""
    breaks: int = 0
    """How many transfers break off."""
    claimed: dict[str, str] = field(default_factory=dict)
    """Digests the hub states falsely."""
    status: int | None = None

    def fetched(self) -> list[str]:
        return [name for method, name, _ in self.requests if method == "GET"]


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.hub
        hub.agents.add(self.headers.get("User-Agent", ""))
        assert "Authorization" not in self.headers
        if self.path.startswith("/cdn/"):
            return self.content(self.path.removeprefix("/cdn/"))
        name = self.path.removeprefix(RESOLVE)
        if not self.path.startswith(RESOLVE):
            hub.others.append(self.path)
        if self.command == "HEAD":
            hub.requests.append(("HEAD", name, None))
        if hub.status or name not in hub.files:
            return self.reply(hub.status or 404, {"X-Error-Code": "EntryNotFound"})
        digest = hub.claimed.get(name) or hashlib.sha256(hub.files[name]).hexdigest()
        # Another host's name, as the real hub sends one to its content network.
        location = hub.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{name}"
        facts = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(hub.files[name])), "ETag": '"other"'}
        return self.reply(302, {"Location": location, "X-Repo-Commit": REVISION, **facts})

    def content(self, name: str) -> None:
        hub = self.hub
        content, range_ = hub.files[name], self.headers.get("Range")
        hub.requests.append(("GET", name, range_))
        start = int(range_.removeprefix("bytes=").split("-")[0]) if range_ else 0
        self.send_response(206 if range_ else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if range_:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if hub.break_after is not None and hub.breaks > 0 and name == EVENTS:
            hub.breaks -= 1
            self.wfile.write(content[start : start + hub.break_after])
            self.close_connection = True
            return
        self.wfile.write(content[start:])

    def reply(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the three files of a size and one nobody needs; waiting between attempts takes no time."""
    random = np.random.default_rng(0)
    files = {name: random.bytes(1_000 * (1 + index)) for index, name in enumerate(NAMES)}
    hub = Hub(files=files | {"embeddings.parquet": b"unused"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Answering,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr("time.sleep", lambda _: None)
    # What of a chunk came before a break is lost, and a real chunk is larger than these files.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def got(hub: Hub, **options: Any) -> tuple[dict[str, Any], list[str]]:
    messages: list[str] = []
    return download.get(SIZE, say=messages.append, endpoint=hub.endpoint, **options), messages


def failed(hub: Hub, **options: Any) -> RecperfError:
    with pytest.raises(RecperfError) as caught:
        got(hub, **options)
    assert "\n" not in caught.value.what
    assert caught.value.fix
    return caught.value


def folder() -> Path:
    return download.folder_of(SIZE)


def parts() -> list[Path]:
    return list(folder().rglob("*.incomplete"))


def test_only_the_needed_files_come_in_the_hubs_layout(hub: Hub) -> None:
    facts, messages = got(hub)
    assert {name: (folder() / name).read_bytes() for name in NAMES} == {name: hub.files[name] for name in NAMES}
    assert sorted(hub.fetched()) == sorted(NAMES)
    assert not (folder() / "embeddings.parquet").exists()
    assert "Apache-2.0" in messages[0]
    assert facts["bytes"] == 6_000
    assert facts["files"][EVENTS] == {
        "bytes": 3_000,
        "sha256": hashlib.sha256(hub.files[EVENTS]).hexdigest(),
        "etag": hashlib.sha256(hub.files[EVENTS]).hexdigest(),
    }
    assert json.loads((folder() / download.RECORD).read_text())["revision"] == REVISION
    assert not parts()
    hub.requests.clear()
    (folder() / download.RECORD).unlink()
    assert got(hub)[0] == facts, "a kill before the record costs no second transfer"
    assert not hub.fetched()
    got(hub)
    assert len(hub.requests) == 3, "a complete download asks for nothing"


def test_nothing_else_is_sent_to_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token goes out (the hub above looks at every request), and not what else is installed or running here."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    got(hub)
    assert hub.others == []
    assert hub.agents
    assert not any("torch" in agent or "agent/" in agent for agent in hub.agents)


def test_a_call_that_gave_up_is_resumed_by_the_next(hub: Hub) -> None:
    hub.break_after, hub.breaks = 700, 1
    hub_files = dict(hub.files)
    broken = hub.files[EVENTS]
    with pytest.MonkeyPatch.context() as patch:
        # After the first break no transfer gets a byte further.
        real = Answering.content

        def content(self: Answering, name: str) -> None:
            real(self, name)
            if name == EVENTS:
                hub.break_after, hub.breaks = 0, 1

        patch.setattr(Answering, "content", content)
        error = failed(hub)
    assert isinstance(error, MachineError)
    assert "resumes at 700 B" in (error.fix or "")
    assert [part.read_bytes() for part in parts()] == [broken[:700]]
    hub.break_after, hub.breaks, hub.files = None, 0, hub_files
    hub.requests.clear()
    _, messages = got(hub)
    assert hub.requests == [("HEAD", EVENTS, None), ("GET", EVENTS, "bytes=700-")]
    assert any("resumed at 700 B" in line for line in messages)
    assert (folder() / EVENTS).read_bytes() == broken
    assert not parts()


def test_a_wrong_digest_is_found_at_once(hub: Hub) -> None:
    hub.claimed[EVENTS] = "0" * 64
    error = failed(hub)
    assert isinstance(error, DataError)
    assert "is not that of the published file" in error.what
    assert not (folder() / EVENTS).exists()
    assert not parts()


def test_a_changed_file_is_found_later(hub: Hub) -> None:
    got(hub)
    messages: list[tuple[int, int]] = []
    assert download.verify(SIZE, lambda *at: messages.append(at)) == list(NAMES)
    assert messages[-1] == (6_000, 6_000)
    changed = bytearray(hub.files[EVENTS])
    changed[17] ^= 1
    (folder() / EVENTS).write_bytes(changed)
    with pytest.raises(DataError, match=r"multi_event\.parquet differs from the published file by checksum"):
        download.verify(SIZE)
    (folder() / EVENTS).write_bytes(b"short")
    with pytest.raises(DataError, match="differs from the published file by checksum"):
        download.verify(SIZE)
    (folder() / EVENTS).unlink()
    with pytest.raises(DataError, match="is missing"):
        download.verify(SIZE)
