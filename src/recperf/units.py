"""Numbers as text, in units a person reads, and how wide text may be. Torch-free."""

from __future__ import annotations

from shutil import get_terminal_size

WIDEST = 110
"""Columns of text where the output is no terminal, and the most that are used of one."""

WIDEST_RANGE = 2.0
"""A range whose ends differ by a larger factor contains too much to be contradicted: nothing is judged by it."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIMES = ((3.6e6, "h"), (6e4, "min"), (1e3, "s"), (1.0, "ms"), (1e-3, "µs"), (1e-6, "ns"))
"""Units of time, in ms."""
_SIZES = (
    *((name, 1024**power) for power, name in list(enumerate(_BINARY))[:0:-1]),
    *((f"{prefix}B", int(factor)) for factor, prefix in _DECIMAL),
    ("B", 1),
)
"""Units that a size may be given in, the longest names first."""


def too_wide(low: float, high: float) -> bool:
    """Whether a range is too wide to judge by."""
    return high > WIDEST_RANGE * low


def wide_range(low: str, high: str, narrower: str) -> str:
    """Why nothing is judged by a range that is too wide, and what would narrow it."""
    return f"not judged: {low} to {high} is wider than a factor of {WIDEST_RANGE:g}; to narrow it, {narrower}"


def width() -> int:
    """Columns of text to use on this terminal."""
    return max(60, min(WIDEST, get_terminal_size((WIDEST, 24)).columns))


def size(count: float) -> str:
    """Bytes in binary units: `512 B`, `1.0 MiB`, `288 GiB`. A size without a decimal below 100 is exact."""
    value, unit = float(count), 0
    # 999.5 would be shown as 1,000, a fourth digit: the next unit says it better.
    while abs(value) >= 999.5 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 100 or value == int(value) else 1
    return f"{value:,.{digits}f} {_BINARY[unit]}"


def number(value: float) -> str:
    """A count with three digits and a decimal prefix: `1.23 M`."""
    for limit, prefix in _DECIMAL:
        # What three digits would round up to the next prefix gets that prefix.
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """A share without decimals: `12%`; one that would round to nothing is `below 1 %`."""
    return "below 1 %" if 0 < share < 0.005 else f"{share:.0%}"


def digits(value: float) -> str:
    """Three significant digits, without an exponent unless the value is tiny."""
    if value == 0:
        return "0"
    # From 99.95 on, three digits need no decimals, and `g` would switch to an exponent.
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def time(ms: float) -> str:
    """A time with three digits: `12.0 µs`, `1.50 ms`, `3.20 s`, `2.50 h`."""
    if ms == 0:
        return "0"
    (text,), unit = times(ms)
    return f"{text} {unit}"


def times(*ms: float) -> tuple[list[str], str]:
    """Times with three digits each, and their common unit: that of the longest."""
    longest = max(map(abs, ms))
    scale, unit = next((unit for unit in _TIMES if longest >= unit[0]), _TIMES[-1])
    return [digits(value / scale) for value in ms], unit


def byte_count(text: str) -> int | None:
    """The bytes that a size says, as in 512MiB, 40GiB or 1.5 TB; None if it says none."""
    number, unit = text.strip(), 1
    for name, factor in _SIZES:
        if number.lower().endswith(name.lower()):
            number, unit = number[: -len(name)].strip(), factor
            break
    try:
        value = float(number) * unit
    except ValueError:
        return None
    return int(value) if 0 <= value < 1 << 62 else None
