"""Figures as inline SVG: text, lines and shapes in pixels from the top left corner, and axes with ticks on a sheet.

Colours are variables of a page's style, which follow light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from html import escape
from importlib.resources import files
from typing import NamedTuple

WIDE, NARROW = 880, 350
"""Pixels across a figure; a page has both, and a phone shows the narrow one."""
figure_width: ContextVar[int] = ContextVar("figure_width", default=WIDE)

FAMILIES = ("data", "hash", "bottom", "embedding", "interaction", "top", "loss", "backward", "update", "sparse")
EXTRA = ("extra-1", "extra-2", "extra-3")
KNOWN = {
    "dense_update": "update", "sparse_update": "sparse", "optimizer": "update", "exchange": "extra-2",
    "own work": "accent", "waiting for a rank": "loss", "waiting for bytes": "extra-2", "waiting": "extra-2",
}  # fmt: skip
"""Names that share the colour of another name."""

Tick = tuple[float, str]
"""A value on an axis and its label."""


class Point(NamedTuple):
    x: float
    y: float


def family(component: str) -> tuple[str, bool]:
    """The colour of a component, and whether it is light: a backward pass has the hue of its forward pass."""
    if component == "backward":
        return "backward", False
    head = component.removesuffix("_backward")
    known = KNOWN.get(head.rpartition("_")[2] if head.endswith("_exchange") else head, head)
    if known not in FAMILIES and known not in (*EXTRA, "accent"):
        # An unknown name gets the same colour in every run.
        known = EXTRA[sum(known.encode()) % len(EXTRA)]
    return known, head != component


def columns_of(panels: int) -> int:
    """How many panels of a figure are side by side."""
    return panels if figure_width.get() == WIDE else 1


class Sheet:
    """A figure while it is drawn; what comes later lies above."""

    def __init__(self, height: float) -> None:
        self.width, self.height = figure_width.get(), height
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, text: str, *, color: str = "muted", size: float = 11, anchor: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Text whose middle is at a height."""
        weight = "; font-weight: bold" if bold else ""
        place = f'x="{_pixels(x)}" y="{_pixels(y + 0.35 * size)}" text-anchor="{anchor}"'
        self._parts.append(
            f'<text {place} style="font-size: {size}px; fill: var(--{color}){weight}">{_shown(text)}</text>'
        )

    def line(
        self, points: Iterable[Point], *, color: str, width: float, dashed: bool = False, round: bool = False
    ) -> None:
        more = " stroke-dasharray: 4 3;" * dashed + " stroke-linecap: round;" * round
        look = f"fill: none; stroke: var(--{color}); stroke-width: {width};{more}"
        self._parts.append(f'<path d="{_path(points)}" style="{look}"/>')

    def area(self, points: Iterable[Point], *, color: str) -> None:
        """A faint area."""
        self._parts.append(f'<path d="{_path(points)}z" style="fill: var(--{color}); opacity: 0.25"/>')

    def rect(self, x: float, y: float, width: float, height: float, *, color: str, faint: bool = False) -> None:
        box = f'x="{_pixels(x)}" y="{_pixels(y)}" width="{_pixels(width)}" height="{_pixels(height)}"'
        look = f"fill: var(--{color}); stroke: var(--surface); stroke-width: 1.5;{' fill-opacity: 0.45' * faint}"
        self._parts.append(f'<rect {box} style="{look}"/>')

    def dot(self, at: Point, *, color: str, radius: float, is_open: bool = False) -> None:
        fill, edge = ("surface", f"; stroke: var(--{color}); stroke-width: 2") if is_open else (color, "")
        place = f'cx="{_pixels(at.x)}" cy="{_pixels(at.y)}" r="{radius}"'
        self._parts.append(f'<circle {place} style="fill: var(--{fill}){edge}"/>')

    def markup(self, label: str) -> str:
        """The figure as an element of a page."""
        size = "narrow" if self.width == NARROW else "wide"
        head = f'<svg class="figure {size}" role="img" aria-label="{_shown(label)}"'
        return (
            f'{head} viewBox="0 0 {self.width} {_pixels(self.height)}" data-width="{self.width}">{self._inner()}</svg>'
        )

    def file(self, title: str) -> str:
        """The figure as a file of its own, with its title on top."""
        head = f'<text x="0" y="16" style="font: 12px sans-serif; fill: var(--ink)">{_shown(title)}</text>'
        body = f'{head}<g transform="translate(0 34)">{self._inner()}</g>'
        return svg_file(self.width, self.height + 40, title, body)

    def _inner(self) -> str:
        return "".join(self._parts)


