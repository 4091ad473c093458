"""What a resumed run may change: the contract is every field of its config that could change a number.

The contract stands in config.json and in each checkpoint. A field in it that differs is refused by name, unless the
user allowed that change; then config.json remembers it, since the next checkpoint may be hours away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..config import flatten, to_json
from ..errors import ConfigError, UsageError, closest
from ..files import write_json
from ..jsonfile import read
from .record import CONFIG_SCHEMA, now, read_saved_config

FREE = (
    "data.path", "data.workers", "train.checkpoint_*", "train.keep_last",
    "distributed.sharding", "distributed.placement", "distributed.timeout_s", "distributed.pipeline",
)  # fmt: skip
"""Fields outside the contract: where the data lies (its digest is compared anyway), who fetches it, when to save, and
which rank holds what."""


@dataclass(frozen=True)
class Change:
    field: str
    was: Any
    now: Any

    @property
    def text(self) -> str:
        return f"{self.field} is {self.now!r}; this run has {self.was!r}"


def fields_of(config: Any) -> dict[str, Any]:
    """Every field of a config under its dotted name, as JSON values."""
    return flatten(to_json(config))


def contract_of(config: Any) -> dict[str, Any]:
    """What a run is bound to."""
    return {name: value for name, value in fields_of(config).items() if not is_free(name)}


def noted_of(config: Any) -> dict[str, Any]:
    """The contract, and what may change freely but is noted when it does: how tables are divided among ranks, say."""
    return {name: value for name, value in fields_of(config).items() if not is_free(name) or _is_noted(name)}


def free_changes(was: Any, now: Any) -> list[Change]:
    """Fields outside the contract whose changes are noted all the same."""
    return [change for change in changes(noted_of(was), noted_of(now)) if is_free(change.field)]


def _is_noted(field: str) -> bool:
    return field.startswith("distributed.")


def is_free(field: str) -> bool:
    return any(fnmatchcase(field, pattern) for pattern in FREE)


def changes(was: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Fields that both know and that differ; one that a later version added has no earlier value to differ from."""
    return [Change(name, was[name], now[name]) for name in was if name in now and was[name] != now[name]]


def require_allowed(found: list[Change], allow: Iterable[str], where: dict[str, object]) -> None:
    """Refuse the first change that was not allowed, by name."""
    refused = [change for change in found if change.field not in set(allow)]
    if refused:
        raise ConfigError(
            refused[0].text,
            where={"field": refused[0].field, **where},
            fix=" ".join(f"--allow-change {change.field}" for change in refused) + ", or a new run",
        )


def known_fields(named: Iterable[str], config: Any) -> tuple[str, ...]:
    """The fields that --allow-change names, as the config spells them."""
    known = fields_of(config)
    found = []
    for word in named:
        field = word.replace("-", "_")
        if field not in known:
            guess = closest(field, known)
            raise UsageError(
                f"--allow-change {word}: no field of this config" + (f"; did you mean {guess!r}?" if guess else ""),
                fix="recperf show names every field",
            )
        if field == "seed":
            raise UsageError(
                "--allow-change seed: a run's seeds are its trainings; another one is another run",
                fix="recperf run --config RUN --seed N starts one",
            )
        found.append(field)
    return tuple(found)


def remember(folder: Path, config: Any, found: list[Change]) -> bytes:
    """Write what a resumed run is run with into its config.json; gives what was there before."""
    path = folder / "config.json"
    saved, before = read_saved_config(path), path.read_bytes()
    values = {"schema": CONFIG_SCHEMA, "workload": saved.workload, "config": to_json(config)}
    changed = [*read(path).get("changed", []), *({**vars(change), "when": now()} for change in found)]
    write_json(path, {**values, **({"changed": changed} if changed else {})})
    return before


def allowed_before(folder: Path) -> tuple[str, ...]:
    """Fields that were changed on purpose since the run began."""
    return tuple(dict.fromkeys(change.field for change in read_saved_config(folder / "config.json").changed))
