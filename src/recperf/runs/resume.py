"""Which fields of its config a resumed run may change.

Fixed fields are those that could change a number. They are saved in config.json and in each checkpoint. A fixed field
that differs is refused by name unless the user allowed the change; config.json records allowed changes at once, because
the next checkpoint may be hours away. events.jsonl says after which step each took effect, and so does the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..config import ConfigValues, flatten, to_json
from ..errors import ConfigError, UsageError, did_you_mean
from ..files import read_regular, write_json
from .record import now, read_saved_config
from .result import Change
from .schemas import ChangeEvent

FREE = (
    "data.path", "data.workers", "train.checkpoint_*", "train.keep_last",
    "distributed.sharding", "distributed.timeout_s", "distributed.pipeline", "distributed.overlap",
    "distributed.balance", "ranking.*", "baseline_seconds", "tables.*", "ranks",
)  # fmt: skip
"""Fields that may change freely: the path of the data (its digest is compared anyway), who reads it, when checkpoints
are saved, which rank holds which table or works on which samples, where rows lie, what is ranked after training, how
long baselines may take, and the number of ranks."""


OPERATORS = "operators"
"""Stands for the implementations of operators: no config field, but numbers depend on it as on one."""
RANKS = "ranks"
"""Stands for the number of ranks: no config field, but a change is recorded, since it changes the last bits."""


def fields_of(config: Any) -> ConfigValues:
    """Every field of a config by its dotted name, as JSON values."""
    return flatten(to_json(config))


def fixed_fields(config: Any) -> ConfigValues:
    """The fields that a resumed run may not change."""
    return {name: value for name, value in fields_of(config).items() if not is_free(name)}


def recorded_fields(config: Any) -> ConfigValues:
    """The fixed fields, and free ones whose changes are recorded, such as how ranks divide the tables."""
    fields = fields_of(config).items()
    return {name: value for name, value in fields if not is_free(name) or name.startswith("distributed.")}


def free_changes(was: Any, now: Any) -> list[Change]:
    """Changes of free fields that are recorded."""
    return [change for change in changes(recorded_fields(was), recorded_fields(now)) if is_free(change.field)]


def is_free(field: str) -> bool:
    return any(fnmatchcase(field, pattern) for pattern in FREE)


def changes(was: ConfigValues, now: ConfigValues) -> list[Change]:
    """Fields that differ. A field that only one side has was added by a later version and does not count."""
    return [Change(name, was[name], now[name]) for name in was if name in now and was[name] != now[name]]


def require_allowed(changes: list[Change], allow: Iterable[str], where: dict[str, object]) -> None:
    """Refuse changes that the user did not allow; the error names the first."""
    refused = [change for change in changes if change.field not in set(allow)]
    if refused:
        raise ConfigError(
            refused[0].text,
            where={"field": refused[0].field, **where},
            fix=" ".join(f"--allow-change {change.field}" for change in refused) + ", or a new run",
        )


def operator_changes(
    recorded: Any, replaced: list[dict[str, tuple[str, str]]], allow: Iterable[str], where: dict[str, object]
) -> list[Change]:
    """The change of operators that a machine makes to a resumed run; it must be allowed, since numbers change too.

    `replaced`: what `ops.choice.replaced` says on each rank. The first rank that uses other operators is named.
    """
    for rank, other in enumerate(replaced):
        if other:
            change = Change(
                OPERATORS,
                operators_text({name: recorded[name] for name in other}),
                operators_text({name: body for name, (body, _) in other.items()}),
            )
            reasons = ", ".join(sorted({reason for _, reason in other.values()}))
            require_allowed(
                [change], allow, {"reason": reasons, **({"rank": rank} if len(replaced) > 1 else {}), **where}
            )
            return [change]
    return []


def operators_text(bodies: Mapping[str, str]) -> str:
    """Implementations as text: `native: bag, dot; triton: draw`."""
    by_body: dict[str, list[str]] = {}
    for name, body in bodies.items():
        by_body.setdefault(str(body), []).append(name.partition(" on ")[0])
    return "; ".join(f"{body}: {', '.join(names)}" for body, names in sorted(by_body.items()))


def allowed_fields(names: Iterable[str], config: Any) -> tuple[str, ...]:
    """The fields that --allow-change names, as the config spells them."""
    known = fields_of(config)
    fields = []
    for name in names:
        field = name.replace("-", "_")
        if field not in known and field != OPERATORS:
            raise UsageError(
                f"--allow-change {name}: this config has no such field{did_you_mean(field, known)}",
                fix="recperf show names every field",
            )
        if field == "seed":
            raise UsageError(
                "--allow-change seed: another seed is another run",
                fix="recperf run --config RUN --seed N starts one",
            )
        fields.append(field)
    return tuple(fields)


def record_changes(folder: Path, config: Any, changes: list[Change]) -> bytes:
    """Write the config of a resumed run and its changes into config.json; return the previous content of the file."""
    path = folder / "config.json"
    saved, before = read_saved_config(path), read_regular(path)
    saved.config = to_json(config)
    saved.changed += tuple(replace(change, when=now()) for change in changes)
    write_json(path, saved)
    return before


def since_start(recorded: Iterable[Change], fields: ConfigValues) -> list[Change]:
    """What differs from the config the run was started with, from the changes that config.json records."""
    first: ConfigValues = {}
    for change in recorded:
        first.setdefault(change.field, change.was)
    return changes(first, fields)


def reported_changes(logged: Iterable[ChangeEvent], recorded: Iterable[Change], config: ConfigValues) -> list[Change]:
    """The changes of a run as its result states them, from the change events of its log and from config.json."""
    rows = [
        Change(field=event.field, was=event.was, now=event.now, after_step=event.step, seed=event.seed)
        for event in logged
    ]
    latest = {row.field: row.now for row in rows}
    for change in since_start(recorded, flatten(config)):
        was = latest.get(change.field, change.was)
        if was != change.now:
            rows.append(Change(field=change.field, was=was, now=change.now, after_step=None, seed=None))
    return rows


def change_text(change: Change) -> str:
    """One reported change in words."""
    step, seed = change.after_step, f"seed {change.seed}"
    when = f"after step {step:,} of {seed}" if step else f"before {seed} began"
    return f"{change.field} from {change.was!r} to {change.now!r} " + ("after the last step" if step is None else when)


def changed_before(folder: Path) -> tuple[str, ...]:
    """Fields that the user allowed to change in earlier resumes."""
    return tuple(dict.fromkeys(change.field for change in read_saved_config(folder / "config.json").changed))
