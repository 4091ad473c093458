"""The data commands, against a server on this machine that hands out a small archive."""

from __future__ import annotations

import hashlib
import io
import signal
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from movielens_files import write_files

from recperf import locations
from recperf.data.known import movielens, movielens_like
from recperf.data.known import movielens_files as catalogue
from recperf.errors import DataError, MachineError, RecperfError, Stopped, UsageError
from recperf.stop import FLAG

NAME = "movielens-100k"


class Server:
    """Serves one body under any address and counts the requests."""

    def __init__(self) -> None:
        self.body = b""
        self.status = 200
        self.cut = 0
        self.requests = 0
        self.answers = threading.Event()
        self.answers.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                outer.answers.wait(20)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body[: len(outer.body) - outer.cut])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/ml-100k.zip"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        for file, content in files.items():
            opened.writestr(f"ml-100k/{file}", content)
    return packed.getvalue()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    write_files(tmp_path / "source", movielens_like.generate(5, users=6, items=9, ratings=40))
    return {file: (tmp_path / "source" / file).read_bytes() for file in movielens.FILES}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Iterator[Server]:
    monkeypatch.setenv("RECPERF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    served = Server()
    serve(served, monkeypatch, {**files, "README": b"terms", "u.info": b"not needed"})
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    monkeypatch.setattr(movielens, "PUBLISHED_SHA256", digests)
    yield served
    served.stop()


def serve(server: Server, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    server.body = archive(files)
    monkeypatch.setattr(catalogue, "ZIP_SHA256", hashlib.sha256(server.body).hexdigest())


def nothing_left() -> bool:
    data = locations.home() / "data"
    return not data.exists() or list(data.iterdir()) == []


def quiet(_: str) -> None:
    pass


def test_a_signal_ends_the_wait_for_a_server(server: Server) -> None:
    server.answers.clear()
    try:
        with FLAG.listening(), pytest.raises(Stopped):
            threading.Timer(0.2, signal.raise_signal, [signal.SIGTERM]).start()
            catalogue.get(NAME, say=quiet, url=server.url)
    finally:
        server.answers.set()
    assert nothing_left()


def test_get_downloads_and_verifies_once(server: Server) -> None:
    messages: list[str] = []
    answer = catalogue.get(NAME, say=messages.append, url=server.url)
    folder = locations.dataset_folder(NAME)
    assert answer["downloaded"] is True
    assert answer["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".recperf", "README", "u.data", "u.item", "u.user"]
    assert [path.name for path in folder.parent.iterdir()] == [NAME]
    terms = " ".join(messages)
    assert all(term in terms for term in ("GroupLens", "research", "commercial", "Harper & Konstan 2015"))
    assert movielens.read_download(folder).name == NAME
    messages.clear()
    assert catalogue.get(NAME, say=messages.append, url=server.url)["downloaded"] is False
    assert "already" in messages[0]
    assert server.requests == 1


def test_get_replaces_a_damaged_copy_once_it_has_another_and_no_files_of_the_user(
    server: Server, files: dict[str, bytes]
) -> None:
    catalogue.get(NAME, say=quiet, url=server.url)
    folder = locations.dataset_folder(NAME)
    (folder / "u.data").write_bytes(b"damaged")
    server.status = 503
    with pytest.raises(MachineError):
        catalogue.get(NAME, say=quiet, url=server.url)
    assert (folder / "u.data").read_bytes() == b"damaged"
    with pytest.raises(DataError):
        catalogue.check(NAME)
    server.status = 200
    assert catalogue.get(NAME, say=quiet, url=server.url)["downloaded"] is True
    assert (folder / "u.data").read_bytes() == files["u.data"]
    assert catalogue.check(NAME)["intact"] is True
    (folder / "u.data").write_bytes(b"damaged")
    for name, marked in (("notes.txt", True), ("u.item", False)):
        (folder / name).write_bytes(b"mine")
        if not marked:
            (folder / "notes.txt").unlink()
            (folder / ".recperf").unlink()
        with pytest.raises(DataError, match="exists already; it was not changed"):
            catalogue.get(NAME, say=quiet, url=server.url)
        assert (folder / name).read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("failure", "reason", "code"),
    [
        ("refuses", "download failed: no connection to 127", 4),
        ("not found", "download failed: 404", 4),
        ("breaks off", "download failed: the connection broke off", 4),
        ("another archive", "not the published", 3),
    ],
)
def test_a_failed_download_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, failure: str, reason: str, code: int
) -> None:
    if failure == "refuses":
        server.http.shutdown()
        server.http.server_close()
    server.status = 404 if failure == "not found" else 200
    server.cut = 10 if failure == "breaks off" else 0
    if failure == "another archive":
        monkeypatch.setattr(catalogue, "ZIP_SHA256", "0" * 64)
    with pytest.raises(RecperfError, match=reason) as caught:
        catalogue.get(NAME, say=quiet, url=server.url)
    assert (caught.value.exit_code, len(caught.value.what.splitlines())) == (code, 1)
    assert code == 3 or "--data.path" in (caught.value.fix or "")
    assert nothing_left()


def test_check_distinguishes_intact_damaged_and_other_files(
    server: Server, tmp_path: Path, files: dict[str, bytes]
) -> None:
    with pytest.raises(DataError, match="not on this machine"):
        catalogue.check(NAME)
    catalogue.get(NAME, say=quiet, url=server.url)
    findings = catalogue.check(NAME)
    assert findings["intact"] is True
    assert (findings["ratings"], findings["users"], findings["items"]) == (40, 6, 9)

    copy = tmp_path / "copy"
    copy.mkdir()
    for file, content in files.items():
        (copy / file).write_bytes(content)
    assert catalogue.check(NAME, path=copy)["intact"] is True
    rating = files["u.data"].split(b"\t")[2]
    (copy / "u.data").write_bytes(
        files["u.data"].replace(b"\t" + rating + b"\t", b"\t3\t" if rating != b"3" else b"\t2\t")
    )
    with pytest.raises(DataError, match=r"u\.data differs"):
        catalogue.check(NAME, path=copy)

    write_files(tmp_path / "other", movielens_like.generate(9, users=3, items=4, ratings=8))
    with pytest.raises(DataError, match=r"u\.data, u\.item, u\.user differ"):
        catalogue.check(NAME, path=tmp_path / "other")


@pytest.mark.usefixtures("all_ratings")
def test_the_synthetic_dataset_is_described(tmp_path: Path) -> None:
    facts = catalogue.info("movielens-like", seed=3)
    assert (facts["ratings"], facts["users"], facts["items"]) == (100_000, 943, 1682)
    assert (facts["synthetic"], 0.5 < facts["positive_share"] < 0.6) == (True, True)
    with pytest.raises(UsageError, match="has no --path"):
        catalogue.check("movielens-like", path=tmp_path)
