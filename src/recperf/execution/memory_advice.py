"""Changes of a program that may free memory at the peak of a step: edits of its source, and a lower precision. Trials
show what they free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..measure.clocks import cuda_used
from ..measure.memory import ACTIVATIONS, TEMPORARY
from ..measure.records import Advice, StepMemory
from ..runs.step_report import Report
from .program_source import Source
from .source_findings import Finding
from .source_memory import RULES
from .source_rules import settings_of
from .source_steps import needless_copies

LEAST = 0.05
"""Of the peak: where less could be freed, nothing is tried."""
LOWER = (
    'with torch.autocast("{device}", torch.bfloat16): ...  # around the forward pass',
    "the results: factors of products have 8 bits of mantissa",
)


def advise_on_memory(report: Report, files: Iterable[Path]) -> None:
    """Changes that may free memory, which no rule about time has advised, to be tried."""
    memory = scarce(report)
    moving = sum(memory.parts.get(part, 0) for part in (ACTIVATIONS, TEMPORARY)) if memory else 0
    if memory is None or moving < LEAST * memory.peak_bytes:
        return
    known = {one.name for one in report.advice if one.settings}
    findings: defaultdict[str, list[Finding]] = defaultdict(list)
    for file in files:
        with suppress(OSError, UnicodeDecodeError, SyntaxError, RecursionError):
            with file.open(encoding="utf-8", newline="") as stream:
                source = Source(stream.read(), str(file))
            for rule in (*RULES, needless_copies):
                for one in rule(source):
                    findings[one.name].append(one)
    for name, rows in findings.items():
        if name not in known and (settings := settings_of(rows)):
            memory.advice.append(Advice(name, f"{rows[0].seen}.", rows[0].change, settings=settings,
                                        changes=rows[0].changes))  # fmt: skip
    has_model = report.program_facts is not None and report.program_facts.has_model
    if has_model and not any("autocast" in one.settings for one in report.advice):
        change, changes = LOWER
        change = change.format(device="cuda" if cuda_used() else "cpu")
        settings = {"autocast": "bfloat16"}
        seen = "Activations have the precision of the weights."
        memory.advice.append(Advice("lower precision", seen, change, settings=settings, changes=changes))


def scarce(report: Report) -> StepMemory | None:
    """That of the device where there is one, which trials measure then."""
    return report.memory[-1] if report.memory else None
