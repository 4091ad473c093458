"""Creates a result folder in the layout of MLPerf's package checker, from logs and the facts of their machine."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import jsonfile, units
from ...errors import DataError, GateFailed
from ...folders import fresh_folder, refuse_occupied, temporary_folder
from .check import LogVerdict, verdict
from .lines import BENCHMARK, RULESET, RUNS, USAGE, Lines, captured_log, messages, official, read

FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node",
    "host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count", "host_processor_frequency",
    "host_processor_caches", "host_processor_interconnect", "host_memory_capacity", "host_storage_type",
    "host_storage_capacity", "host_networking", "host_networking_topology", "host_memory_configuration",
    "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect", "accelerator_frequency",
    "accelerator_on-chip_memories", "accelerator_memory_configuration", "accelerator_memory_capacity",
    "accelerator_interconnect", "accelerator_interconnect_topology", "cooling", "hw_notes", "framework",
    "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""The fields that the official checker requires."""
_MAY_BE_EMPTY = ("hw_notes", "sw_notes")
_STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}


@dataclass(frozen=True, kw_only=True)
class Package:
    folder: Path
    files: list[Path]
    """Relative to the folder."""
    passed: bool
    """Whether the official package checker accepts it as it is."""
    faults: list[str]
    """The checker's objections."""
    left: list[str]
    """What a submitter must still do."""
    ruleset: str = RULESET


def package(folder: Path, logs: list[Path], *, force: bool = False) -> Package:
    """Create the folder under a temporary name and rename it: it appears whole or not at all."""
    folder = folder.absolute()
    refuse_occupied(folder)
    verdicts = [verdict(path) for path in logs]
    if not force:
        _refuse(verdicts)
    read_logs = [read(path) for path in logs]
    platform = _shared(logs, read_logs)
    with fresh_folder(folder, fix="name another folder") as draft:
        left = _lay_out(draft, logs, read_logs, platform)
        passed, faults = checked(draft)
        files = sorted(path.relative_to(draft) for path in draft.rglob("*") if path.is_file())
    return Package(folder=folder, files=files, passed=passed, faults=faults, left=left)


def _refuse(verdicts: list[LogVerdict]) -> None:
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        first = failed[0]
        raise GateFailed(
            f"{len(failed)} of {len(verdicts)} logs fail the official checker",
            where={"log": first.log, "rule": first.failures[0].text if first.failures else "see recperf mlperf check"},
            fix="recperf mlperf check LOG...; --force packs them anyway",
        )


