"""One traced step as a picture: the calls in lanes, each with the colour of what limits it, to zoom and to point at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10
from textwrap import wrap

from ...errors import DataError
from ...measure.limit_kinds import LIMITS
from ...measure.places import OPERATOR, place_text
from ...measure.records import DividedOperator, SampledStack, TracedCall, TracedStep
from ...measure.timeline import DEVICE, HOST, INPUT, OTHERS
from ...measure.trace.nesting import between, merged
from ...measure.trace.read import grouped, summed
from . import formats as fmt
from .blocks import Lane, Report, Section, Stretch, Timeline
from .svg import Sheet, svg_file

DEEPEST = 12
"""Frames of a stack that are drawn, innermost first: outer ones are the same in all."""

LANES = (INPUT, HOST, OTHERS, DEVICE)
MOST = 1600
"""Calls of a lane that are drawn; recperf stores fewer."""
UNKNOWN = "no work on the device"
PYTHON = "python"
"""The limit of the time between operators."""
SHORTEST = 5000
"""Shorter parts of a step are not drawn as Python."""


def sections(step: TracedStep | None, operators: Sequence[DividedOperator], plain_ms: float) -> list[Section]:
    """The section with the picture; none where no step was traced, or by an older recperf."""
    if step is None or not step.calls or step.us <= 0:
        return []
    return [Section("timeline", "One step", [block(step, operators, plain_ms)])]


def block(step: TracedStep, operators: Sequence[DividedOperator], plain_ms: float) -> Timeline:
    """The picture of a step that takes `plain_ms` where it is not traced."""
    lanes, limits = [], set()
    for name in LANES:
        calls = [call for call in step.calls if call.lane == name][:MOST]
        stretches = []
        for call, following in zip(calls, [*calls[1:], None]):
            row = operators[call.operator] if call.operator is not None and call.operator < len(operators) else None
            limit = call.limit or (max(row.limits, key=lambda one: row.limits[one]) if row and row.limits else UNKNOWN)
            limits.add(limit)
            alone = following is None or following.start_us >= call.start_us + call.us
            stretches.append(_stretch(call, row, limit, step.us, named=alone))
        if name == HOST:
            stretches += (gaps := list(_python(step)))
            limits |= {PYTHON} if gaps else set()
        if stretches:
            lanes.append(Lane(name, stretches))
    slower = plain_ms and 1e3 * plain_ms < 0.95 * step.us
    caption = f"The median traced step{f'; without tracing a step takes {fmt.time(plain_ms)}' if slower else ''}. "
    caption += "Between operators the host runs Python; short calls are joined."
    counts = {lane.name: len(lane.stretches) for lane in lanes}
    listed = "; ".join(f"{name}: {count} call{'s' * (count != 1)}" for name, count in counts.items())
    return Timeline(
        label=f"The calls of one step of {fmt.time(step.us / 1e3)}. {listed}",
        caption=caption,
        us=step.us,
        lanes=lanes,
        legend=[(limit, _colour(limit)) for limit in (*LIMITS, UNKNOWN) if limit in limits],
    )


def flame(stacks: Sequence[SampledStack], step_ms: float) -> list[Section]:
    """The section with the sampled stacks as a flame graph: a frame is as wide as the share of the samples inside it,
    and what the thread did is below its innermost frame."""
    stacks = [one for one in stacks if one.frames]
    if not stacks:
        return []
    first, last = min(one.frames for one in stacks), max(one.frames for one in stacks)
    differs = (at for at, (one, other) in enumerate(zip(first, last)) if one != other)
    shared = next(differs, min(len(first), len(last)))
    levels: dict[int, list[Stretch]] = defaultdict(list)

    def draw(members: list[SampledStack], level: int, start: float) -> None:
        for name, group in grouped(members, lambda one: _frame(one, shared + level)).items():
            width = 100 * sum(one.share for one in group)
            limits = summed((one.limit, one.share) for one in group)
            most = max(limits, key=lambda limit: limits[limit])
            samples = sum(one.samples for one in group)
            text = f"{name} · {fmt.percent(width / 100)} of the time · {samples:,} samples · {most}"
            levels[level].append(Stretch(start, width, _colour(most), text, fmt.short(name, 60)))
            deeper = [one for one in group if len(one.frames) >= shared + level + 1]
            if deeper and level < DEEPEST:
                draw(deeper, level + 1, start)
            start += width

    draw(sorted(stacks, key=lambda one: (one.frames, one.limit)), 0, 0.0)
    samples = sum(one.samples for one in stacks)
    shown = {one.limit for one in stacks}
    block = Timeline(
        label=f"Stacks of Python in {samples:,} samples",
        caption=f"Where the thread of the steps was in {samples:,} samples: callers above, what they called below.",
        us=1e3 * step_ms,
        lanes=[Lane("", stretches) for _, stretches in sorted(levels.items())],
        legend=[(limit, _colour(limit)) for limit in (*LIMITS, OPERATOR) if limit in shown],
    )
    return [Section("stacks", "Stacks", [block])]


def _frame(stack: SampledStack, at: int) -> str:
    """A frame of a stack, or what the thread did in its innermost one."""
    return stack.frames[at] if at < len(stack.frames) else stack.limit


def _python(step: TracedStep) -> Iterator[Stretch]:
    """The time between the calls of the steps' thread in which nothing of the step ran on the host."""
    on_host = [(call.start_us, call.start_us + call.us) for call in step.calls if call.lane != DEVICE]
    # At its end the host may have gone on to the next step, or wait for the device.
    end = step.us if len(on_host) == len(step.calls) else max((stop for _, stop in on_host), default=0.0)
    for start, stop in between(0.0, end, merged(on_host)):
        if stop - start >= step.us / SHORTEST:
            width = 100 * (stop - start) / step.us
            text = f"Python between operators · {fmt.time((stop - start) / 1e3)} · {PYTHON}"
            yield Stretch(100 * start / step.us, width, _colour(PYTHON), text, PYTHON)


