from __future__ import annotations

from pathlib import Path

import pytest

from recperf import machine
from recperf.machine import fingerprint, machine_facts


def test_the_fingerprint_covers_every_fact_and_does_not_change() -> None:
    facts = machine_facts()
    assert facts == machine_facts()
    stated = facts.pop("fingerprint")
    assert len(stated) == 16
    assert fingerprint(facts) == stated
    for name in facts:
        assert fingerprint({**facts, name: "something else"}) != stated


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_pages_of_files_do_not_count_as_used_in_a_container(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "memory.stat").write_text(f"anon 500\n{prefix}inactive_file 90\n")
    assert machine._reclaimable_bytes(tmp_path / "memory.stat") == 90
    assert machine._reclaimable_bytes(tmp_path / "absent") == 0
