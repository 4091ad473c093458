"""Published logs by name, from a server on this machine that hands out made-up files of the same form."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recperf import locations
from recperf.cli import main
from recperf.data import datasets
from recperf.data.events.item_table import columns_of, titles_of
from recperf.data.events.store import open_store, originals
from recperf.data.known import published

RATINGS = [
    (user, movie, rating, 978_300_000 + user * movie) for user in range(1, 9) for movie, rating in ((1, 5), (2, 3))
]
MOVIES = ((1, "Toy Story (1995)", "Animation|Comedy"), (2, "Misérables, Les (1995)", "Drama"))


class Server:
    """Serves files by the last part of their address; others are not found."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                outer.asked.append(name)
                body = outer.files.get(name, b"")
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    served = Server()
    for name, one in published.PUBLISHED.items():
        url = f"http://127.0.0.1:{served.http.server_port}/{one.url.rpartition('/')[2]}"
        monkeypatch.setitem(published.PUBLISHED, name, replace(one, url=url))
    yield served
    served.http.shutdown()
    served.http.server_close()


def serve_movielens(server: Server, name: str) -> None:
    dat, packed = name == "ml-1m", io.BytesIO()
    mark, ending = ("::", "dat") if dat else (",", "csv")
    files = {
        "ratings": ("userId,movieId,rating,timestamp", [mark.join(map(str, row)) for row in RATINGS]),
        "movies": ("movieId,title,genres", [mark.join([str(number), title if dat else f'"{title}"', genres])
                                            for number, title, genres in MOVIES]),
        "users": ("", [f"{user}::{'FM'[user % 2]}::{25 + user}::{user % 3}::55{user:03d}" for user in range(1, 9)]),
    }  # fmt: skip
    with zipfile.ZipFile(packed, "w") as opened:
        for file, (header, lines) in files.items():
            text = "\n".join([*([header] if not dat else []), *lines, ""])
            opened.writestr(f"{name}/{file}.{ending}", text.encode("latin-1" if dat else "utf-8"))
    server.files = {f"{name}.zip": packed.getvalue()}
    md5 = hashlib.md5(packed.getvalue()).hexdigest()
    server.files[f"{name}.zip.md5"] = (f"MD5 ({name}.zip) = {md5}\n" if dat else f"{md5}  {name}.zip\n").encode()


def get(capfd: pytest.CaptureFixture[str], name: str, code: int = 0) -> tuple[dict[str, Any], str]:
    assert main(["data", "get", name, "--json"]) == code
    out, err = capfd.readouterr()
    return json.loads(out) if code == 0 else {}, err


@pytest.mark.parametrize(("name", "archive"), [("movielens-1m", "ml-1m"), ("movielens-20m", "ml-20m"),
                                               ("movielens-32m", "ml-32m")])  # fmt: skip
def test_movielens_is_imported_with_titles_and_genres(
    server: Server, capfd: pytest.CaptureFixture[str], name: str, archive: str
) -> None:
    serve_movielens(server, archive)
    facts, said = get(capfd, name)
    assert "free for research" in said
    assert facts["events"] == len(RATINGS)
    assert facts["compared"].startswith("the published MD5")
    assert facts["next"].endswith(f"--data {name}")
    store = open_store(Path(facts["folder"]))
    assert "Harper & Konstan" in store.manifest.licence
    assert store.imported is not None
    assert store.imported.options.positive_from == 4.0
    assert titles_of(store, [1, 2]) == [title for _, title, _ in MOVIES]  # type: ignore[arg-type]
    assert columns_of(store)["genres"].values.to_pylist()[1:] == [["Animation", "Comedy"], ["Drama"]]
    assert ("occupation" in columns_of(store, "user")) == (archive == "ml-1m")
    assert [*locations.dataset_folder(name).parent.iterdir()] == [locations.dataset_folder(name)]
    assert main(["data", "info", name]) == 0
    assert "  licence     GroupLens" in capfd.readouterr().out
    asked = len(server.asked)
    assert get(capfd, name)[0]["downloaded"] is False
    assert len(server.asked) == asked


def test_a_download_that_differs_from_the_published_checksum_is_refused(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    serve_movielens(server, "ml-20m")
    md5 = server.files.pop("ml-20m.zip.md5")
    assert "the download failed: 404" in get(capfd, "movielens-20m", 4)[1]
    server.files |= {"ml-20m.zip": b"another file", "ml-20m.zip.md5": md5}
    assert "differs from the published MD5" in get(capfd, "movielens-20m", 3)[1]
    assert [*(locations.home() / "data").iterdir()] == []
    assert main(["data", "info", "movielens-20m"]) == 3
    assert "recperf data get movielens-20m" in capfd.readouterr().err


def test_amazon_reviews_are_compared_with_the_first_download(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [f"U{user},B{item},{rating:.1f},{time}000" for user, item, rating, time in RATINGS]
    content = "\n".join(["user_id,parent_asin,rating,timestamp", *lines, ""]).encode()
    server.files["Video_Games.csv.gz"] = gzip.compress(content, mtime=0)
    facts, said = get(capfd, "amazon-video-games")
    assert "published for research without a licence" in said
    assert f"no checksum is published: sha256 {facts['sha256']} is recorded" in said
    store = open_store(Path(facts["folder"]))
    assert originals(store.folder, "items") == ["B1", "B2"]
    assert store.imported is not None
    assert store.imported.options.time_unit == "ms"
    assert main(["data", "remove", "amazon-video-games"]) == 0
    capfd.readouterr()
    assert "no checksum" not in get(capfd, "amazon-video-games")[1]
    assert main(["data", "remove", "amazon-video-games"]) == 0
    server.files["Video_Games.csv.gz"] = gzip.compress(content + b"U9,B1,5.0,978300009000\n", mtime=0)
    assert "differs from that of the first download" in get(capfd, "amazon-video-games", 3)[1]
    assert datasets.imported_as("amazon-video-games") is None


def test_an_unknown_name_is_answered_with_the_nearest_one(capfd: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'amazon-video-games'?" in get(capfd, "amazon-videogames", 2)[1]
