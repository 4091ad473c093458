"""A profile's numbers and names as its terminal report, its page and its diff say them."""

from __future__ import annotations

import math
import re
from typing import Any

from ... import units
from ..seal import printable

NONE = "–"
"""Where a row has no such figure."""

ABSENT = "this profile has no such section; recperf profile WORKLOAD measures it"

BUSY = 0.1
"""Share of the cores that others used above which times deserve a warning."""


def three(value: float) -> str:
    """Three digits that matter, never in powers of ten above one."""
    if value == 0:
        return "0"
    # Beyond 99.95 rounding to three digits needs no decimals, and `g` would go over to powers of ten.
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def time(ms: float | None) -> str:
    """Milliseconds in the unit a reader thinks in: microseconds below one."""
    if ms is None:
        return NONE
    if ms == 0:
        return "0"
    for limit, scale, unit in ((0.001, 1e6, "ns"), (1.0, 1e3, "µs"), (1000.0, 1.0, "ms")):
        if abs(ms) < limit:
            return f"{three(ms * scale)} {unit}"
    return f"{three(ms / 1e3)} s"


def times(figure: dict[str, Any]) -> str:
    """A spread in one unit, that of its larger end."""
    low, high = figure["p20"], figure["p80"]
    scale, unit = (1e3, "µs") if high < 1 else (1.0, "ms") if high < 1000 else (1e-3, "s")
    return f"{three(low * scale)} – {three(high * scale)} {unit}"


def flop_rate(value: float | None) -> str:
    if not value:
        return NONE
    scale, unit = (1e12, "TFLOP/s") if value >= 1e12 else (1e9, "GFLOP/s") if value >= 1e9 else (1e6, "MFLOP/s")
    return f"{three(value / scale)} {unit}"


def byte_rate(value: float | None) -> str:
    return f"{three(value / 1e9)} GB/s" if value else NONE


