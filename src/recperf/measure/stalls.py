"""Why the warps of a kernel wait, by Nsight Compute: it samples the program counter and names each wait's reason.

It runs a command again under its own control, so its times are of no use and none are kept; where a warp waits is the
same as in a plain run.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

_REASON = "smsp__pcsamp_warps_issue_stalled_"
_PERCENT = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
}
METRICS = ("group:smsp__pcsamp_warp_stall_reasons", *_PERCENT)
CROWDED = 8
"""Launches of all named kernels looked at for each one wanted: the frequent ones must not use up the count."""


def stalls(command: list[str], kernels: list[str], *, launches: int = 3, timeout_s: float = 300.0) -> dict[str, Any]:
    """Stall reasons of the named kernels while a command runs, or `missing` with what is in the way.

    `kernels` are names as a trace gives them. A row's reasons are shares of its samples; `selected` means that the warp
    was issuing, not waiting.
    """
    tool = shutil.which("ncu")
    if tool is None:
        return {"missing": "ncu, the command of Nsight Compute, is not on PATH; it comes with the CUDA toolkit"}
    if not kernels:
        return {"missing": "no kernel to look at: the profile found none"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        words = [tool, *arguments(kernels, launches), "--log-file", str(log), *command]
        code, said = _run(words, timeout_s)
        text = log.read_text(errors="replace") if log.is_file() else said
    if code is None:
        return {"missing": f"ncu was stopped after {timeout_s:.0f} s; name fewer kernels or run fewer steps"}
    rows = parse(text)
    if not rows:
        return {"missing": _why(text, said, code)}
    return summary(rows, kernels, launches)


def arguments(kernels: list[str], launches: int) -> list[str]:
    names = "|".join(re.escape(name) for name in sorted({function_name(kernel) for kernel in kernels}))
    return [
        *("--target-processes", "all"),
        # Left alone, so that the kernel meets the clocks it meets in training.
        *("--clock-control", "none"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({names})$"),
        *("--launch-count", str(launches * len(kernels) * CROWDED)),
        *("--metrics", ",".join(METRICS)),
    ]


def function_name(kernel: str) -> str:
    """`void at::native::f<4, T>(int)` as `f`, the name by which ncu filters."""
    plain = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    depth, kept = 0, ""
    for letter in plain:
        if letter == "(" and depth == 0:
            break
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            kept += letter
    return kept.strip().split(" ")[-1].rpartition("::")[2] or kernel


def _run(words: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code (none: out of time) and what was printed. The whole group is ended: ncu's child may outlive it."""
    # ncu and the command share a session of their own, so that both can be stopped at once.
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""


def parse(text: str) -> list[dict[str, str]]:
    """The kernels in ncu's output: messages, a row of names, a row of units, then a row a launch."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(lines[start:]))
    # The row of units has no number, and neither has what the command itself may print in between.
    return [row for row in rows if (row.get("ID") or "").isdigit() and row.get("Kernel Name")]


def summary(rows: list[dict[str, str]], kernels: list[str], launches: int) -> dict[str, Any]:
    """One row a kernel, over its first launches."""
    groups: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        members = groups[_asked(row["Kernel Name"], kernels)]
        if len(members) < launches:
            members.append(row)
    found = []
    for name, members in groups.items():
        counts: defaultdict[str, float] = defaultdict(float)
        for row in members:
            for column, value in row.items():
                if column and column.startswith(_REASON) and not column.endswith("_not_issued"):
                    counts[column.removeprefix(_REASON)] += _number(value) or 0.0
        samples = sum(counts.values())
        shares = {reason: count / samples for reason, count in counts.items() if count}
        line: dict[str, Any] = {"name": name, "launches": len(members), "samples": round(samples)}
        line["reasons"] = dict(sorted(shares.items(), key=lambda item: -item[1]))
        for column, short in _PERCENT.items():
            values = [number for row in members if (number := _number(row.get(column))) is not None]
            line[short] = sum(values) / len(values) if values else None
        found.append(line)
    found.sort(key=lambda line: -line["samples"])
    unseen = [kernel for kernel in kernels if kernel not in groups]
    return {"kernels": found, **({"not_seen": unseen} if unseen else {})}


def _asked(name: str, kernels: list[str]) -> str:
    """The name in the profile of a kernel as ncu writes it: compilers' names are spelt in more than one way."""
    if name in kernels:
        return name
    alike = [kernel for kernel in kernels if function_name(kernel) == function_name(name)]
    return alike[0] if len(alike) == 1 else name


def _number(value: str | None) -> float | None:
    try:
        return float((value or "").replace(",", ""))
    except ValueError:
        return None


def _why(log: str, said: str, code: int) -> str:
    text = f"{log}\n{said}"
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM): run as root, or let the driver allow it with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return f"ncu failed: {errors[0]}"
    if code:
        last = (said.strip() or log.strip() or "it said nothing").splitlines()[-1]
        return f"the command failed under ncu (exit {code}): {last}"
    return "no kernel of those names ran under ncu"
