"""Numbers and names as the page says them."""

from __future__ import annotations

from typing import Any

METRICS = {
    "accuracy": "accuracy",
    "auc": "AUC",
    "log_loss": "log loss",
    "calibration": "calibration",
    "calibration_error": "calibration error",
    "normalized_entropy": "normalized entropy",
    "lifetime_auc": "lifetime AUC",
}
BASELINES = {
    "user_item_bias": "user + item bias",
    "item_bias": "item bias",
    "majority": "majority class",
    "popularity": "item popularity",
    "planted": "planted answer",
}

NOT_MEASURED = "not measured"

MEASURE = {
    "profile": "recperf run --config {run}",
    "peaks": "recperf peaks && recperf run --config {run}",
    "pair": "recperf pair micro-dlrm-dram",
}
"""The command that measures what a page lacks: a run profiles itself when it ends, against the ceilings it finds."""


def metric(name: str) -> str:
    return METRICS.get(name, name.replace("_", " "))


def baseline(name: str) -> str:
    return BASELINES.get(name, name.replace("_", " "))


def component(name: str) -> str:
    """`embedding_backward` as `embedding, backward`."""
    head, _, tail = name.rpartition("_")
    return f"{head.replace('_', ' ')}, backward" if head and tail == "backward" else name.replace("_", " ")


def count(value: float) -> str:
    return f"{value:,.0f}"


def number(value: float) -> str:
    """Three digits that matter, never in powers of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def scaled(value: float, unit: str) -> str:
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # What three digits would round up to the next prefix belongs to it.
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def ms(value: float) -> str:
    return f"{_three(value)} ms"


def _three(value: float) -> str:
    """Three digits that matter, zeros at the end among them, so that columns line up."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}" if value >= 0.001 else f"{value:.1e}" if value else "0"


def percent(share: float) -> str:
    if 0 < share < 0.0005:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.095 or share == 0 else f"{share:.1%}"


def between(figure: dict[str, Any]) -> str:
    """The spread of a measured time."""
    return f"{_three(figure['p20'])} – {_three(figure['p80'])}"


def value(of: Any, unit: str | None = None) -> str:
    """A piece of evidence: a number with its unit, a word, or that it is missing."""
    if of is None:
        return NOT_MEASURED
    text = of if isinstance(of, str) else count(of) if isinstance(of, int) else number(of)
    return f"{text} {unit}" if unit else text


def shown(config_value: Any) -> str:
    """A config's value as one would type it."""
    if config_value is None:
        return "none"
    if isinstance(config_value, bool):
        return "yes" if config_value else "no"
    if isinstance(config_value, list):
        return " ".join(shown(item) for item in config_value)
    return f"{config_value:g}" if isinstance(config_value, float) else str(config_value)