def _shared(paths: list[Path], logs: list[Lines]) -> str:
    """The name of the system. All logs must agree on it, on the submitter, the division and the benchmark."""
    for key in ("submission_platform", "submission_org", "submission_division", "submission_benchmark"):
        values = [log.first(key) for log in logs]
        odd = next((index for index, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            raise DataError(f"the logs differ in {key}: {values[0]!r} and {values[odd]!r}", where={"log": paths[odd]})
    name = logs[0].first("submission_platform")
    if not isinstance(name, str) or not name.strip():
        raise DataError("the log names no submission_platform", where={"log": paths[0]})
    return name


def file_name(platform: str) -> str:
    """The name of a system as a folder and file name: the checker finds one by the other."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", platform).strip("._") or "system"


def _lay_out(folder: Path, paths: list[Path], logs: list[Lines], platform: str) -> list[str]:
    """Write every file; return what is left to do."""
    name = file_name(platform)
    results, code = folder / "results" / name / BENCHMARK, folder / "benchmarks" / BENCHMARK
    for place in (results, code, folder / "systems"):
        place.mkdir(parents=True)
    without = []
    for index, path in enumerate(paths):
        shutil.copyfile(path, results / f"result_{index}.txt")
        config = path.parent / str(logs[index].first("config_filename") or "config.json")
        if config.is_file() and config.parent == path.parent:
            (code / f"result_{index}").mkdir()
            shutil.copyfile(config, code / f"result_{index}" / config.name)
        else:
            without.append(f"result_{index}.txt")
    system = describe(_machine(paths[0].parent / "machine.json"), logs[0], platform)
    (folder / "systems" / f"{name}.json").write_text(json.dumps(system, indent=2) + "\n")
    left = _left(paths, logs, system, name)
    if without:
        left.append(f"benchmarks/{BENCHMARK}: there is no config next to the log of {', '.join(without)}")
    (code / "README.md").write_text(_readme(platform, len(paths), left, configs=len(without) < len(paths)))
    return left


def _machine(path: Path) -> dict[str, Any]:
    """The facts of the machine of the first log; none where no run of recperf wrote them."""
    return jsonfile.require(jsonfile.read(path), dict[str, Any], path, what="is damaged") if path.exists() else {}


def describe(facts: dict[str, Any], log: Lines, platform: str) -> dict[str, str]:
    """Every field as text, as the checker expects; empty if it is not known."""
    gpus, caches = facts.get("gpus") or [], facts.get("caches") or {}
    known = {
        "submitter": log.first("submission_org"),
        "division": log.first("submission_division"),
        "status": _STATUS.get(str(log.first("submission_status")), _STATUS["research"]),
        "system_name": platform,
        "number_of_nodes": 1,
        "host_processor_model_name": facts.get("cpu"),
        "host_processor_vcpu_count": facts.get("cores"),
        "host_processor_caches": ", ".join(f"{level} {units.size(size)}" for level, size in caches.items()),
        "host_memory_capacity": f"{facts['memory_gib']} GiB" if facts.get("memory_gib") else None,
        "accelerators_per_node": len(gpus) if facts else None,
        "accelerator_model_name": gpus[0].get("name") if gpus else "none" if facts else None,
        "accelerator_memory_capacity": f"{gpus[0].get('memory_gib')} GiB" if gpus else "none" if facts else None,
        "framework": f"PyTorch {facts['torch']}" if facts.get("torch") else "PyTorch",
        "operating_system": facts.get("system"),
    }
    return {field: "" if known.get(field) is None else str(known[field]) for field in FIELDS}


def to_fill_in(system: dict[str, str]) -> list[str]:
    return [field for field, text in system.items() if not text and field not in _MAY_BE_EMPTY]


def _left(paths: list[Path], logs: list[Lines], system: dict[str, str], name: str) -> list[str]:
    left = [f"systems/{name}.json: fill in {', '.join(to_fill_in(system))}"]
    if len(paths) != RUNS:
        left.append(f"results: a submission has {RUNS} logs, this one has {len(paths)}")
    if logs[0].first("submission_org") == "recperf":
        left.append("logs: submission_org is recperf; run with --mlperf.org set to the submitter")
    if not all(log.first("cache_clear") is True for log in logs):
        left.append(
            "logs: cache_clear is not true; clear the system's caches before a run and set --mlperf.cache-clear"
        )
    left.append(f"benchmarks/{BENCHMARK}: add the source code that was run, and how to run it")
    return left


def _readme(platform: str, count: int, left: list[str], *, configs: bool) -> str:
    todo = "\n".join(f"- {item}" for item in left)
    repeat = f"""
Each folder `result_<i>` here has the config of `results/{file_name(platform)}/{BENCHMARK}/result_<i>.txt`; a run is
repeated with

    recperf run --config result_<i>/config.json
"""
    return f"""# {BENCHMARK} on {platform}

{count} runs of the MLPerf Training recommendation benchmark, trained by recperf (ruleset {RULESET}).
{repeat if configs else ""}
## Still to do before this is submitted

{todo}
"""


def checked(folder: Path) -> tuple[bool, list[str]]:
    """The verdict of the official package checker, on a copy: it writes scaling factors into the results."""
    checker = official("package_checker.package_checker")
    compliance = official("compliance_checker.mlp_compliance")
    with temporary_folder() as place:
        copy = place / "package"
        shutil.copytree(folder, copy)
        try:
            with captured_log() as records:
                systems = checker.check_systems(str(copy), USAGE, RULESET)
                results = checker.check_training_result_files(
                    str(copy), USAGE, RULESET, False, False, False, False, False
                )
        except (Exception, SystemExit) as error:
            return False, [f"the package checker failed: {type(error).__name__}: {error}"[:300]]
        finally:
            compliance.enqueued_configs.clear()
        faults = [text.replace(f"{copy}/", "") for text in messages(records)]
    return bool(systems and results), faults
