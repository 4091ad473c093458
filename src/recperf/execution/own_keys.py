"""Numbers that stand for users and items by the ids of the user's own file: every workload numbers them in its own way,
and by these numbers runs know that they scored the same rows, and the same users.

Shapes: N rows, Q ranked rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.hashing import finalise_numpy_

BITS = 48
"""JSON readers hold whole numbers below 2^53."""


def keys_of(numbers_N: Tensor, own: Sequence[object] | None) -> Tensor:
    """The key of each number, by the id that it stands for; without `own` ids the number is the id."""
    distinct, places_N = np.unique(numbers_N.numpy(), return_inverse=True)
    texts = (str(number if own is None else own[number]) for number in distinct.tolist())
    digests = (hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=BITS // 8) for text in texts)
    keys = np.array([int.from_bytes(one.digest(), "little") for one in digests], np.int64)
    return torch.from_numpy(keys[places_N])


def paired(users_Q: Tensor, items_Q: Tensor) -> Tensor:
    """The key of each pair of a user and an item."""
    words_Q = finalise_numpy_(items_Q.numpy().astype(np.uint64)) ^ users_Q.numpy().astype(np.uint64)
    return torch.from_numpy((finalise_numpy_(words_Q) >> np.uint64(64 - BITS)).astype(np.int64))


def rows_digest(labels_N: Tensor, users_N: Tensor | None = None, items_N: Tensor | None = None) -> str:
    """Tells whether two models were scored on the same rows, from the labels and the keys of users and items. The order
    of rows whose users are known does not matter."""
    if users_N is None:
        return hashlib.sha256(np.packbits(labels_N.numpy() > 0).tobytes()).hexdigest()
    pairs_N = paired(users_N, users_N * 0 if items_N is None else items_N).numpy().astype(np.uint64)
    words_N = finalise_numpy_(pairs_N * np.uint64(2) + (labels_N.numpy() > 0).astype(np.uint64))
    return hashlib.sha256(f"{len(words_N)} {int(words_N.sum(dtype=np.uint64))}".encode()).hexdigest()
