"""The settings of changes that trials make: their lines, the numbers to try, and what they do not keep. Torch-free."""

from __future__ import annotations

from typing import Any

RESULTS = {
    "SparseAdam": "the results: SparseAdam leaves rows as they are that a step does not use",
    "set_float32_matmul_precision": "the results: factors of products have 10 bits of mantissa",
    "torch.autocast": "the results: factors of products have 8 bits of mantissa",
    "batch_size=": "the results: other batches, for which the learning rate may need tuning; its gain is in samples",
    "num_workers": "random numbers that are drawn while loading",
}
"""What changes do not keep, by a word of their lines."""


def _doubling(cores: int) -> list[int]:
    return sorted({cores, *(1 << power for power in range(cores.bit_length()) if 1 << power <= cores)})


SEARCHED = ("workers", "threads", "batch_size")
"""Changes that choose a number."""
LARGEST_BATCH = 1 << 8
"""Times the batch of the program that are tried at most."""


def numbers_of(name: str, cores: int, batch_size: int | None) -> list[int]:
    """The numbers that a search tries on so many cores."""
    if name == "batch_size":
        return [(batch_size or 0) << power for power in range(1, LARGEST_BATCH.bit_length())]
    return ([0] if name == "workers" else []) + _doubling(cores)


def changes_text(settings: dict[str, Any]) -> str:
    """The lines of changes that choose numbers."""
    lines = []
    if (workers := settings.get("workers")) is not None:
        lines.append(f"DataLoader(..., num_workers={workers}{', persistent_workers=True' * (workers > 0)})")
    if batch_size := settings.get("batch_size"):
        lines.append(f"DataLoader(..., batch_size={batch_size})")
    if threads := settings.get("threads"):
        lines.append(f"torch.set_num_threads({threads})")
    return "; ".join(lines)
