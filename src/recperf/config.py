"""Pieces every config shares: checks, and the way to JSON and back. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, closest

T = TypeVar("T")


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Refuse a config value with a message that names the field, the value and what is allowed."""
    if not holds:
        raise ConfigError(f"{field} is {value!r}; allowed: {allowed}", where={"field": field})


def within(low: float, value: float, high: float, field: str) -> None:
    """Refuse a number outside its range, infinities and NaN among them."""
    shown = " to ".join(f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (low, high))
    require(low <= value <= high, field, value, shown)


def to_json(config: Any) -> Any:
    """A config as plain JSON values; `from_json` is its inverse."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, (tuple, list)):
        return [to_json(value) for value in config]
    if isinstance(config, Path):
        return str(config)
    return config


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested JSON objects as one object whose keys are dotted paths; lists stay whole."""
    fields: dict[str, Any] = {}
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
    """Build a config class from JSON values, naming the field at fault when one does not fit."""
    return typing.cast(T, _build(kind, value, field))


def _build(kind: Any, value: Any, field: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _build(typing.get_args(kind)[0], value, field)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, field)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        require(value in choices, field, value, ", ".join(map(str, choices)))
        return value
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(kind), value, field)
    if origin is tuple:
        require(isinstance(value, list), field, value, "a list")
        inner = typing.get_args(kind)[0]
        return tuple(_build(inner, item, f"{field}.{index}") for index, item in enumerate(value))
    if kind is Path:
        require(isinstance(value, str), field, value, "a path")
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        require(abs(value) < 1 << 60, field, "a number of many digits", "a number")
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    require(fits, field, value, f"a value of type {kind.__name__}")
    return value


def _build_union(choices: tuple[Any, ...], value: Any, field: str) -> Any:
    if value is None and type(None) in choices:
        return None
    refusals = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _build(choice, value, field)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[-1]


def _build_dataclass(kind: type, value: Any, field: str) -> Any:
    require(isinstance(value, dict), field or "config", value, "an object")
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    for key in value:
        if key not in names:
            guess = closest(key, names)
            where = f"{field}.{key}" if field else key
            raise ConfigError(
                f"unknown config field {where!r}" + (f"; did you mean {guess!r}?" if guess else ""),
                where={"field": where},
            )
    arguments = {key: _build(hints[key], item, f"{field}.{key}" if field else key) for key, item in value.items()}
    try:
        return kind(**arguments)
    except TypeError as error:
        missing = [
            f.name
            for f in dataclasses.fields(kind)
            if f.name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        raise ConfigError(f"config field {field or 'config'!r} lacks {', '.join(missing) or error}") from None
