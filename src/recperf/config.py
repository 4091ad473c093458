"""What every config shares: checks of values, and conversion to JSON and back. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, did_you_mean
from .jsonfile import Problem, fit, shorten

T = TypeVar("T")


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Refuse a config value with a message that names the field, the value and what is allowed."""
    if not holds:
        raise ConfigError(f"{field} is {value!r}; allowed: {allowed}", where={"field": field})


def within(low: float, value: float, high: float, field: str) -> None:
    """Refuse a number outside its range, infinities and NaN among them."""
    shown = " to ".join(f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (low, high))
    require(low <= value <= high, field, value, shown)


ConfigValues = dict[str, Any]
"""A config as JSON values: nested by section, or every field by its dotted name."""


def to_json(config: Any) -> Any:
    """A config as plain JSON values; `from_json` is its inverse."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, (tuple, list)):
        return [to_json(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    return config


def flatten(values: ConfigValues, prefix: str = "") -> ConfigValues:
    """Nested JSON objects as one object whose keys are dotted paths; lists stay whole."""
    fields: ConfigValues = {}
    for key, value in values.items():
        if isinstance(value, dict):
            fields |= flatten(value, f"{prefix}{key}.")
        else:
            fields[f"{prefix}{key}"] = value
    return fields


def with_absolute_paths(config: Any) -> Any:
    """The config with every path made absolute, so that it means the same from any folder."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Path):
            changes[field.name] = value.absolute()
        elif dataclasses.is_dataclass(value):
            changes[field.name] = with_absolute_paths(value)
    return dataclasses.replace(config, **changes)


def from_json(kind: type[T], value: Any, *, field: str = "") -> T:
    """Build a config class from JSON values; an error names the field, its value and what is allowed."""
    config = fit(value, kind, strict=True)
    if not isinstance(config, Problem):
        return config
    path = (field, *config.path) if field else config.path
    name = ".".join(path) or "config"
    if config.expected == "unknown":
        siblings = _field_names(kind, config.path[:-1])
        raise ConfigError(f"unknown config field {name!r}{did_you_mean(path[-1], siblings)}", where={"field": name})
    if not config.expected:
        raise ConfigError(f"config field {'.'.join(path[:-1]) or 'config'!r} lacks {path[-1]}", where={"field": name})
    allowed = _choices(kind, config.path) or config.expected
    raise ConfigError(f"{name} is {shorten(config.value)}; allowed: {allowed}", where={"field": name})


def _field_names(kind: Any, path: tuple[str, ...]) -> list[str]:
    inner = _declared_type(kind, path)
    return [field.name for field in dataclasses.fields(inner)] if dataclasses.is_dataclass(inner) else []


def _choices(kind: Any, path: tuple[str, ...]) -> str:
    """The values of a `Literal` field; empty for another field."""
    declared = _declared_type(kind, path)
    options = [declared, *typing.get_args(declared)]
    literals = [option for option in options if typing.get_origin(option) is typing.Literal]
    return ", ".join(str(choice) for literal in literals for choice in typing.get_args(literal))


def _declared_type(kind: Any, path: tuple[str, ...]) -> Any:
    """The type that a nested field is declared with; None inside a list."""
    for name in path:
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return kind
