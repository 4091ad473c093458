"""Broken rules in plain words: of the official checker, whose own messages quote the code that failed, and of the
benchmark's rules that it does not check."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...jsonfile import decode
from .lines import Lines

_EVALUATION = {
    "% s['eval_interval_samples']": "grid",
    "s['first_eval_samples']": "first",
    "<= 1.0": "range",
    "'samples_count' in": "samples_count",
    "'epoch_num' in": "samples_count",
}
"""The parts of the rules for eval_accuracy, by a piece of their code."""

_REQUIRED = {
    "train_samples: value": "the benchmark has 2,290,835,423 training samples",
    "eval_samples: value": "the benchmark's hold-out has 2,058,204 samples",
    "max_sequence_length: value": "it must be 4096 (open division: a whole number above 0)",
    "opt_name: value": "it must be Adam",
    "opt_base_learning_rate: value": "it must be 0.5 to 1.5 times 1e-6 · global_batch_size / 8192, and come after it",
    "opt_sparse_base_learning_rate: value": "it must be the dense rate (open division: within the same bounds)",
    "opt_adam_beta_1: value": "it must be 0.95",
    "opt_adam_beta_2: value": "it must be 0.999",
    "opt_adam_epsilon: value": "it must be 1e-8",
    "opt_weight_decay: value": "it must be 0",
    "opt_gradient_clip_norm: value": "it must be 1.0",
    "opt_sparse_name: value": "it must be RowWiseAdagrad",
    "opt_learning_rate_warmup_steps: value": "it must be 24000",
    "opt_learning_rate_warmup_start_lr: value": "it must be 0.0",
    "eval_every_data_pct: value": "it must be 0.001",
    "eval_accuracy: grid": "evaluations must lie on multiples of ⌈0.001 · 2,290,835,423 / batch⌉ · batch samples",
    "eval_accuracy: first": "the first evaluation must be at the block its batch size has: 25, 31, 41 at 8192, 16384, "
    "32768",
    "eval_accuracy: range": "it must be 0 to 1",
    "eval_accuracy: target": "no evaluation reached 0.75",
    "init_stop: value": "it must follow init_start within 30 minutes (open division: 240) and come before run_start",
    "init_start: value": "it must come before init_stop and run_start",
    "run_start: value": "it must come after init_stop",
    "run_stop: value": "it must come after run_start and have a status",
    "block_start: value": "it must come after run_start and have samples_count",
    "submission_division: value": "it must be closed or open",
}


PINNED = {"model.hstu.layers": 3, "data.history.length": 4086}
"""Fields of a config that the rules of the closed division fix."""
RATE_BOUNDS, RATE, RATE_BATCH = (0.5, 1.5), 1e-6, 8192
"""A base learning rate must lie within these multiples of this rate, which is for this batch and grows with it."""
WARM_UP = 24_000
"""Steps of the linear warm-up."""
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Failure:
    rule: str
    """Key and kind of rule, such as "seed: once" or "train_samples: value"."""
    text: str
    """What is wrong, in one line."""


def failures(messages: list[tuple[str | None, str]]) -> list[Failure]:
    """One failure per rule: of a rule that fails on many lines, the first line and how many there are."""
    by_rule: dict[str, list[str]] = {}
    for key, message in messages:
        rule, text = _translate(key, message)
        by_rule.setdefault(rule, []).append(text)
    return [
        Failure(rule=rule, text=texts[0] + (f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""))
        for rule, texts in by_rule.items()
    ]


def _translate(key: str | None, message: str) -> tuple[str, str]:
    if count := re.match(
        r"Required (EXACTLY_ONE|AT_LEAST\w*(?:\(\d+\))?) occurrence of (.+?)(?: but found (\d+))?(?: w|$)", message
    ):
        return _occurrence(*count.groups())
    if failed := re.match(r"CHECK for '(.+?)' failed in line (\d+):\n(.*)\nfailed test: (.*)", message):
        return _value(*failed.groups())
    if target := re.match(r"Failed checks for (\w+) :", message):
        rule = f"{target[1]}: target"
        return rule, _REQUIRED.get(rule, " ".join(message.split()))
    if message.startswith("Failed executing"):
        name = key or "the log"
        return f"{name}: undecided", f"{name} cannot be judged: a key that the rule uses is missing or not a number"
    if message.startswith("Could not find config file"):
        return "submission_benchmark: known", "there are no rules for the benchmark or division this log names"
    return f"{key or 'log'}: other", " ".join(message.split())[:300]


def _occurrence(required: str, keys: str, count: str | None) -> tuple[str, str]:
    names = " or ".join(sorted(re.findall(r"'([^']+)'", keys)))
    if required == "EXACTLY_ONE":
        wrong = "is missing" if count == "0" else f"occurs {count} times with different values"
        return f"{names}: once", f"{names} {wrong}; it must occur once"
    return f"{names}: present", f"{names} is missing"


def _value(key: str, line: str, full: str, test: str) -> tuple[str, str]:
    kind = "value"
    if key == "eval_accuracy":
        kind = next((name for code, name in _EVALUATION.items() if code in test), kind)
    rule = f"{key}: {kind}"
    required = _REQUIRED.get(rule, f"the rule is {test.strip()}")
    # The checker counts MLLOG lines from 0.
    return rule, f"{key}{_shown(full, kind)} (event {int(line) + 1}): {required}"


def _shown(full: str, kind: str) -> str:
    """The value of the failing line, or the samples count of an evaluation."""
    try:
        event = decode(full[full.index("{") :].encode())
        if kind in ("grid", "first"):
            return f" at {int(event['metadata']['samples_count']):,} samples"
        value = event["value"]
    except (ValueError, KeyError, TypeError, OverflowError):
        return ""
    return "" if value is None else f" is {value:,}" if type(value) is int else f" is {value!r}"[:80]


def pinned(config: Mapping[str, Any]) -> list[Failure]:
    """Fields of a run's config, by their dotted names, that differ from what the rules fix."""
    return [
        Failure(rule=f"{name}: value", text=f"{name} is {config.get(name)!r}: it must be {value}")
        for name, value in PINNED.items()
        if config.get(name) != value
    ]


def learning_rates(lines: Lines) -> list[Failure] | str:
    """Steps whose logged rate is outside the bounds of the batch: the linear warm-up of the lowest and highest base.
    Or why they cannot be checked."""
    batch = lines.first("global_batch_size")
    if type(batch) is not int or batch < 1:
        # The official checker says so.
        return []
    low, high = (bound * RATE * batch / RATE_BATCH for bound in RATE_BOUNDS)
    outside, stated = [], 0
    for line in lines.good:
        rate = line.metadata.get("lr")
        if line.key == "train_loss" and line.samples is not None and isinstance(rate, int | float):
            stated += 1
            # A loss is logged after its step; the first step has rate 0.
            step = line.samples / batch
            least, most = low * min(1.0, max(0.0, step - 1) / WARM_UP), high * min(1.0, step / WARM_UP)
            if not least * (1 - ROUNDING) <= rate <= most * (1 + ROUNDING):
                outside.append(f"{rate:.4g} after {line.samples:,} samples: it must be {least:.4g} to {most:.4g}")
    if not stated:
        return "learning rate: the log states no rates"
    more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
    return [Failure(rule="train_loss: learning rate", text=f"lr is {outside[0]}{more}")] if outside else []
