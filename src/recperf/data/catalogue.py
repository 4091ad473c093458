"""What `recperf data get | check | make | info` do; each answers with plain values and says its progress aloud."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from .. import places
from ..errors import DataError, MachineError, UsageError, closest
from . import clicks, movielens, movielens_like
from .config import MovieLensConfig
from .movielens import MovieLens

Say = Callable[[str], None]

REAL, MADE_UP = "movielens-100k", "movielens-like"
NAMES = (REAL, MADE_UP)
URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
ZIP_SHA256 = "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229"
PUBLISHED_COUNTS = {"ratings": 100_000, "users": 943, "items": 1682}
LICENCE = {
    REAL: "GroupLens, University of Minnesota: free for research; do not pass the data on, ask before any commercial "
    "use, claim no endorsement, and cite Harper & Konstan 2015, The MovieLens Datasets, doi:10.1145/2827872",
    MADE_UP: "made up by recperf; no restrictions, and no real people or films in it",
}
DEFAULT_SEED = 7
_PATIENCE_S = 30


def get(name: str, *, say: Say, url: str | None = None) -> dict[str, Any]:
    """Fetch a dataset into the user's cache, verified; an intact copy is left alone."""
    _known(name)
    if name == MADE_UP:
        raise UsageError(
            f"{MADE_UP} is built in: there is nothing to fetch",
            fix=f"recperf data make {MADE_UP} --path FOLDER, to see it as files",
        )
    folder = places.dataset_folder(name)
    found = {"name": name, "folder": str(folder), "licence": LICENCE[name], "digests": movielens.PUBLISHED_SHA256}
    if _digests(folder) == movielens.PUBLISHED_SHA256:
        say(f"{name} is already in {folder}, intact")
        return {**found, "downloaded": False}
    say(f"{name}: {LICENCE[name]}")
    if os.path.lexists(folder):
        say(f"what is in {folder} is not the published dataset and will be replaced")
    with movielens_like.fresh_folder(folder, replace_old=True) as draft:
        _fetch(url or URL, draft, say)
    say(f"{name} is in {folder}")
    return {**found, "downloaded": True}


def check(name: str, *, path: Path | None = None) -> dict[str, Any]:
    """Read a whole dataset and compare it with what it should be; damage is an error."""
    _known(name)
    if name == MADE_UP and path is None:
        return _check_generator()
    folder = movielens.locate(path or _downloaded())
    data = movielens.read(folder)
    digests = _digests(folder)
    expected = movielens.PUBLISHED_SHA256 if name == REAL else _written_sums(folder)
    differing = [file for file in movielens.FILES if digests.get(file) != expected.get(file)]
    if differing and (path is None or _claims(name, data, differing)):
        differ = "differs" if len(differing) == 1 else "differ"
        raise DataError(
            f"{', '.join(differing)} {differ} from the {name} files by checksum",
            where={"folder": folder},
            fix=f"recperf data get {REAL}" if name == REAL else f"recperf data make {MADE_UP} --path ANOTHER_FOLDER",
        )
    pairs = data.user * len(data.genres) + data.item
    return {
        "name": name,
        "found": data.name,
        "folder": str(folder),
        "intact": not differing,
        "synthetic": data.synthetic,
        **_counts(data),
        "rows": len(data.user),
        "repeated_pairs": len(pairs) - len(np.unique(pairs)),
        "digests": digests,
        "differing": differing,
    }


def make(name: str, *, path: Path, seed: int = DEFAULT_SEED) -> dict[str, Any]:
    """Write the embedded dataset as files."""
    _known(name)
    if name != MADE_UP:
        raise UsageError(f"{name} is real data and cannot be made", fix=f"recperf data get {name}")
    if seed < 0:
        raise UsageError(f"seed is {seed}; allowed: 0 or more", fix=f"--seed {DEFAULT_SEED}")
    folder = path.expanduser()
    movielens_like.refuse_occupied(folder)
    data = movielens_like.generate(seed)
    movielens_like.write(data, folder)
    return {
        "name": name,
        "folder": str(folder),
        "seed": seed,
        "synthetic": True,
        **_counts(data),
        "digest": data.digest,
        "digests": _digests(folder),
    }


def info(name: str, *, path: Path | None = None, seed: int = DEFAULT_SEED) -> dict[str, Any]:
    """What is in a dataset."""
    _known(name)
    if name == MADE_UP and path is None:
        if seed < 0:
            raise UsageError(f"seed is {seed}; allowed: 0 or more", fix=f"--seed {DEFAULT_SEED}")
        data = movielens_like.generate(seed)
    else:
        data = movielens.read(path) if path else movielens.read_download(_downloaded())
    first, last = int(data.timestamp.min()), int(data.timestamp.max())
    chosen = data.common_genres()
    return {
        "name": data.name,
        "synthetic": data.synthetic,
        "licence": LICENCE.get(data.name, "that of the files"),
        "digest": data.digest,
        **_counts(data),
        "positive_share": float(np.mean(data.rating >= data.liked_from)),
        "ratings_per_user": _spread(np.bincount(data.user)),
        "ratings_per_item": _spread(np.bincount(data.item)),
        "first_rating": str(np.datetime64(first, "s")),
        "last_rating": str(np.datetime64(last, "s")),
        "days": round((last - first) / 86_400, 1),
        "occupations": len(data.occupations),
        "genres": {data.genre_names[index]: int(data.genres[:, index].sum()) for index in chosen},
        "splits": _split_sizes(data),
    }


