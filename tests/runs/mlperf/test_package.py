"""A result folder, held against the official package checker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recperf.errors import DataError
from recperf.runs.mlperf.lines import logs_in
from recperf.runs.mlperf.package import checked, file_name, package

MACHINE = {
    "system": "Linux",
    "cpu": "A processor",
    "cores": 64,
    "caches": {"L1": 49152, "L2": 2 << 20},
    "memory_gib": 512,
    "gpus": [{"name": "An accelerator", "memory_gib": 139}] * 8,
    "torch": "2.13.0",
    "fingerprint": "0123456789abcdef",
}


@pytest.fixture
def runs(write: Callable[..., Path]) -> list[Path]:
    """Ten run folders."""
    folders = [write(f"run-{seed}/mlperf.log", seed=seed, last=29).parent for seed in range(10)]
    for seed, folder in enumerate(folders):
        (folder / "config.json").write_text(json.dumps({"seed": seed}))
        (folder / "machine.json").write_text(json.dumps(MACHINE))
    return folders


def test_the_package_checker_accepts_it_with_the_system_of_the_runs(runs: list[Path], tmp_path: Path) -> None:
    made = package(tmp_path / "out" / "us", logs_in(runs))
    assert made.passed
    assert made.faults == []
    assert checked(made.folder) == (True, [])
    found = {str(path.relative_to(made.folder)) for path in made.folder.rglob("*") if path.is_file()}
    assert found == {
        "benchmarks/dlrmv4/README.md",
        "systems/a_laptop.json",
        *(f"results/a_laptop/dlrmv4/result_{index}.txt" for index in range(10)),
        *(f"benchmarks/dlrmv4/result_{index}/config.json" for index in range(10)),
    }
    assert found == {str(path) for path in made.files}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["us"]
    logged = made.folder / "results" / "a_laptop" / "dlrmv4" / "result_3.txt"
    assert logged.read_bytes() == (runs[3] / "mlperf.log").read_bytes()
    assert json.loads((made.folder / "benchmarks/dlrmv4/result_3/config.json").read_text()) == {"seed": 3}
    system = json.loads((made.folder / "systems" / "a_laptop.json").read_text())
    assert system["accelerators_per_node"] == "8"
    assert system["accelerator_model_name"] == "An accelerator"
    assert system["host_processor_caches"] == "L1 48 KiB, L2 2 MiB"
    assert system["status"] == "Research, Development, or Internal (RDI)"
    assert system["system_name"] == "a laptop"
    first = made.left[0]
    assert "cooling" in first
    assert "host_processor_model_name" not in first
    assert any("submission_org is recperf" in text for text in made.left)
    assert any("cache_clear" in text for text in made.left)
    readme = (made.folder / "benchmarks" / "dlrmv4" / "README.md").read_text()
    assert all(text in readme for text in made.left)


def test_logs_alone_are_packed_with_what_is_missing_said(write: Callable[..., Path], tmp_path: Path) -> None:
    made = package(tmp_path / "us", [write(f"{seed}.log", seed=seed) for seed in range(3)])
    assert not made.passed
    assert any("found 3, expected 10" in text for text in made.faults)
    assert str(tmp_path) not in " ".join(made.faults)
    assert "host_processor_model_name" in made.left[0]
    assert any("no config next to" in text for text in made.left)
    assert any("a submission has 10 logs, this one has 3" in text for text in made.left)
    assert "recperf run --config" not in (made.folder / "benchmarks" / "dlrmv4" / "README.md").read_text()


def test_nothing_is_overwritten(write: Callable[..., Path], tmp_path: Path) -> None:
    place = tmp_path / "us"
    place.mkdir()
    package(place, [write()])
    before = sorted(place.rglob("*"))
    with pytest.raises(DataError, match="exists already; it was not changed"):
        package(place, [write("other.log")])
    assert sorted(place.rglob("*")) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="exists already; it was not changed"):
        package(tmp_path / "file", [write("third.log")])


def test_logs_of_two_systems_are_no_submission(write: Callable[..., Path], tmp_path: Path) -> None:
    logs = [write("a.log"), write("b.log")]
    logs[1].write_text(logs[1].read_text().replace('"a laptop"', '"a cluster"'))
    with pytest.raises(DataError, match="differ in submission_platform: 'a laptop' and 'a cluster'"):
        package(tmp_path / "us", logs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "b.log"]


@pytest.mark.parametrize(("platform", "name"), [("8x NVIDIA H200", "8x_NVIDIA_H200"), ("../../etc", "etc")])
def test_a_platforms_name_stays_inside_the_folder(platform: str, name: str) -> None:
    assert file_name(platform) == name