class Axes:
    """Values in a part of a sheet between four margins, along `xs` to the right and along `ys` upwards."""

    def __init__(
        self, sheet: Sheet, margins: tuple[float, float, float, float], xs: tuple[float, float], ys: tuple[float, float]
    ) -> None:  # fmt: skip
        left, top, right, bottom = margins
        self.sheet, self.xs, self.ys = sheet, xs, ys
        self.left, self.right, self.top, self.bottom = left, sheet.width - right, top, sheet.height - bottom

    def at(self, x: float, y: float) -> Point:
        (least_x, most_x), (least_y, most_y) = self.xs, self.ys
        return Point(
            self.left + (self.right - self.left) * (x - least_x) / (most_x - least_x),
            self.bottom - (self.bottom - self.top) * (y - least_y) / (most_y - least_y),
        )

    def base(self) -> None:
        """The line below."""
        self.sheet.line([Point(self.left, self.bottom), Point(self.right, self.bottom)], color="line", width=0.8)

    def x_ticks(self, ticks: Iterable[Tick], *, grid: bool = False) -> None:
        for value, text in _inside(ticks, self.xs):
            x = self.at(value, self.ys[0]).x
            if grid:
                self.sheet.line([Point(x, self.top), Point(x, self.bottom)], color="line", width=0.8)
            self.sheet.text(x, self.bottom + 12, text, anchor="middle")

    def y_ticks(self, ticks: Iterable[Tick]) -> None:
        """Ticks with lines across."""
        for value, text in _inside(ticks, self.ys):
            y = self.at(self.xs[0], value).y
            self.sheet.line([Point(self.left, y), Point(self.right, y)], color="line", width=0.8)
            self.sheet.text(self.left - 6, y, text, anchor="end")


def _inside(ticks: Iterable[Tick], ends: tuple[float, float]) -> list[Tick]:
    return [(value, text) for value, text in ticks if ends[0] - 1e-12 <= value <= ends[1] + 1e-12]


def svg_file(width: float, height: float, title: str, body: str, look: str = "text { font: 12px sans-serif }") -> str:
    """A picture as a file, in the colours of pages."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    colours = style[: style.index("* {")]
    head = f'<svg data-generator="recperf" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_pixels(height)}"'
    head += ' role="img" style="background: var(--paper)">'
    return f"{head}\n<title>{_shown(title)}</title><style>{colours}{look}</style>\n{body}\n</svg>\n"


def labelled(values: Sequence[float], show: Callable[[float], str]) -> list[Tick]:
    return [(value, show(value)) for value in values]


def evenly(values: Sequence[float]) -> list[Tick]:
    """Values with as many decimals as the finest of them needs."""
    digits = next((d for d in range(5) if all(abs(round(v, d) - v) < 1e-9 for v in values)), 5)
    return [(value, f"{value:,.{digits}f}") for value in values]


def decades(low: float, high: float, most: int) -> list[float]:
    """Exponents of the powers of ten in a range, at most `most`."""
    inside = list(range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1))
    return [float(value) for value in inside[:: max(1, math.ceil(len(inside) / most))]]


def round_steps(low: float, high: float, most: int) -> list[float]:
    """Round numbers in a range, at most `most` steps apart."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Rounded, as 3 * 0.1 is not 0.3.
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _pixels(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_pixels(point.x)} {_pixels(point.y)}" for point in points)


def _shown(text: str) -> str:
    return escape(text.encode(errors="backslashreplace").decode())
