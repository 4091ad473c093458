"""The user's own ids in an imported event store, which numbers them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...errors import DataError
from ...files import read_linked
from ...jsonfile import decode
from .store import EventStore, read_manifest


def own_ids(store: EventStore, role: str) -> list[int | str]:
    """The user's own ids of the users, in the order of the store, or of the items 0, 1 and so on; role: user or item.

    The id of an item that no event has is that of the store.
    """
    numbers = store.user_ids_U.tolist() if role == "user" else list(range(store.items))
    if f"{role}s" not in store.manifest.get("originals", {}):
        return numbers
    listed = originals(store.folder, f"{role}s")
    return [listed[number - 1] if 0 < number <= len(listed) else number for number in numbers]


def originals(folder: Path, role: str) -> list[int | str]:
    """What the ids of a store were in the user's file: entry k - 1 is that of id k. Roles: users, items, artists,
    albums."""
    path, listed = folder / f"{role}.jsonl", read_manifest(folder).get("originals", {}).get(role)
    if listed is None:
        what = f"this store has no list of its original {role}"
        raise DataError(what, where={"file": path}, fix="import with --ids dense, which writes one")
    try:
        content = read_linked(path)
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != listed["sha256"]:
        what = f"the event store is damaged: {path.name} is not the file that was written"
        raise DataError(what, where={"file": path}, fix=f"remove {folder} and import it again")
    return [decode(line) for line in content.split(b"\n")[:-1]]
