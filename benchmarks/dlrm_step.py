"""A training step of the dlrm workload beside the public DLRM's loop, in one run.

The peer is an imitation of the public loop (dlrm_peer.py). Ours is what `recperf run dlrm --preset NAME` trains with;
nothing logs or saves on either side. Rounds of the two alternate, so that other work hits both, and each reading is a
round. Steps a second count everything a step needs, making its batch included; the peer's own figure, which leaves the
batch out, stands beside it. On a GPU ours is also taken in every precision and by the plain path; a round begins and
ends with an empty queue. `--device cpu --precision bfloat16` takes ours in bfloat16 too: the loss of the last step
stands beside that of float32 after as many steps.

Run as `python benchmarks/dlrm_step.py --device cpu --preset experiment`. Exits with 5 where the goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from _rows import record, row, show
from dlrm_peer import PublicLoop
from recperf.train.config import PLAIN, FastConfig
from recperf.train.device import Settings, applied
from recperf.train.loop import Order, take_step
from recperf.workloads.dlrm.build import PreparedDLRM
from recperf.workloads.dlrm.config import DLRMWorkloadConfig, experiment, intended

PRESETS: dict[str, Callable[[], DLRMWorkloadConfig]] = {"experiment": experiment, "intended": intended}
GOAL_RATIO = {"experiment": 1.7}
"""Times the peer's steps a second on a CPU."""
GOAL_MS = {"experiment": 0.16, "intended": 0.40}
"""Milliseconds of a step on one NVIDIA H200."""


@dataclass(frozen=True)
class Lengths:
    rounds: int
    steps: int
    """Ours in a round."""
    peer: int
    """The peer's in a round."""
    warm_up: int
    """Steps of ours before each round on a GPU, whose clock may have fallen while the peer was making its batches."""


LENGTHS = {
    ("cpu", "experiment"): Lengths(15, 5, 5, 0),
    ("cpu", "intended"): Lengths(8, 3, 3, 0),
    ("cuda", "experiment"): Lengths(5, 500, 10, 20),
    ("cuda", "intended"): Lengths(5, 500, 3, 20),
}


class Ours:
    """One of our ways, trained on through all rounds."""

    def __init__(self, config: DLRMWorkloadConfig) -> None:
        self.prepared = PreparedDLRM(config)
        self.recipe = self.prepared.trial(config.seed).recipe
        self.recipe.model.train()
        self.batches, self.step = _endless(self.recipe.order), 0
        self.loss = math.nan
        """Of the last step."""

    @property
    def settings(self) -> Settings:
        return self.prepared.settings

    def take(self, steps: int) -> float:
        """Seconds of so many steps."""
        with applied(self.settings):
            began = _now(self.settings.device)
            for _ in range(steps):
                loss, _ = take_step(self.recipe, self.batches, self.step)
                self.step += 1
            seconds = _now(self.settings.device) - began
            self.loss = float(loss)
            return seconds


def _endless(order: Order) -> Iterator[Any]:
    return itertools.chain.from_iterable(order.batches(epoch) for epoch in itertools.count())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def ways(fast: FastConfig, device: str, also: Any = None) -> dict[str, FastConfig]:
    """The preset's own way first."""
    found = {"recperf": fast}
    if also:
        found[f"recperf, {also}"] = replace(fast, precision=also)
    if device == "cuda":
        found["recperf, plain path"] = PLAIN
        for precision in ("tf32", "float32"):
            found[f"recperf, {precision}"] = replace(fast, precision=precision)
    return found


@dataclass(frozen=True)
class Readings:
    ours: dict[str, list[float]]
    """Seconds of a step by way, a reading a round, making its batch included."""
    peer: list[float]
    printed: list[float]
    """As the peer prints them: without making the batch."""


def measure(sides: dict[str, Ours], peer: PublicLoop, lengths: Lengths) -> Readings:
    found = Readings({name: [] for name in sides}, [], [])
    for ours in sides.values():
        ours.take(2)
    peer.step()
    for _ in range(lengths.rounds):
        began = _now(peer.device)
        printed = [peer.step()[1] for _ in range(lengths.peer)]
        found.peer.append((_now(peer.device) - began) / lengths.peer)
        found.printed.append(statistics.fmean(printed))
        for name, ours in sides.items():
            if lengths.warm_up:
                ours.take(lengths.warm_up)
            found.ours[name].append(ours.take(lengths.steps) / lengths.steps)
    return found


