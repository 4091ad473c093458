"""Stall reasons of a kernel's warps, sampled by Nsight Compute.

Nsight Compute runs a command again under its control, so its times are useless and not recorded; the reasons for which
warps wait are the same as in a normal run.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections import defaultdict

from ..folders import temporary_folder
from ..stop import call
from .profile_records import StalledKernel, Stalls

_REASON = "smsp__pcsamp_warps_issue_stalled_"
_PERCENT = {
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
}
METRICS = ("group:smsp__pcsamp_warp_stall_reasons", *_PERCENT)
LAUNCHES = 3
"""Launches of each kernel whose samples count."""
OVERSAMPLING = 8
"""Launches profiled for each one requested: frequent kernels must not use up the count."""


def stalls(command: list[str], kernels: list[str], *, timeout_s: float = 300.0) -> Stalls:
    """Stall reasons of the named kernels while a command runs, or `missing` with the cause.

    `kernels` are names from a trace. Reasons are shares of the samples of a kernel; `selected` means that the warp was
    issuing an instruction, not waiting.
    """
    tool = shutil.which("ncu")
    if tool is None:
        return Stalls(missing="ncu, the command of Nsight Compute, is not on PATH; it comes with the CUDA toolkit")
    if not kernels:
        return Stalls(missing="the profile has no kernels")
    with temporary_folder() as folder:
        log = folder / "ncu.csv"
        arguments = [tool, *ncu_options(kernels), "--log-file", str(log), *command]
        code, output = _run(arguments, timeout_s)
        text = log.read_text(errors="replace") if log.is_file() else output
    if code is None:
        return Stalls(missing=f"ncu was stopped after {timeout_s:.0f} s; name fewer kernels or run fewer steps")
    rows = parse(text)
    if not rows:
        return Stalls(missing=_failure(text, output, code))
    return summary(rows, kernels)


def ncu_options(kernels: list[str]) -> list[str]:
    names = "|".join(re.escape(name) for name in sorted({function_name(kernel) for kernel in kernels}))
    return [
        *("--target-processes", "all"),
        # Not locked, so that the kernel runs at the same clocks as in training.
        *("--clock-control", "none"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({names})$"),
        *("--launch-count", str(LAUNCHES * len(kernels) * OVERSAMPLING)),
        *("--metrics", ",".join(METRICS)),
    ]


def function_name(kernel: str) -> str:
    """The name by which ncu filters: `f` for `void at::native::f<4, T>(int)`."""
    plain = kernel.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    depth, name = 0, ""
    for letter in plain:
        if letter == "(" and depth == 0:
            break
        depth += (letter == "<") - (letter == ">")
        if depth == 0 and letter != ">":
            name += letter
    return name.strip().split(" ")[-1].rpartition("::")[2] or kernel


def _run(command: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code (None: timed out) and output."""
    try:
        done = call(command, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def parse(text: str) -> list[dict[str, str]]:
    """The kernels in ncu's output: messages, a row of names, a row of units, then a row per launch."""
    lines = [line for line in text.splitlines() if not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        return []
    rows = list(csv.DictReader(lines[start:]))
    # The row of units has no number, and neither have lines that the command itself prints.
    return [row for row in rows if (row.get("ID") or "").isdigit() and row.get("Kernel Name")]


def summary(rows: list[dict[str, str]], kernels: list[str]) -> Stalls:
    """One row per kernel, over its first launches."""
    groups: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        members = groups[_trace_name(row["Kernel Name"], kernels)]
        if len(members) < LAUNCHES:
            members.append(row)
    summaries = []
    for name, members in groups.items():
        counts: defaultdict[str, float] = defaultdict(float)
        for row in members:
            for column, value in row.items():
                if column and column.startswith(_REASON) and not column.endswith("_not_issued"):
                    counts[column.removeprefix(_REASON)] += _number(value) or 0.0
        samples = sum(counts.values())
        shares = {reason: count / samples for reason, count in counts.items() if count}
        line = StalledKernel(
            name, len(members), round(samples), dict(sorted(shares.items(), key=lambda item: -item[1]))
        )
        for column, short in _PERCENT.items():
            values = [number for row in members if (number := _number(row.get(column))) is not None]
            setattr(line, short, sum(values) / len(values) if values else None)
        summaries.append(line)
    summaries.sort(key=lambda line: -line.samples)
    return Stalls(kernels=summaries, not_seen=[kernel for kernel in kernels if kernel not in groups])


def _trace_name(name: str, kernels: list[str]) -> str:
    """The name in the profile of a kernel that ncu names: the two may spell it differently."""
    if name in kernels:
        return name
    same = [kernel for kernel in kernels if function_name(kernel) == function_name(name)]
    return same[0] if len(same) == 1 else name


def _number(value: str | None) -> float | None:
    try:
        return float((value or "").replace(",", ""))
    except ValueError:
        return None


def _failure(log: str, output: str, code: int) -> str:
    text = f"{log}\n{output}"
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM): run as root, or let the driver allow it with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return f"ncu failed: {errors[0]}"
    if code:
        last = (output.strip() or log.strip() or "no output").splitlines()[-1]
        return f"the command failed under ncu (exit {code}): {last}"
    return "no kernel with those names ran under ncu"