def _known(name: str) -> None:
    if name not in NAMES:
        guess = closest(name, NAMES)
        raise UsageError(
            f"unknown dataset {name!r}; " + (f"did you mean {guess!r}?" if guess else f"known: {', '.join(NAMES)}"),
            fix=f"one of: {', '.join(NAMES)}",
        )


def _downloaded() -> Path:
    folder = places.dataset_folder(REAL)
    if not os.path.isdir(folder):
        what = f"{REAL} is not on this machine"
        raise DataError(what, where={"folder": folder}, fix=f"recperf data get {REAL}, or name a folder with --path")
    return folder


def _counts(data: MovieLens) -> dict[str, int]:
    return {
        "ratings": len(data.user),
        "users": int(np.count_nonzero(data.occupation)),
        "items": len(data.genres) - 1,
    }


def _spread(counts: NDArray[np.int64]) -> dict[str, float]:
    rated = counts[counts > 0]
    p20, p50, p80 = (float(value) for value in np.percentile(rated, [20, 50, 80]))
    return {"p20": p20, "p50": p50, "p80": p80, "max": float(rated.max())}


def _split_sizes(data: MovieLens) -> dict[str, dict[str, int] | None]:
    sizes: dict[str, dict[str, int] | None] = {}
    for config in (MovieLensConfig(), MovieLensConfig(split="last"), MovieLensConfig(split="cold")):
        try:
            valid = int(clicks.split_rows(data, config).sum())
            sizes[config.split] = {"train": len(data.user) - valid, "valid": valid}
        except DataError:
            sizes[config.split] = None
    return sizes


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of the files that are there and can be read."""
    found = {}
    for file in movielens.FILES:
        try:
            found[file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        except OSError:
            continue
    return found


def _written_sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / movielens_like.SUMS).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {file: digest for digest, _, file in (line.partition("  ") for line in lines)}


def _claims(name: str, data: MovieLens, differing: list[str]) -> bool:
    """Whether files that differ are a damaged copy of the named dataset, rather than another in the same format."""
    if name == MADE_UP:
        return data.synthetic
    return not data.synthetic and (len(differing) < len(movielens.FILES) or _counts(data) == PUBLISHED_COUNTS)


def _check_generator() -> dict[str, Any]:
    data = movielens_like.generate(DEFAULT_SEED)
    return {
        "name": MADE_UP,
        "found": data.name,
        "folder": None,
        "intact": data.digest == movielens_like.DEFAULT_DIGEST,
        "synthetic": True,
        **_counts(data),
        "rows": len(data.user),
        "repeated_pairs": 0,
        "digests": {"arrays": data.digest},
        "differing": [] if data.digest == movielens_like.DEFAULT_DIGEST else ["arrays"],
    }


def _fetch(url: str, folder: Path, say: Say) -> None:
    archive = folder / "ml-100k.zip"
    say(f"downloading {url}")
    _download(url, archive)
    got = hashlib.sha256(archive.read_bytes()).hexdigest()
    if got != ZIP_SHA256:
        raise DataError(
            f"the download is not the published ml-100k.zip (sha256 {got[:12]}..., expected {ZIP_SHA256[:12]}...)",
            where={"url": url},
            fix="try again; if it stays so, something between here and GroupLens changes the file",
        )
    _unpack(archive, folder, url)
    archive.unlink()


def _download(url: str, target: Path) -> None:
    try:
        pooch, requests = import_module("pooch"), import_module("requests")
    except ImportError as error:
        raise MachineError(f"downloading needs the package {error.name or 'pooch'}", fix="pip install pooch") from None
    pooch.get_logger().setLevel("WARNING")
    try:
        pooch.retrieve(
            url,
            known_hash=None,
            fname=target.name,
            path=target.parent,
            # Unstreamed, because pooch leaves the connection of a refused stream open; the archive is only 5 MB.
            downloader=pooch.HTTPDownloader(timeout=_PATIENCE_S, stream=False),
        )
    except (requests.exceptions.RequestException, ValueError) as error:
        if isinstance(error, requests.exceptions.Timeout):
            reason = f"no answer within {_PATIENCE_S} s"
        elif isinstance(error, requests.exceptions.ConnectionError):
            reason = f"no connection to {urlsplit(url).netloc}"
        elif isinstance(error, requests.exceptions.ChunkedEncodingError):
            reason = "the connection broke off"
        else:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MachineError(
            f"the download failed: {reason}",
            where={"url": url},
            fix=f"on a machine with network: download {URL} and unzip it; then here: --data.path FOLDER/ml-100k",
        ) from None


def _unpack(archive: Path, folder: Path, url: str) -> None:
    """Take only the files that are needed out of the archive, each verified."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for file in (*movielens.FILES, "README"):
                (folder / file).write_bytes(opened.read(f"ml-100k/{file}"))
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        what = f"the archive cannot be used: {str(error).strip(chr(34))}"
        raise DataError(what, where={"url": url}, fix=f"fetch the published archive: {URL}") from None
    damaged = [file for file, digest in _digests(folder).items() if digest != movielens.PUBLISHED_SHA256[file]]
    if damaged:
        what = f"{', '.join(damaged)} in the archive {'is' if len(damaged) == 1 else 'are'} not as published"
        raise DataError(what, where={"url": url}, fix=f"fetch the published archive: {URL}")
