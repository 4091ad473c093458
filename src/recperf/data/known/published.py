"""Published logs of ratings by name: where each comes from, its terms, and how its files become events.

To add one, write it here.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ... import locations
from ...errors import DataError
from ...files import make_folder, open_dataset_file, read_dataset_file, sha256, write_json
from ...folders import temporary_folder
from ...jsonfile import Struct, read, require
from ...stop import poll
from ..events.options import ImportOptions
from .downloading import fetch

GROUPLENS = (
    "GroupLens, University of Minnesota: free for research; pass the data on {pass_on}; ask before any commercial use, "
    "claim no endorsement, and cite Harper & Konstan 2015, The MovieLens Datasets, doi:10.1145/2827872"
)
AMAZON = (
    "McAuley Lab, UC San Diego: published for research without a licence; cite Hou et al. 2024, Bridging Language and "
    "Items for Retrieval and Recommendation, arXiv:2403.03952"
)
RECORD = "download.json"
_MD5 = re.compile(r"\b[0-9a-f]{32}\b")


@dataclass(frozen=True, kw_only=True)
class Published:
    url: str
    licence: str
    columns: Mapping[str, str]
    """The columns of user, item, rating and time."""
    events: str = ""
    """File of the ratings in the archive; the download itself if it is none."""
    items: str | None = None
    users: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """The first line of files that name no columns."""
    has_md5: bool = False
    """Whether its MD5 is published beside it."""


def _movielens(name: str, ending: str = "csv", pass_on: str = "under the same terms only", **headers: str) -> Published:
    """`headers` are the first lines of files that name no columns; where they do, the archive has no users."""
    names = {"events": "ratings", "items": "movies", **({"users": "users"} if headers else {})}
    files = {role: f"{name}/{file}.{ending}" for role, file in names.items()}
    return Published(
        url=f"https://files.grouplens.org/datasets/movielens/{name}.zip",
        licence=GROUPLENS.format(pass_on=pass_on),
        columns={"user": "userId", "item": "movieId", "rating": "rating", "time": "timestamp"},
        headers={files[role]: line for role, line in headers.items()},
        has_md5=True,
        **files,
    )


def _amazon(category: str) -> Published:
    folder = "https://mcauleylab.ucsd.edu/public_datasets/data/amazon_2023/benchmark/5core/rating_only"
    columns = {"user": "user_id", "item": "parent_asin", "rating": "rating", "time": "timestamp"}
    return Published(url=f"{folder}/{category}.csv.gz", licence=AMAZON, columns=columns)


_CATEGORIES = (
    "All_Beauty", "Arts_Crafts_and_Sewing", "Automotive", "Baby_Products", "Beauty_and_Personal_Care", "Books",
    "CDs_and_Vinyl", "Cell_Phones_and_Accessories", "Clothing_Shoes_and_Jewelry", "Electronics", "Gift_Cards",
    "Grocery_and_Gourmet_Food", "Health_and_Household", "Home_and_Kitchen", "Industrial_and_Scientific",
    "Kindle_Store", "Magazine_Subscriptions", "Movies_and_TV", "Musical_Instruments", "Office_Products",
    "Patio_Lawn_and_Garden", "Pet_Supplies", "Software", "Sports_and_Outdoors", "Tools_and_Home_Improvement",
    "Toys_and_Games", "Video_Games",
)  # fmt: skip
PUBLISHED: Final[dict[str, Published]] = {
    "movielens-1m": _movielens(
        "ml-1m",
        "dat",
        "only with permission",
        events="userId::movieId::rating::timestamp",
        items="movieId::title::genres",
        users="userId::gender::age::occupation::zipCode",
    ),
    "movielens-20m": _movielens("ml-20m"),
    "movielens-32m": _movielens("ml-32m"),
    **{f"amazon-{category.lower().replace('_', '-')}": _amazon(category) for category in _CATEGORIES},
}


class Download(Struct):
    """What was downloaded under a name, kept beside the dataset: a later download must be the same file."""

    url: str
    sha256: str
    checksum: str
    """What it was compared with."""


@contextmanager
def downloaded(name: str, *, say: Callable[[str], None]) -> Iterator[tuple[ImportOptions, Download]]:
    """How to import a dataset, whose files are there for a block. They are compared with the published checksum or, if
    there is none, with that of the first download."""
    published, folder = PUBLISHED[name], locations.dataset_folder(name)
    again = f"recperf data get {name}"
    say(f"{name}: {published.licence}")
    make_folder(folder.parent)
    with temporary_folder(f".{name}.", beside=folder.parent) as draft:
        archive = draft / published.url.rpartition("/")[2]
        say(f"downloading {published.url}")
        fetch(published.url, archive, fix=f"check the network, then: {again}")
        record = _verified(published, archive, folder / RECORD, say)
        paths = _unpacked(published, archive, draft)
        options = ImportOptions(**paths, **published.columns, name=name, licence=published.licence)  # type: ignore[arg-type]
        yield options, record
        write_json(folder / RECORD, record)


def _verified(published: Published, archive: Path, recorded: Path, say: Callable[[str], None]) -> Download:
    """The record of a download. Refuses another file than the published one, or than that of the first download."""
    digest, checksum = sha256(archive), "that of the first download"
    if published.has_md5:
        sums = archive.with_name(f"{archive.name}.md5")
        fetch(f"{published.url}.md5", sums, fix="try again: the checksum is published beside the file", stream=False)
        stated = _MD5.search(read_dataset_file(sums).decode(errors="replace"))
        checksum = f"the published MD5, {stated[0]}" if stated else "nothing"
        is_same = stated is not None and _md5_of(archive) == stated[0]
    elif recorded.is_file():
        is_same = require(read(recorded), Download, recorded, what="is damaged").sha256 == digest
    else:
        is_same = True
        say(f"no checksum is published: sha256 {digest} is recorded, and later downloads are compared with it")
    if not is_same:
        what = f"the download is not the expected {archive.name}: it differs from {checksum}"
        fix = "try again; if it fails again, a proxy may be changing the file"
        if not published.has_md5:
            fix = f"if the publisher replaced it, remove {recorded}"
        raise DataError(what, where={"url": published.url}, fix=fix)
    return Download(url=published.url, sha256=digest, checksum=checksum)


def _md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open_dataset_file(path) as file:
        while block := file.read(1 << 20):
            poll()
            digest.update(block)
    return digest.hexdigest()


def _unpacked(published: Published, archive: Path, folder: Path) -> dict[str, Path]:
    """The files of events, items and users, those of an archive unpacked into a folder, each with a header."""
    if not published.events:
        return {"events": archive}
    files = {"events": published.events, "items": published.items, "users": published.users}
    paths = {}
    try:
        with zipfile.ZipFile(archive) as opened:
            for role, name in files.items():
                if name is None:
                    continue
                path = paths[role] = folder / name.rpartition("/")[2]
                with opened.open(name) as packed, path.open("wb") as file:
                    if name in published.headers:
                        file.write(f"{published.headers[name]}\n".encode())
                    shutil.copyfileobj(packed, file, 1 << 20)
                poll()
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{archive.name} is not the expected archive: {error}", where={"url": published.url}) from None
    return paths
