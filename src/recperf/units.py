"""Numbers as text, in units a person reads. Torch-free."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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
