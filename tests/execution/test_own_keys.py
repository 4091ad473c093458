"""Keys by the user's own ids: workloads that number users and items otherwise recognise the same rows."""

from __future__ import annotations

import torch

from recperf.execution.own_keys import BITS, keys_of, paired, rows_digest

USERS = ["ann", "bob", "cé\udce9", "7"]


def test_a_key_follows_from_the_id_alone() -> None:
    keys_N = keys_of(torch.tensor([0, 1, 3, 0, 2]), USERS)
    other = keys_of(torch.tensor([2, 0, 7, 2]), ["bob", "", "ann"] + [""] * 4 + ["7"])
    assert (keys_N[[0, 1, 2, 3]].tolist(), len(set(keys_N.tolist()))) == (other.tolist(), 4)
    assert keys_of(torch.tensor([7]), None).tolist() == keys_N[2:3].tolist(), "a number is its own id"
    assert 0 <= int(keys_N.min()) <= int(keys_N.max()) < 1 << BITS


def test_a_pair_is_neither_its_reverse_nor_another() -> None:
    users_Q, items_Q = keys_of(torch.arange(4), USERS), keys_of(torch.arange(4), list("abcd"))
    every = paired(users_Q.repeat_interleave(4), items_Q.repeat(4))
    assert len(set(every.tolist())) == 16
    assert not set(every.tolist()) & set(paired(items_Q.repeat(4), users_Q.repeat_interleave(4)).tolist())
    assert 0 <= int(every.min()) <= int(every.max()) < 1 << BITS
    assert users_Q.tolist() == keys_of(torch.arange(4), USERS).tolist(), "nothing is changed in place"


def test_the_digest_of_rows_is_that_of_users_items_and_labels_in_any_order() -> None:
    users_N, items_N = keys_of(torch.tensor([0, 0, 1, 2]), USERS), keys_of(torch.tensor([0, 1, 1, 1]), list("ab"))
    labels_N, order_N = torch.tensor([1.0, 0, 1, 0]), torch.tensor([2, 0, 3, 1])
    digest = rows_digest(labels_N, users_N, items_N)
    assert rows_digest(labels_N[order_N], users_N[order_N], items_N[order_N]) == digest
    others = [
        (labels_N[order_N], users_N, items_N), (labels_N, users_N[order_N], items_N),
        (labels_N, users_N, items_N[order_N]), (labels_N[:3], users_N[:3], items_N[:3]), (labels_N, users_N, None),
        (labels_N.repeat(2), users_N.repeat(2), items_N.repeat(2)),
    ]  # fmt: skip
    assert digest not in {rows_digest(*one) for one in others}
    # Rows without users are known by their order alone.
    assert rows_digest(labels_N) != rows_digest(labels_N[order_N])