def _colour(limit: str) -> str:
    return LIMITS[limit].colour if limit in LIMITS else "other"


def _stretch(call: TracedCall, row: DividedOperator | None, limit: str, whole: float, *, named: bool) -> Stretch:
    name = call.name or (row.name if row else "")
    operator = row.name if row and call.lane == DEVICE and row.name != name else ""
    facts = [fmt.short(name, 80), fmt.short(operator, 60), fmt.time(call.us / 1e3), limit]
    facts.append(place_text(row.place, width=60) if row else "")
    return Stretch(
        start=100 * call.start_us / whole,
        width=100 * call.us / whole,
        tone=_colour(limit),
        text=" · ".join(fact for fact in facts if fact),
        name=fmt.short(name.rpartition("::")[2], 24) if named else "",
    )


WIDTH, LEFT, LANE = 880, 76, 44
"""Pixels of a picture: its width, where lanes begin, and the height of one."""


def picture_of(report: Report) -> str:
    """The step that a report shows as an SVG file of its own, or the models of a bench."""
    if report.key == "bench" and report.picture:
        sheet: Sheet = report.picture.draw()
        return sheet.file(report.verdict)
    steps = (section for section in report.sections if section.key == "timeline")
    blocks = [block for section in steps for block in section.blocks if isinstance(block, Timeline)]
    if not blocks:
        raise DataError("there is no traced step to draw", fix="measure it again: older records have none")
    limit = dict(report.facts).get("limit", report.verdict)
    return picture(blocks[0], f"One step of {report.title}. {limit}")


def picture(timeline: Timeline, title: str) -> str:
    """The picture as an SVG file of its own, in the colours of pages."""
    scale, height = (WIDTH - LEFT) / 100, 60 + LANE * len(timeline.lanes)
    parts = [_label(0, 16, title, "title")]
    for at, lane in enumerate(timeline.lanes):
        top = 30 + LANE * at
        parts.append(_label(0, top + 22, lane.name))
        for one in lane.stretches:
            x, width = LEFT + scale * one.start, max(0.4, scale * one.width)
            box = f'x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE - 10}"'
            parts.append(f'<rect {box} style="fill: var(--{one.tone})"><title>{escape(one.text)}</title></rect>')
            if one.name and len(one.name) * 6.5 < width:
                parts.append(_label(x + 4, top + 21, one.name, "on"))
    for at_us, text in _marks(timeline.us):
        x = LEFT + 100 * scale * at_us / timeline.us
        parts.append(f'<path d="M{x:.1f} {height - 34}v5" style="stroke: var(--muted)"/>')
        parts.append(_label(x, height - 17, text))
    x = float(LEFT)
    for name, tone in timeline.legend:
        parts.append(f'<rect x="{x:.0f}" y="{height}" width="11" height="11" style="fill: var(--{tone})"/>')
        parts.append(_label(x + 16, height + 10, name))
        x += 34 + 7 * len(name)
    for line in wrap(timeline.caption, 138):
        height += 18
        parts.append(_label(LEFT, height + 14, line))
    look = "text { font: 12px sans-serif; fill: var(--muted) } .title { fill: var(--ink) } .on { fill: var(--on-fill) }"
    return svg_file(WIDTH, height + 22, timeline.label, "\n".join(parts), look)


def _marks(us: float) -> Iterator[tuple[float, str]]:
    """Where the scale of a step has marks, and what they say: round times, five to twelve of them."""
    power = 10 ** floor(log10(us / 5))
    step = power * max(factor for factor in (1, 2, 5) if factor * power <= us / 5)
    unit, name = next((one for one in ((1e6, "s"), (1e3, "ms")) if us >= one[0]), (1.0, "µs"))
    for number in range(int(us / step * (1 - 40 / (WIDTH - LEFT))) + 1):
        yield number * step, f"{number * step / unit:g} {name}"


def _label(x: float, y: float, text: str, kind: str = "name") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'
