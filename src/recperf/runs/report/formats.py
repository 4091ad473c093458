"""How numbers, times, sizes and names are written in every report, in the terminal and on pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from ... import units
from ...jsonfile import Struct
from ...measure.records import Percentiles
from ...tasks import TASKS
from ..result import Difference, Overall, Throughput, Waited

NONE = "–"
"""Shown where a row has no value."""
NOT_MEASURED = "not measured"

METRICS = {name: title for task in TASKS for name, title in task.titles.items()}
BASELINES = {name: title for task in TASKS for name, title in task.baselines.items()} | {
    "positives": "items' positive rows",
    "planted": "true model of the synthetic data",
}


def metric(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def baseline(name: str) -> str:
    return BASELINES.get(name, name.replace("_", " "))


def component(name: str) -> str:
    """`embedding_backward` as `embedding, backward`."""
    head, _, tail = name.rpartition("_")
    return f"{head.replace('_', ' ')}, backward" if head and tail == "backward" else name.replace("_", " ")


def count(value: float | None) -> str:
    """A count, which may be a mean over steps and then has decimals."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 or value >= 100 else f"{value:,.2f}"


def time(ms: float | None) -> str:
    return NONE if ms is None else units.time(ms)


def spread(figure: Percentiles) -> str:
    """The range from p20 to p80."""
    (low_text, high_text), unit = units.times(figure.p20, figure.p80)
    return f"{low_text} – {high_text} {unit}"


def throughput(rate: Throughput | None) -> str:
    return f"{count(rate.samples_per_s)} samples/s" if rate else NOT_MEASURED


def whole_time(overall: Overall) -> str:
    """What the whole time of a training was spent on."""
    names = {"steady": "steady", "warmup": "warm-up", "evaluation": "evaluations", "save": "saves"}
    parts = {label: getattr(overall, f"{name}_s") for name, label in names.items()}
    least, shuffling = 0.001 * overall.seconds, overall.shuffle_s
    listed = ", ".join(f"{label} {time(1e3 * s)}" for label, s in parts.items() if s >= least)
    listed += f" ({time(1e3 * shuffling)} of the training was shuffling)" if shuffling >= least else ""
    return f"{time(1e3 * overall.seconds)}: {listed}"


def waited(time: Waited) -> str:
    """`81 s: 2 training, 51 baselines, 18 measuring, 10 other`, rounded so that the parts add up."""
    named = [part for part in time.__struct_fields__ if part != "seconds"]
    unit, size = next((one for one in (("h", 3600.0), ("min", 60.0)) if time.seconds >= 2 * one[1]), ("s", 1.0))
    digits = 0 if time.seconds >= 10 * size else 1
    step = size / 10**digits
    counts = {part: math.floor(getattr(time, part) / step) for part in named}
    total = max(sum(counts.values()), round(time.seconds / step))
    # The largest remainders are rounded up.
    for part in sorted(named, key=lambda part: counts[part] - getattr(time, part) / step)[
        : total - sum(counts.values())
    ]:
        counts[part] += 1
    parts = ", ".join(f"{n / 10**digits:,.{digits}f} {part.removesuffix('_s')}" for part, n in counts.items() if n)
    return f"{total / 10**digits:,.{digits}f} {unit}: {parts}"


def measuring_cost(share: float, step_ms: Percentiles) -> str:
    """What measuring adds to a step, compared with the spread of the steps from p20 to p80."""
    small = share * step_ms.p50 < step_ms.p80 - step_ms.p20
    # Steps that got faster by it only show how much they vary.
    figures = [f"{percent(share)} of a step"] if share > 0 else []
    return ", ".join(figures + ["less than the spread of the steps"] * (small or not figures))


def scaled(value: float | None, unit: str = "") -> str:
    """A number with a decimal prefix: `5.20 TFLOP/s`."""
    if value is None:
        return NONE
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What three digits would round up to the next prefix gets that prefix.
        if abs(value) >= 0.9995 * limit:
            return f"{units.digits(value / limit)} {prefix}{unit}"
    return f"{count(value)} {unit}".rstrip()


def flop_rate(value: float | None) -> str:
    return scaled(value, "FLOP/s") if value else NONE


def byte_rate(value: float | None) -> str:
    return scaled(value, "B/s") if value else NONE


def size(value: float | None) -> str:
    return NONE if value is None else units.size(value)


def percent(share: float | None, digits: int | None = None) -> str:
    """A share as a percentage; without `digits`, one decimal only below 10 %."""
    if share is None:
        return NONE
    if 0 < share < 0.0005:
        return "<0.1%"
    if digits is None:
        digits = 0 if share >= 0.095 or share == 0 else 1
    return f"{share:.{digits}%}"


def ends(low: float | None, high: float | None) -> str:
    """The interval of a share; nothing where an older recperf measured it."""
    return "" if low is None or high is None else f"{percent(low)} – {percent(high)}"


def between(share: float, low: float | None, high: float | None) -> str:
    """A share with its interval."""
    return f"{percent(share)} ({ends(low, high)})" if low is not None else percent(share)


