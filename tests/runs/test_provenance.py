from __future__ import annotations

from recperf.runs.provenance import _bytes, checkout, cpu_model, fingerprint, machine, packages


def test_the_fingerprint_is_the_same_from_call_to_call() -> None:
    one, two = machine(), machine()
    assert one == two
    assert len(one["fingerprint"]) == 16


def test_the_fingerprint_is_made_of_the_facts_beside_it() -> None:
    facts = machine()
    stated = facts.pop("fingerprint")
    assert fingerprint(facts) == stated
    for name in facts:
        assert fingerprint({**facts, name: "something else"}) != stated


def test_facts_are_there() -> None:
    assert cpu_model()
    assert packages()["torch"]
    assert set(checkout()) == {"commit", "dirty"}


def test_cache_sizes_are_read_in_bytes() -> None:
    assert _bytes("64K") == 65536
    assert _bytes("32M") == 32 << 20
    assert _bytes("512") == 512
