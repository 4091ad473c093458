"""Bring the plan's figures of an H200 up to date with the newest stored rows of recperf's own kernels and steps.

* attention: FLOP/s by length of rows, as timed in CUDA graphs (`hstu_attention.py`), into plan/devices.toml;
* the share of the copy rate that a step's passes over memory reach, fitted to two steps (`dlrm_v4_step.py`,
  `plan_validate.FITTED`), into plan/devices.py and docs/planning.md;
* the seconds in which one thread prepares a sample, where small steps of dlrm-v4 take as long as that
  (`default_speed.py`), into workloads/dlrm_v4/plan.py and docs/planning.md.

Run as `python benchmarks/plan_refit.py` and commit; then `python benchmarks/plan_validate.py --only known` stores
predictions with these figures, and `python benchmarks/plan_refit.py --table` copies their table into docs/planning.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from _rows import ROOT
from plan_validate import FITTED, current, on_h200, own_seconds, own_steps, table
from recperf.plan.devices import KNOWN, Attention, Device
from recperf.plan.predict import predict
from recperf.workloads.dlrm_v4.config import DLRM_V4

TOML, DEVICES, PAGE = (
    ROOT / path for path in ("src/recperf/plan/devices.toml", "src/recperf/plan/devices.py", "docs/planning.md")
)
WORKLOAD = ROOT / "src/recperf/workloads/dlrm_v4/plan.py"
SMALL_STEP = "dlrm-v4, cuda default"
TIMING = "graph of 10 calls"
"""In a step the queue is never empty either."""


def attention() -> Attention:
    """Rates of the newest rows: equal lengths, the model's width. On an H200 the order of its sums is fixed."""
    rates: dict[tuple[str, int], float] = {}
    for entry in on_h200("hstu_attention", "rate"):
        at = entry["conditions"]
        if (
            at.get("timing") == TIMING
            and at["who"] == "recperf"
            and at["shortest"] == at["longest"]
            and at["qk"] == 128
        ):
            rates[at["what"], at["longest"]] = entry["p50"]
    lengths = tuple(sorted(length for what, length in rates if what == "forward"))
    if not lengths:
        sys.exit(f"plan_refit.py: hstu_attention.jsonl has no rows of an H200 timed as a {TIMING}: run it there")
    passes = (tuple(round(rates[what, length]) * 1e12 for length in lengths) for what in ("forward", "backward"))
    forward, backward = passes
    return Attention(lengths=lengths, forward=forward, backward=backward)


def passes_share(device: Device) -> float:
    """The share of the copy rate that fits the steps best, the share of products being as it is: both together are not
    determined, because steps with more products have more passes in proportion."""
    seconds, left = [], []
    for name in FITTED:
        step = own_steps()[name]
        whole, slower = (
            own_seconds(step, replace(device, efficiency=replace(device.efficiency, bytes=share)))
            for share in (1.0, 0.5)
        )
        seconds.append((slower - whole) / step["ms"])
        left.append((step["ms"] / 1e3 - (2 * whole - slower)) / step["ms"])
    # Least squares of the relative errors.
    return float(sum(one * one for one in seconds) / sum(one * other for one, other in zip(seconds, left)))


def prepare_seconds() -> float | None:
    """Of a sample on the host of an H200; None if the laptop preset waits for the GPU, or has no new row."""
    rows = on_h200("default_speed", "samples_per_s")
    rates = [one["p50"] for one in rows if one["variant"] == SMALL_STEP and current(one)]
    if not rates:
        return None
    plan = predict(DLRM_V4.planned(next(iter(DLRM_V4.presets.values()))()), 1, KNOWN["h200"])
    return 1 / rates[-1] if plan.parts["calls"] < plan.global_batch / rates[-1] else None


def substitute(path: Path, pattern: str, new: str) -> None:
    """Replace what matches; a pattern that does not match once is an error."""
    text, count = re.subn(pattern, lambda _: new, path.read_text(), flags=re.DOTALL)
    if count != 1:
        sys.exit(f"plan_refit.py: {path.name}: {count} places match {pattern!r}, 1 expected")
    path.write_text(text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="figures of an H200 in plans, from the newest stored rows")
    parser.add_argument("--table", action="store_true", help="only copy the table of predictions into docs/planning.md")
    parser.add_argument("--dry", action="store_true", help="print the figures, change no file")
    options = parser.parse_args(arguments)
    if options.table:
        substitute(PAGE, r"\| case \| predicted .*?\n\n", table() + "\n\n")
        return 0
    kernel = attention()
    passes = passes_share(replace(KNOWN["h200"], attention=kernel))
    lines = [
        f"{name} = [{', '.join(str(length) if name == 'lengths' else f'{length / 1e12:.0f}e12' for length in values)}]"
        for name, values in (("lengths", kernel.lengths), ("forward", kernel.forward), ("backward", kernel.backward))
    ]
    prepare_s = prepare_seconds()
    print("\n".join(lines) + f"\npasses over memory at {passes:.3f} of the copy rate")
    print("preparing a sample: " + (f"{1e6 * prepare_s:.1f} µs" if prepare_s else "not known, unchanged"))
    if options.dry:
        return 0
    if not 0 < passes <= 1:
        sys.exit("plan_refit.py: such a share means that work is counted wrongly (models/dlrm_v4/cost.py, passes)")
    substitute(TOML, r"(?<=\[attention\.recperf\.h200\]\n).*?(?=\norigin)", "\n".join(lines))
    substitute(DEVICES, r"(?<=    bytes: float = )[\d.]+", f"{passes:.2f}")
    substitute(PAGE, r"(?<=besides the products, at )[\d.]+(?= of the copy)", f"{passes:.2f}")
    if prepare_s:
        docstring = '"""Seconds in which one thread prepares a sample, on a Xeon (default_speed.jsonl)."""'
        substitute(WORKLOAD, r'(?<=PREPARE_S = )\S+\n""".*?"""', f"{1e6 * prepare_s:.0f}e-6\n{docstring}")
        substitute(PAGE, r"(?<=\| preparing a batch \| )\d+(?= µs a sample)", f"{1e6 * prepare_s:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
