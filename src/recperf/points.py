"""Named moments at which a kill would be most unkind; tests stop a run at each of them. They do nothing else."""

from __future__ import annotations

from collections.abc import Callable

NAMES: dict[str, str] = {
    "save: begun": "an empty draft",
    "save: tensors written": "a draft without its other values and its manifest",
    "save: state written": "a draft without its manifest",
    "save: manifest written": "a whole draft, not under its name yet",
    "save: draft synced": "a whole draft on disk, not under its name yet",
    "save: damaged one set aside": "a whole draft, and a damaged checkpoint of the same step out of its way",
    "save: renamed": "the new checkpoint, which a power cut may still take back",
    "save: folder synced": "the new checkpoint, not read back yet, and the older ones",
    "save: verified": "the new checkpoint, which index.json does not name yet, and the older ones",
    "save: indexed": "the new checkpoint and the older ones",
    "prune: begun": "more checkpoints than are kept",
    "prune: set aside": "an old checkpoint without its name",
    "prune: removed": "perhaps more old checkpoints, and drafts of killed processes",
    "prune: done": "what is kept and nothing else",
    "window: left": "a window's last batch trained on, and a log that does not say so",
    "window: logged": "the same, and a log that says so",
    "window: entered": "the first batch of a window made, and not trained on",
    "evaluation: due": "a state that has no score yet",
    "evaluation: first batch scored": "some rows scored, nothing logged",
    "evaluation: scored": "all rows scored, no score logged",
    "evaluation: logged": "a score in the log, and no checkpoint that knows it",
}
"""Every moment, and what a kill there leaves behind."""

listener: Callable[[str], None] | None = None
"""Is told of every moment that passes; set by tests alone."""


def passing(name: str) -> None:
    if listener is not None:
        if name not in NAMES:
            raise KeyError(f"{name!r} is not among points.NAMES")
        listener(name)
