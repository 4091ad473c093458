"""The GitHub Action on two equal commits, repeated: how often it raises an alarm, which it never should.

Run as `python benchmarks/action_repeats.py [REPEATS]`, by default 50, on a quiet machine: a repeat takes most of a
minute on two cores, and beside other work it is not judged. Exits with 5 after an alarm.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

from _rows import record, row

ROOT = Path(__file__).parents[1]
ARGUMENTS = ["micro-dlrm", "--data.source", "embedded"]
ROUNDS = 4
GATE = 0.05


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    spec = importlib.util.spec_from_file_location("measure", ROOT / ".github" / "actions" / "measure" / "measure.py")
    assert spec
    assert spec.loader
    action = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = action
    spec.loader.exec_module(action)
    states: Counter[str] = Counter()
    gates, seconds = [], []
    for number in range(repeats):
        began = perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            judgement = action.judge(action.measure(ROOT, ROOT, ARGUMENTS, ROUNDS, Path(folder)), GATE)
        seconds.append(perf_counter() - began)
        states[judgement.state] += 1
        gates += [judgement.gates["step"]] if judgement.gates else []
        print(f"{number + 1:>3}  {judgement.state:<10} {judgement.reason}", flush=True)
    conditions = {"arguments": ARGUMENTS, "rounds": ROUNDS, "gate": GATE, "states": dict(states), "allowed": gates}
    path = record([row("action_repeats", "equal commits", "one comparison", "s", seconds, conditions)])
    print(f"{dict(states)}; row appended to {path.name}")
    if states["slower"]:
        sys.exit(5)


if __name__ == "__main__":
    main()
