"""Keeping a trial across interruptions."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RecperfError
from ..runs.record import Run
from ..train.checkpoint import CheckpointStore
from ..train.loop import Position
from ..train.stop import StopFlag
from ..train.watch import Evaluator
from .base import Trial


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Keeps a trial across interruptions: its state, its scores, and how much of the log belongs to them."""

    seed: int
    trial: Trial
    evaluator: Evaluator
    run: Run
    store: CheckpointStore
    stop: StopFlag

    def restore(self) -> Position:
        """Where to go on; the log is cut back to that moment, so that no step is in it twice."""
        saved = self.store.load()
        if saved is None:
            self.run.forget_events(self.seed)
            return Position()
        self.trial.restore(saved["trial"])
        self.evaluator.history.extend(saved["history"])
        self.run.rewind_events(saved["event_bytes"], saved["event_digest"])
        return Position(**saved["position"])

    def save(self, position: Position, best: bool) -> None:
        state = {
            "trial": self.trial.state(),
            "position": vars(position),
            "history": self.evaluator.history,
            "event_bytes": self.run.event_bytes,
            "event_digest": self.run.event_digest(),
        }
        self.store.save(position.step, state, best=best)

    def stopped(self, position: Position) -> RecperfError:
        text = f"stopped by signal {self.stop.received} at step {position.step}"
        self.run.event("notice", seed=self.seed, text=text)
        return self.stop.error(
            f" at step {position.step} of {self.trial.recipe.steps}; the state is saved",
            f"recperf run --resume {self.run.folder}",
        )
