"""Planted programs: whether `recperf profile --script` names the limit and the line of a defect, and what its advice
gains beside the best known change, timed without recperf.

    python benchmarks/followed_programs.py [--only TEXT] [--steps N] [--seconds S] [--no-record]

One row per program: the part of the best known saving that the patch reaches. Exit 5 where a limit or a line is wrong,
the patch gains less than half of the best known change, or the gain that was printed is more than 10 % off.

    python benchmarks/followed_programs.py --public FOLDER --rows FILE [--workers 4] [--until SECONDS] [--only TEXT]

Programs that others wrote, listed in FOLDER/programs.json: on two cores each, as many at once as there are workers, and
where there is a GPU, on it one after another. Every advice with a measured gain is followed in a copy of the program,
and timed in fresh processes that alternate with the unchanged program. One row per advice, appended to FILE as soon as
it is known; a program whose rows FILE has is not run again, so that a second command goes on where --until (seconds
from the start) ended the first one. Exit 5 where fewer than 90 % of the printed gains are within 10 % of the followed.
On a machine that has only torch and numpy, with wheels of the other packages unpacked beside:

    PYTHONPATH=src:PACKAGES python benchmarks/followed_programs.py --public FOLDER --rows rows.jsonl \\
        --workers 4 --until 560 --no-record
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from _public_programs import CLOCK, Options, follow_all
from _rows import record, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "measure" / "planted"))

from planted_programs import PROGRAMS, PlantedProgram  # type: ignore[import-not-found]

TURNS = 3
HALF, CLOSE, CONFIRMED = 0.5, 0.1, 0.9


def seconds_of(programs: list[Path], seconds: float) -> list[float]:
    """The time of a step of each program, which take turns."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(TURNS):
        for program, own in zip(programs, times):
            command = [sys.executable, str(CLOCK), json.dumps({"seconds": seconds}), program.name]
            done = subprocess.run(command, cwd=program.parent, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{program}: {done.stderr}")
            own.append(json.loads(done.stderr.splitlines()[-1])["seconds"])
    return [median(own) for own in times]


def profiled(script: Path, patch: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "recperf", "profile", "--script", script.name, "--json", "--no-report"]
    command += ["--patch", patch.name, "--run-dir", "profile"]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def measured(case: PlantedProgram, steps: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        slow, fast, patched = (Path(name, f"{kind}.py") for kind in ("train", "fast", "patched"))
        text = best = case.text.replace("STEPS", str(steps))
        for old, new in case.fast.items():
            assert old in best, old
            best = best.replace(old, new)
        slow.write_text(text)
        fast.write_text(best)
        patch = Path(name, "fixes.patch")
        report = profiled(slow, patch)
        programs = [slow, fast]
        if patch.exists():
            patched.write_text(text)
            subprocess.run(["patch", "-s", patched.name, patch.name], cwd=name, check=True)
            programs.append(patched)
        before, known, *after = seconds_of(programs, seconds)
    first: dict[str, Any] = next((one for one in report["advice"] if one["status"] == "tried"), {})
    named = next((one for one in report["advice"] if one["name"] == "patch" and one["measured_gain"]), first)
    limit = report["verdict"]["limit"]
    line = next(number for number, one in enumerate(text.splitlines(), 1) if case.slow in one)
    lines = {place["line"] for place in report["places"][:3]}
    # A setting acts elsewhere: then the advice names its line.
    lines |= {line for one in report["advice"] if f"train.py:{line}" in one["seen"]}
    gain = before / after[0] if after else 1.0
    printed = named.get("measured_gain")
    reached = (before - before / gain) / max(before - known, 1e-12)
    conditions = {
        "limit": limit, "limit_right": limit in case.limits, "confidence": report["verdict"]["confidence"],
        "line_named": line in lines, "best_known_gain": before / known, "followed_gain": gain,
        "printed_gain": printed, "printed_range": named.get("measured_range"), "change": first.get("change"),
        "advice": first.get("name"), "step_ms": before * 1e3, "other_work": report["other_work"],
        "best_known_advised": gain >= HALF * before / known,
    }  # fmt: skip
    print(
        f"{case.name:36} {limit:10} {'' if limit in case.limits else 'WRONG '}{'' if line in lines else 'OTHER LINE '}"
        f"best {before / known:6.2f}  followed {gain:6.2f}  printed {printed or 0:6.2f}  {first.get('name')}",
        flush=True,
    )
    return row("followed_programs", case.name, "reached", "part of the best known saving", [reached], conditions)


def public(options: argparse.Namespace) -> int:
    import torch

    began = time.monotonic()
    if options.rows is None:
        sys.exit("--public needs --rows FILE")
    for hidden in [{"CUDA_VISIBLE_DEVICES": ""}, *([{}] * torch.cuda.is_available())]:
        # Ceilings, so that programs beside each other need not measure them.
        subprocess.run([sys.executable, "-m", "recperf", "peaks", "--quick", "--quiet"], env={**os.environ, **hidden})
    limits = {"cpu": options.limit, "gpu": options.gpu_limit}
    until = began + options.until
    chosen = Options(options.public, options.rows, options.only, options.seconds, options.workers, limits, until)
    facts = [entry["conditions"] for entry in follow_all(chosen)]
    timed = [one for one in facts if one.get("followed_gain")]
    close = sum(abs(one["off"]) <= CLOSE for one in timed)
    print(f"{close} of {len(timed)} printed gains within 10 %; {len(facts) - len(timed)} rows without a followed gain")
    return 0 if close >= CONFIRMED * len(timed) else 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name contains this text")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each independent timing")
    parser.add_argument("--no-record", action="store_true", help="print the figures only")
    parser.add_argument("--public", type=Path, help="folder with programs.json")
    parser.add_argument("--rows", type=Path, help="file for the rows of public programs")
    parser.add_argument("--workers", type=int, default=1, help="public programs on cores beside each other")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a public program on cores")
    parser.add_argument("--gpu-limit", type=float, default=110.0, help="seconds for a public program on the GPU")
    parser.add_argument("--until", type=float, default=math.inf, help="seconds after which public programs end")
    options = parser.parse_args()
    if options.public:
        return public(options)
    entries = []
    for case in PROGRAMS:
        if options.only in case.name:
            entries.append(measured(case, options.steps, options.seconds))
    facts = [entry["conditions"] for entry in entries]
    right = sum(one["limit_right"] and one["line_named"] for one in facts)
    gained = sum(one["best_known_advised"] for one in facts)
    close = sum(abs((one["printed_gain"] or 1.0) / one["followed_gain"] - 1) <= CLOSE for one in facts)
    print(f"{right} limits and lines right, {gained} gain half of the best known, {close} printed gains within 10 %, "
          f"of {len(entries)}" + ("" if options.no_record else f"; rows in {record(entries)}"))  # fmt: skip
    return 0 if right == gained == close == len(entries) else 5


if __name__ == "__main__":
    sys.exit(main())