def entries(found: Readings, sides: dict[str, Ours], preset: str, lengths: Lengths) -> list[dict[str, Any]]:
    first = next(iter(sides.values()))
    config = first.prepared.config
    shared = {
        "preset": preset,
        "device": first.settings.device_name,
        "batch": config.train.batch_size,
        "table_rows": list(config.dlrm.rows),
        "ids_per_bag": config.data.ids_per_bag,
        "rounds": lengths.rounds,
        "steps_a_round": {"recperf": lengths.steps, "public imitation": lengths.peer},
    }

    def entry(variant: str, metric: str, unit: str, values: list[float], **more: Any) -> dict[str, Any]:
        return row("dlrm_step", f"{variant}, {preset}", metric, unit, values, shared | more)

    peer = {"settings": {"threads": torch.get_num_threads(), "precision": "float32"}}
    made = [
        entry("public imitation", "throughput", "steps/s", _rates(found.peer), **peer, **_ms(found.peer)),
        entry("public imitation", "as it prints", "ms", [one * 1e3 for one in found.printed], **peer),
    ]
    for name, seconds in found.ours.items():
        settings = {"settings": sides[name].settings.reasons, "loss": sides[name].loss, "steps": sides[name].step}
        ratios = [theirs / mine for theirs, mine in zip(found.peer, seconds)]
        printed = [theirs / mine for theirs, mine in zip(found.printed, seconds)]
        made += [
            entry(name, "throughput", "steps/s", _rates(seconds), **settings, **_ms(seconds)),
            entry(f"{name} / public", "ratio", "x", ratios, counted="the peer's data too"),
            entry(f"{name} / public", "ratio, printed", "x", printed, counted="without the peer's data"),
        ]
    return made


def _rates(seconds: list[float]) -> list[float]:
    return [1 / one for one in seconds]


def _ms(seconds: list[float]) -> dict[str, float]:
    return {"ms_a_step": statistics.median(seconds) * 1e3}


def goal_missed(found: Readings, preset: str, device: str) -> str | None:
    """What the preset's own way was to reach and did not."""
    ours = found.ours["recperf"]
    ms = statistics.median(ours) * 1e3
    ratio = statistics.median(theirs / mine for theirs, mine in zip(found.peer, ours))
    if device == "cuda" and ms > GOAL_MS[preset]:
        return f"a step takes {ms:.3f} ms, the goal is {GOAL_MS[preset]:.2f}"
    if device == "cpu" and ratio < GOAL_RATIO.get(preset, 0):
        return f"{ratio:.2f} times the peer's steps a second, the goal is {GOAL_RATIO[preset]:.2f}"
    return None


def options(words: list[str]) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", choices=list(PRESETS), default="experiment")
    parser.add_argument("--steps", type=int, help="of ours in a round; on a CPU of the peer too")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--precision", choices=["bfloat16"], help="on a CPU: beside float32")
    parser.add_argument("--no-record", action="store_true", help="print the rows and append them nowhere")
    chosen = parser.parse_args(words)
    for name in ("steps", "rounds"):
        if getattr(chosen, name) is not None and getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return chosen


def chosen_lengths(chosen: argparse.Namespace) -> Lengths:
    lengths = LENGTHS[chosen.device, chosen.preset]
    if chosen.steps:
        peer = chosen.steps if chosen.device == "cpu" else lengths.peer
        lengths = replace(lengths, steps=chosen.steps, peer=peer)
    return replace(lengths, rounds=chosen.rounds or lengths.rounds)


def main(words: list[str]) -> int:
    chosen = options(words)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("nothing to measure: torch sees no GPU here")
        return 4
    preset, device, lengths = chosen.preset, chosen.device, chosen_lengths(chosen)
    config = PRESETS[preset]()
    config = replace(config, train=replace(config.train, device=device))
    compared = ways(config.fast, device, chosen.precision)
    sides = {name: Ours(replace(config, fast=fast)) for name, fast in compared.items()}
    found = measure(sides, PublicLoop(config, device), lengths)
    made = entries(found, sides, preset, lengths)
    for entry in made:
        ms = entry["conditions"].get("ms_a_step")
        loss = entry["conditions"].get("loss")
        print(show(entry) + (f" = {ms:,.3f} ms a step" if ms else "") + (f", loss {loss:.5f}" if loss else ""))
    if not chosen.no_record:
        print(f"rows appended to {record(made).name}")
    missed = goal_missed(found, preset, device)
    if missed:
        print(f"goal missed: {missed}")
    return 5 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
