"""Named moments at which a kill does the most harm; tests stop a run at each of them. They do nothing else."""

from __future__ import annotations

from collections.abc import Callable

NAMES: dict[str, str] = {
    "save: begun": "an empty draft",
    "save: tensors written": "a draft without its manifest",
    "save: manifest written": "a complete draft without its final name",
    "save: draft synced": "a complete draft on disk without its final name",
    "save: damaged one set aside": "a complete draft, and a damaged checkpoint of the same step moved out of its way",
    "save: renamed": "the new checkpoint, which a power failure may still undo",
    "save: folder synced": "the new checkpoint, not read back yet, and the older ones",
    "save: verified": "the new checkpoint, which index.json does not name yet, and the older ones",
    "save: indexed": "the new checkpoint and the older ones",
    "prune: begun": "more checkpoints than keep_last allows",
    "prune: set aside": "an old checkpoint without its name",
    "prune: removed": "perhaps more old checkpoints, and drafts of killed processes",
    "prune: done": "the checkpoints that stay and nothing else",
    "window: left": "a window's last batch trained on, and a log without it",
    "window: logged": "a window's last batch trained on, and a log with it",
    "window: entered": "the first batch of a window made, and not trained on",
    "evaluation: due": "a state without a score",
    "evaluation: first batch scored": "some rows scored, nothing logged",
    "evaluation: scored": "all rows scored, no score logged",
    "evaluation: logged": "a score in the log, and no checkpoint with it",
}
"""Every moment, and what a kill leaves behind there."""

listener: Callable[[str], None] | None = None
"""Is called at every moment; only tests set it."""


def reached(name: str) -> None:
    if listener is not None:
        if name not in NAMES:
            raise KeyError(f"{name!r} is not among points.NAMES")
        listener(name)
