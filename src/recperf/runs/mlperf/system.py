"""The description of a system: known facts are filled in, the rest is left to the submitter."""

from __future__ import annotations

from typing import Any

from ... import units

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


def describe(facts: dict[str, Any], submission: dict[str, Any], platform: str) -> dict[str, str]:
    """Every field as text, as the checker expects; empty if it is not known."""
    listed, caches = facts.get("gpus"), facts.get("caches")
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    sizes = [(level, size) for level, size in caches.items() if type(size) is int] if isinstance(caches, dict) else []
    known = {
        "submitter": submission.get("org"),
        "division": submission.get("division"),
        "status": _STATUS.get(str(submission.get("status")), _STATUS["research"]),
        "system_name": platform,
        "number_of_nodes": 1,
        "host_processor_model_name": facts.get("cpu"),
        "host_processor_vcpu_count": facts.get("cores"),
        "host_processor_caches": ", ".join(f"{level} {units.size(size)}" for level, size in sizes),
        "host_memory_capacity": f"{facts['memory_gib']} GiB" if facts.get("memory_gib") else None,
        "accelerators_per_node": len(gpus),
        "accelerator_model_name": gpus[0].get("name") if gpus else "none",
        "accelerator_memory_capacity": f"{gpus[0].get('memory_gib')} GiB" if gpus else "none",
        "framework": f"PyTorch {facts['torch']}" if facts.get("torch") else "PyTorch",
        "operating_system": facts.get("system"),
    }
    return {field: "" if known.get(field) is None else str(known[field]) for field in FIELDS}


def to_fill_in(system: dict[str, str]) -> list[str]:
    return [field for field, text in system.items() if not text and field not in _MAY_BE_EMPTY]