def gain(ratio: float | None, range_: Sequence[float] | None = None) -> str:
    """How many times faster, with its range where that is known."""
    if ratio is None:
        return NONE
    return f"{ratio:.2f}x" + (f" ({range_[0]:.2f}x to {range_[1]:.2f}x)" if range_ else "")


class Ends(Protocol):
    """An interval."""

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


def plus_minus(value: float, ends: Ends) -> str:
    """A value with half of its interval: `0.785 ± 0.010`."""
    half = ((ends.high or 0.0) - (ends.low or 0.0)) / 2
    digits = 3 if half >= 0.0095 or half == 0 else min(6, 1 - math.floor(math.log10(half)))
    return f"{value:.{digits}f} ± {half:.{digits}f}"


def place(row: Difference) -> str:
    """Where a model stands beside another, in few words: `above`, `below`, `no clear difference`, or why it is not
    known."""
    if row.standing != "level":
        return row.standing
    if row.needed is None:
        return "no clear difference"
    return f"not enough {row.by} to tell ({count(row.units)}; about {count(row.needed)} are needed)"


def stands(row: Difference) -> str:
    """`0.012 ± 0.004 above item-kNN`, or why that cannot be said."""
    name = baseline(row.baseline)
    if row.standing != "level":
        return f"{plus_minus(abs(row.difference), row)} {row.standing} {name}"
    if row.needed is None:
        return f"no clear difference from {name} ({plus_minus(row.difference, row)})"
    return place(row).replace(" to tell", f" to tell from {name}")


def of_ceiling(share: float | None, bound: str) -> str:
    """A share of a ceiling: cached data exceed that of memory, nothing exceeds that of arithmetic."""
    if share is not None and share > 1.05 and bound == "memory":
        return "in a cache"
    return percent(None if share is None else min(1.0, share))


def yes_or_no(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "no"


def setting(value: Any) -> str:
    """A config's value as it is typed on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(setting(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def timestamp(text: str) -> str:
    """An ISO time in UTC, shortened."""
    return text.replace("T", " ").removesuffix("+00:00")


def sentence(text: str) -> str:
    """A note as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def printable(text: Any) -> str:
    """Text on one line, with control characters escaped: text out of a file must not steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def all_printable(value: Any) -> Any:
    """The same value with every string in it made printable."""
    if isinstance(value, dict):
        return {printable(key): all_printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [all_printable(item) for item in value]
    if isinstance(value, Struct):
        return replace(value, **{name: all_printable(getattr(value, name)) for name in value.__struct_fields__})
    return printable(value) if isinstance(value, str) else value


_TENSILE = re.compile(r"(C[a-z]+_A[a-z]+_B[a-z]+_[A-Z]+).*?_(MT\d+x\d+x\d+)\w*")
"""A matrix product of AMD's libraries, whose name lists every setting: the layouts, the type and the tile tell it."""
_FUNCTOR = re.compile(r"\w*?(\w*(?:[Ff]unctor|Epilogue|Ops?))\b")
_CPP = re.compile(r"void |\w+\(.*\)$|.*::.*<.*>")
_MANGLED = re.compile(r"(\d+)([A-Za-z_]\w*)")


def short(name: Any, width: int = 46) -> str:
    """The name of a kernel or an operator as people know it: a C++ function without return type, namespaces, template
    arguments and parameters, with the functor it applies; cut in the middle to a width."""
    text = printable(name)[:4000]
    if text.startswith("_Z"):
        text = _demangled(text)
    elif tensile := _TENSILE.match(text):
        text = " ".join(tensile.groups())
    elif _CPP.match(text):
        text = _function(text)
    if len(text) <= width:
        return text
    tail = width // 6
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def _function(text: str) -> str:
    """The last name outside of all brackets, and the functor among its template arguments."""
    outside, before = text.replace("(anonymous namespace)", ""), ""
    head = outside.rpartition(">(")[0] or outside
    while before != outside:
        before, outside = outside, re.sub(r"<[^<>]*>", "", outside)
    names = re.split(r"::|\s", re.sub(r"\(.*", "", outside).strip())
    name = "::".join(names[-2:]) if names[-1] == "kernel" else names[-1] or text
    if name in ("Kernel", "Kernel2"):
        return head.partition(f"{name}<")[2].partition("<")[0].rstrip("> ")
    functors = _FUNCTOR.findall(head)
    return f"{name} ({functors[-1]})" if functors and "<" in head else name


def _demangled(text: str) -> str:
    """The same of a mangled name, whose parts have their length in front of them."""
    names, place = [], 2
    while match := _MANGLED.search(text, place):
        place = match.start(2) + int(match[1])
        names.append(text[match.start(2) : place])
    kernels = [name for name in names if "kernel" in name.lower()] or names[:1]
    functors = [name for name in names if _FUNCTOR.fullmatch(name)]
    return " ".join([*kernels[:1], *(f"({name})" for name in functors[-1:])]) or text
