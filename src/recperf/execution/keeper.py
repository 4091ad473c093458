"""Keeping a trial across interruptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..distributed.launch import is_peer_failure
from ..distributed.world import current
from ..errors import ConfigError, DataError, RecperfError
from ..machine import available_bytes, out_of_memory
from ..runs.record import Run
from ..runs.resume import changes, is_free, require_allowed
from ..train.checkpoint import CheckpointStore
from ..train.checkpoint_tree import tensor_bytes, unlike
from ..train.config import TrainConfig
from ..train.loop import Position
from ..train.stop import StopFlag
from ..train.watch import Evaluator
from ..units import size
from .workload import Trial

PARTS = ("trial", "position", "history", "rng", "contract", "baselines", "event_bytes", "event_digest", "mlperf")
"""What a state has."""


class Rewindable(Protocol):
    """A log that can be cut back to a moment it described."""

    def state(self) -> dict[str, Any]: ...

    def rewind(self, state: dict[str, Any] | None) -> None: ...


def in_background(config: TrainConfig, state_bytes: int, notice: Callable[[str], None] = lambda text: None) -> bool:
    """Whether checkpoints are written while training goes on: that takes a copy of the state in memory.

    `auto` wants room for four, since the system needs memory for the files too.
    """
    if config.checkpoint_background != "auto":
        return config.checkpoint_background == "on"
    if 4 * state_bytes <= available_bytes():
        return True
    notice(
        f"checkpoints are written while training waits: four copies of a state of {size(state_bytes)} "
        "do not fit into memory"
    )
    return False


def open_store(folder: Path, trial: Trial, config: TrainConfig, notice: Callable[[str], None]) -> CheckpointStore:
    """The checkpoints of a trial, as its config wants them kept."""
    if current().size > 1:
        if config.checkpoint_background == "on":
            notice("checkpoints are written while training waits: several ranks write them together")
        return CheckpointStore(folder=folder, notice=notice, keep_last=config.keep_last)
    background = in_background(config, tensor_bytes(trial.state()), notice)
    return CheckpointStore(folder=folder, notice=notice, keep_last=config.keep_last, background=background)


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Keeps a trial across interruptions: its state, its scores, and how much of the logs belongs to them."""

    seed: int
    trial: Trial
    evaluator: Evaluator
    run: Run
    store: CheckpointStore
    stop: StopFlag
    contract: dict[str, Any] = field(default_factory=dict)
    """The fields of the config that a state is bound to, and free ones whose changes are noted."""
    allow: tuple[str, ...] = ()
    """Those of them that may differ all the same."""
    log: Rewindable | None = None

    def restore(self) -> Position:
        """Where to go on; the logs are cut back to that moment, so that no step is in them twice."""
        into = {"trial": self.trial.state()}
        saved = self.store.load(into=into)
        if saved is None:
            self.run.forget_events(self.seed)
            if self.log:
                self.log.rewind(None)
            return Position()
        lacking = [part for part in PARTS if part not in saved]
        if lacking:
            raise DataError(f"the checkpoint has no {lacking[0]}", where={"folder": self.store.folder})
        noted = changes(saved["contract"], self.contract)
        found = [change for change in noted if not is_free(change.field)]
        require_allowed(found, self.allow, {"run": self.run.folder, "checkpoint": f"step {saved['position']['step']}"})
        if not any(change.field.startswith("data.") for change in found):
            self._require_baselines(saved["baselines"])
        self._restore_trial(into["trial"], saved["trial"], [change.text for change in found])
        self.evaluator.history.extend(saved["history"])
        _set_random_state(saved["rng"])
        self.run.rewind_events(saved["event_bytes"], saved["event_digest"])
        if self.log:
            self.log.rewind(saved["mlperf"])
        for change in noted:
            text = f"{change.field} changed from {change.was!r} to {change.now!r}"
            self.run.event("notice", seed=self.seed, text=f"{text} after step {saved['position']['step']}")
        return Position(**saved["position"])

    def _require_baselines(self, digest: str | None) -> None:
        """They go into the result as they are, so a changed figure must not."""
        if self.run.digest("baselines.json") != digest:
            raise DataError(
                "baselines.json was changed since its checkpoint",
                where={"run": self.run.folder},
                fix="remove it: it is made again at the next start",
            )

    def _restore_trial(self, ours: dict[str, Any], saved: dict[str, Any], changed: list[str]) -> None:
        # Copying would stretch a tensor of one number over a larger one without a word. Other parts of a state may
        # have shapes that depend on what was seen.
        misfit = unlike({part: ours[part] for part in ("model", "optimizer") if part in ours}, saved)
        if misfit is None:
            try:
                self.trial.restore(saved)
                return
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                if out_of_memory(error) or is_peer_failure(error):
                    raise
                misfit = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            "the saved state does not fit this config" + (f": {'; '.join(changed)}" if changed else ""),
            where={"run": self.run.folder, "state": misfit},
            fix="resume with the config it was saved with, or start a new run",
        )

    def save(self, position: Position, best: bool) -> None:
        self.run.sync_events()
        state = {
            "trial": self.trial.state(),
            "position": vars(position),
            "history": self.evaluator.history,
            "rng": _random_state(),
            "contract": self.contract,
            "baselines": self.run.digest("baselines.json"),
            "event_bytes": self.run.event_bytes,
            "event_digest": self.run.event_digest(),
            "mlperf": self.log.state() if self.log else None,
        }
        self.store.save(position.step, state, best=best)

    def stopped(self, position: Position) -> RecperfError:
        # What is said to be saved must be on disk.
        self.store.wait()
        text = f"stopped by signal {self.stop.received} at step {position.step}"
        self.run.event("notice", seed=self.seed, text=text)
        return self.stop.error(
            f" at step {position.step} of {self.trial.recipe.steps}; the state is saved",
            f"recperf run --resume {self.run.folder}" + (f" --ranks {ranks}" if (ranks := current().size) > 1 else ""),
        )


def _random_state() -> dict[str, Any]:
    """Of torch's generators. Nothing here draws from them, but a user's own model may."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if used else []}


def _set_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["cpu"])
    if torch.cuda.is_available():
        for index, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
