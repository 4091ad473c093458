"""When a training is evaluated, saved and stopped: the loop and its watchers with a model that only counts steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recperf.errors import Stopped
from recperf.train.cadence import every
from recperf.train.loop import Position, Recipe, train
from recperf.train.timing import StepTimer
from recperf.train.watch import Evaluator, LossLog, TargetMet, Watchers


class Counting:
    """A model, its optimizer and its order in one; the score is the number of steps."""

    def __init__(self, batches: int = 10) -> None:
        self.count, self.training, self.length = 0, True, batches
        self.modes: list[bool] = []
        self.gradients: list[bool] = []

    def __len__(self) -> int:
        return self.length

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return iter([[0]] * (self.length - start))

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.training
        return torch.tensor(1.0, requires_grad=True)

    def step(self, learning_rate: float) -> None:
        self.count += 1

    def gradient_norm(self) -> torch.Tensor:
        return torch.tensor(float(self.count))

    def score(self, at: Position) -> dict[str, float]:
        self.modes.append(self.training)
        self.gradients.append(torch.is_grad_enabled())
        return {"auc": self.count / 100}


class Watched:
    """One training; `saved` are positions with the history at that moment."""

    def __init__(self, *, epochs: int = 2, max_steps: int = 0, enough: float = 9.0, **options: Any) -> None:
        self.counting = Counting()
        self.recipe = Recipe(
            model=self.counting, optimizer=self.counting, order=self.counting, learning_rate=lambda _: 0.1,
            epochs=epochs, max_steps=max_steps,
        )  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self.saved: list[tuple[Position, bool, list[int]]] = []
        self.stop_at = 0
        self.evaluator = Evaluator(
            recipe=self.recipe,
            score=self.counting.score,
            emit=self.emit,
            seed=1,
            enough=lambda metrics: metrics["auc"] >= enough,
        )
        self.watch = Watchers(
            recipe=self.recipe,
            losses=LossLog(emit=self.emit, seed=1),
            timer=StepTimer(emit=self.emit, seed=1),
            evaluator=self.evaluator,
            save=self.save,
            progress=lambda *_: None,
            should_stop=lambda: self.counting.count == self.stop_at,
            stopped=lambda _: KeyboardInterrupt(),
            **options,
        )

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})

    def save(self, position: Position, best: bool) -> None:
        # Every loss must be logged before a state is saved.
        assert sum(event["kind"] == "step" for event in self.events) == position.step
        self.saved.append((position, best, self.scored))

    @property
    def scored(self) -> list[int]:
        return [entry["step"] for entry in self.evaluator.history]

    def train(self, start: Position | None = None) -> Position:
        return train(self.recipe, start or Position(), self.watch)


def test_evaluations_every_n_steps_and_once_at_the_end_of_an_epoch() -> None:
    watched = Watched(evaluate_due=every(5))
    watched.train()
    assert watched.scored == [5, 10, 15, 20]
    assert [entry["epoch"] for entry in watched.evaluator.history] == [0, 1, 1, 2]
    assert watched.saved[0] == (Position(0, 5, 5), True, [5])
    assert [position.step for position, _, _ in watched.saved] == [5, 10, 15, 20]
    cut = Watched(max_steps=13, evaluate_due=every(13))
    cut.train()
    assert cut.scored == [10, 13]


def test_evaluation_mode_has_no_gradients_and_ends() -> None:
    watched = Watched(evaluate_due=every(3))
    watched.train()
    assert len(watched.counting.modes) == 8
    assert not any(watched.counting.modes)
    assert not any(watched.counting.gradients)
    assert watched.counting.training


@pytest.mark.parametrize(("enough", "step"), [(0.06, 6), (0.10, 10), (0.11, 12)])
def test_training_stops_at_the_first_score_that_meets_the_target(enough: float, step: int) -> None:
    watched = Watched(evaluate_due=every(3), enough=enough)
    with pytest.raises(TargetMet):
        watched.train()
    assert watched.counting.count == step
    assert watched.evaluator.met
    position, best, scored = watched.saved[-1]
    assert (position.step, best) == (step, True)
    assert scored[-1] == step


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("position", [Position(0, 8, 8), Position(1, 0, 10)])
def test_a_signal_before_or_in_an_evaluation_leaves_it_to_the_resumed_training(
    before: bool, position: Position
) -> None:
    watched = Watched(evaluate_due=every(4), save_scored=False)
    score, stops = watched.evaluator.score, [position.step]

    def abandon(at: Position) -> dict[str, float]:
        if at.step in stops:
            stops.clear()
            raise Stopped("stopped by SIGTERM")
        return score(at)

    if before and position.batch:
        watched.stop_at = position.step
    else:
        watched.evaluator.score = abandon
    with pytest.raises(KeyboardInterrupt):
        watched.train()
    done = [4] if position.batch else [4, 8]
    assert watched.saved == [(position, False, done)]
    watched.stop_at = 0
    watched.watch.before_training(position)
    watched.train(position)
    assert watched.scored == [4, 8, 10, 12, 16, 20]


@pytest.mark.parametrize(("max_steps", "position"), [(0, Position(1, 10, 20)), (13, Position(1, 3, 13))])
def test_a_signal_in_the_last_step_leaves_its_score_to_the_resumed_training(max_steps: int, position: Position) -> None:
    watched = Watched(max_steps=max_steps)
    watched.stop_at = position.step
    with pytest.raises(KeyboardInterrupt):
        watched.train()
    assert watched.saved[-1] == (position, False, [10])
    watched.stop_at = 0
    end = watched.train(position)
    assert watched.scored == [10, position.step]
    assert watched.counting.count == position.step
    # Resumed once more at the end, it evaluates nothing twice.
    watched.train(end)
    assert watched.scored == [10, position.step]