def flops(value: float | None) -> str:
    return scale(value, ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")))


def size(value: float | None) -> str:
    return NONE if value is None else units.size(value)


def scale(value: float | None, prefixes: tuple[tuple[float, str], ...]) -> str:
    if value is None:
        return NONE
    for limit, unit in prefixes:
        if abs(value) >= limit:
            return f"{three(value / limit)}{unit}"
    return f"{value:,.0f}"


def counted(value: float | None) -> str:
    """How often something happens in a step: a mean over steps, so it may be broken."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 or value >= 100 else f"{value:,.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    if share is None:
        return NONE
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.{digits}%}"


def gain(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f} x"


def yes(value: bool | None) -> str:
    return NONE if value is None else "yes" if value else "no"


def plain(text: Any) -> str:
    """Words on one line that cannot steer a terminal."""
    return printable(" ".join(str(text).split()))


def clean(value: Any) -> Any:
    """The same value with every string in it made plain, for what must become a file of its own."""
    if isinstance(value, dict):
        return {plain(key): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    return plain(value) if isinstance(value, str) else value


_NOISE = re.compile(
    r"\b(?:void |at::native::|at::cuda::|at::|std::|c10::|cub::|cutlass::Kernel2?<)|\(anonymous namespace\)::"
)


def short(name: Any, width: int = 46) -> str:
    """A kernel's or operator's name without return type, namespaces and parameter list; cut in the middle if needed.

    Most of the head stays: there stands the tile of a product and the functor of an elementwise kernel.
    """
    text = plain(name)[:4000]
    text = _NOISE.sub("", text[: _parameters(text)]) or text
    if len(text) <= width:
        return text
    tail = width // 6
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def _parameters(text: str) -> int:
    """Where the parameter list of a C++ function begins; the end where there is none."""
    if not text.endswith(")"):
        return len(text)
    depth = 0
    for index in range(len(text) - 1, 0, -1):
        depth += (text[index] == ")") - (text[index] == "(")
        if depth == 0:
            return index if not text[index:].startswith("(anonymous") else len(text)
    return len(text)


def missing(profile: dict[str, Any], key: str) -> str | None:
    """Why a section was not measured; none where it was."""
    part = profile.get(key)
    if part is None:
        return ABSENT
    if isinstance(part, dict) and "missing" in part:
        return plain(part["missing"])
    return None


def verdict(profile: dict[str, Any]) -> dict[str, Any] | None:
    """The verdict, or what a run's own profile has instead: the regime, without a confidence."""
    found = profile.get("verdict") or profile.get("regime")
    return dict(found) if found else None


def reading(value: Any, unit: Any) -> str:
    """A piece of evidence with its unit."""
    if value is None:
        return "not measured"
    text = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else three(float(value))
    return plain(f"{text} {unit}" if unit and unit != "not measured" else text)


def total_share(profile: dict[str, Any]) -> float:
    return math.fsum(part["share"] for part in profile["components"])


def heavy_operators(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Operators by what they cost, on the host and on the device together."""
    return sorted(
        profile["operator_table"]["rows"],
        key=lambda row: (row["cpu_self_ms"] or 0) + (row.get("device_self_ms") or 0),
        reverse=True,
    )


def heavy_kernels(profile: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(profile["kernels"]["rows"], key=lambda row: row["total_ms"], reverse=True)


def heavy_tables(profile: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(profile["embeddings"]["tables"], key=lambda row: row["lookups"], reverse=True)


def operator_rest(rows: list[dict[str, Any]]) -> str:
    """What the operators below the shown ones cost together."""
    host = math.fsum(row["cpu_self_ms"] or 0 for row in rows)
    device = [row["device_self_ms"] for row in rows if row.get("device_self_ms") is not None]
    also = f" and {time(math.fsum(device))} of the device's" if device else ""
    return f"{len(rows)} more take {time(host)} of the host's time{also}."


def kernel_sentence(profile: dict[str, Any]) -> str:
    kernels = profile["kernels"]
    small, wall = kernels["small"], profile["step_ms"]["p50"]
    share = f" ({percent(kernels['busy_ms'] / wall, 0)} of its {time(wall)})" if wall else ""
    return (
        f"{counted(kernels['count'])} kernels a step keep the device busy for {time(kernels['busy_ms'])}{share}. "
        f"{counted(small['count'])} of them ({percent(small['share_of_count'], 0)}) last less than 10 µs, "
        f"{time(small['total_ms'])} together."
    )


def idle_sentence(idle: dict[str, Any]) -> str:
    share = f" ({percent(idle['idle_ms'] / idle['wall_ms'], 0)})" if idle["wall_ms"] else ""
    busy, idle_ms = time(idle["busy_ms"]), time(idle["idle_ms"])
    return f"Of a traced step of {time(idle['wall_ms'])} the device works {busy} and waits {idle_ms}{share}."


def embedding_sentences(part: dict[str, Any]) -> list[str]:
    rates, cached, skew = part.get("gb_per_s") or {}, part.get("cached") or {}, part.get("skew") or {}
    said = [
        f"{counted(part['lookups'])} lookups a step reach {counted(part['unique'])} different rows "
        f"(unique ratio {percent(part['unique_ratio'])})."
    ]
    ways = [
        f"{name.replace('_', ' ')} {three(rates[name])} GB/s"
        if rates.get(name)
        else f"{name.replace('_', ' ')} not measured"
        for name in ("forward", "backward_and_update")
    ]
    said.append(f"Rate: {', '.join(ways)}.")
    fits = {True: "Cached", False: "Not cached", None: "Cached or not: not measured"}[cached.get("fits")]
    said.append(f"{fits}: {plain(cached['why'])}." if cached.get("why") else f"{fits}.")
    if skew.get("largest_table_share") is not None:
        uneven = f"; Gini over the tables {skew['gini']:.2f}" if skew.get("gini") is not None else ""
        said.append(f"The largest table takes {percent(skew['largest_table_share'], 0)} of the lookups{uneven}.")
    return said


def outcome(fix: dict[str, Any]) -> str:
    """What became of a fix, in a few words."""
    note = f": {plain(fix['note'])}" if fix.get("note") else ""
    return f"{plain(fix.get('status') or 'suggested')}{note}"


def same(fix: dict[str, Any]) -> str:
    """Whether a tried fix computes what was computed before."""
    if fix.get("same_numbers") is None:
        return NONE
    apart = fix.get("largest_difference")
    return yes(fix["same_numbers"]) + (f" ({apart:.1e})" if apart else "")


def trust_rows(profile: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader must know to believe the rest."""
    trust = profile.get("trust") or {}
    rows = [
        ("steps", f"{profile['steps']} measured after {profile['warmup']} of warm-up, batch {profile['batch_size']:,}")
    ]
    for name, cost in _profiling(profile).items():
        rows.append((f"cost of measuring ({name})", _cost(cost)))
    clocks = trust.get("clocks") or {}
    said = [
        f"{label} {clocks[name]:,.0f} {unit}"
        for name, label, unit in (("sm_mhz", "SM", "MHz"), ("mem_mhz", "memory", "MHz"), ("power_w", "power", "W"))
        if clocks.get(name) is not None
    ]
    rows.append(("clocks", ", ".join(said) or "not measured"))
    versions = trust.get("versions") or {}
    rows.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v) or "not recorded"))
    if trust.get("seed") is not None:
        rows.append(("seed", _said(trust["seed"])))
    share = (trust.get("company") or {}).get("share")
    if share is not None:
        doubt = "; too much for times to be trusted" if share > BUSY else ""
        rows.append(("other work meanwhile", f"{share:.0%} of all cores{doubt}"))
    rows += [(f"switch {name}", plain(why)) for name, why in (profile.get("switches") or {}).items()]
    trace = profile.get("trace")
    if trace:
        kept = f"{trace['steps_kept']} of {trace['steps_recorded']} recorded steps"
        rows.append(("trace", plain(f"{trace['file']}, {size(trace['bytes'])}, {kept}")))
    lacking = trust.get("not_measured") or []
    rows.append(("not measured", "; ".join(plain(what) for what in lacking) or "nothing that was asked for"))
    return rows


def _profiling(profile: dict[str, Any]) -> dict[str, dict[str, float] | None]:
    known = (profile.get("trust") or {}).get("profiling")
    return dict(known) if known else {"budget": profile.get("overhead")}


def _cost(cost: dict[str, float] | None) -> str:
    if not cost:
        return "not measured"
    share = f"{cost['share']:+.1%}" if cost["share"] > 0 else "less than the steps vary"
    return f"{share}: a step takes {time(cost['plain_ms'])} without, {time(cost['clocked_ms'])} with it"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return plain(", ".join(f"{str(k).replace('_', ' ')} {_said(v)}" for k, v in value.items())) or NONE
    return three(value) if isinstance(value, float) else plain("not measured" if value is None else value)
