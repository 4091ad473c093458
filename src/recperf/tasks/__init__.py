"""What trains, chooses an epoch, compares or reports asks the task of a workload or of a result. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .declared import CLICK_LABELS, EVENT_LABELS, NEXT_ITEM, TASKS
from .task import ORACLES, Task

__all__ = ["CLICK_LABELS", "EVENT_LABELS", "NEXT_ITEM", "ORACLES", "TASKS", "Task", "baseline_to_beat"]
__all__ += ["chosen_evaluation", "leading_metrics", "merit", "of"]


def leading_metrics() -> tuple[str, ...]:
    return tuple(dict.fromkeys(task.leading for task in TASKS))


def of(metrics: Iterable[str]) -> Task:
    """The task of a run, by the names of its metrics: the first task that is compared by one of them."""
    names = set(metrics)
    return next((task for task in TASKS if task.leading in names), TASKS[0])


def merit(metrics: Mapping[str, float]) -> float:
    """What the evaluations of a training are compared by; higher is better."""
    return of(metrics).merit(metrics)


def chosen_evaluation(history: Sequence[Mapping[str, float]]) -> int:
    """Which evaluation has the weights that a training ends with, from their metrics: the one with the most merit or,
    where no rows choose the epoch, the last."""
    task = of(history[-1])
    if task.choosing not in history[-1]:
        return len(history) - 1
    return max(range(len(history)), key=lambda place: task.merit(history[place]))


def baseline_to_beat(beat: str | None, baselines: Mapping[str, Mapping[str, float]]) -> str | None:
    """The baseline that a target's `beat` means: of best, the one with the highest leading metric that does not know
    what no model can."""
    if beat != "best":
        return beat
    leading = {name: of(metrics).leading for name, metrics in baselines.items() if name not in ORACLES}
    scored = {name: baselines[name][metric] for name, metric in leading.items() if metric in baselines[name]}
    return max(scored, key=lambda name: scored[name]) if scored else beat
