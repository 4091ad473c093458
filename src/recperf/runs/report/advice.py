"""The blocks about advice, for every kind of report: what to change, with predicted and measured gains."""

from __future__ import annotations

from typing import Any

from ...measure.records import Advice
from . import formats as fmt
from .blocks import Block, Cell, Code, Table, Text, cells

SHOWN = 3
"""Changes that a terminal describes."""
SHOWN_AS = {"rejected": "changes the losses"}
TONES = {"tried": "good", "rejected": "bad", "not judged": "bad"}


def advice_blocks(advice: list[Advice]) -> list[Block]:
    """The changes with the largest gains, the others on a page only, and a table of all where some were tried."""
    if not advice:
        return [Text("No rule of recperf knows a change that would make this step faster.", "note")]
    doubts = [one.note for one in advice if one.status == "not judged" and one.note]
    blocks: list[Block] = []
    if doubts:
        which = "The change is" if len(advice) == 1 else f"{len(doubts)} of {len(advice)} changes are"
        blocks.append(Text(f"{which} not judged. {doubts[0]}.", "warning"))
    for one in advice[:SHOWN]:
        note = f" {one.note}." if one.note and not doubts and not one.measured_ms else ""
        blocks += [Text(f"{one.seen} {_gains(one)}.{note}"), Code("Change", one.change)]
    if others := advice[SHOWN:]:
        rows = [cells(Cell(one.change, "code"), one.seen, _gains(one)) for one in others]
        blocks.append(Table(("change", "seen", "gain"), rows, left=(1, 2), fold=f"{len(others)} more changes"))
    if any(one.measured_ms for one in advice):
        blocks.append(_tried(advice))
        notes = (f"{one.name}: {one.note}." for one in advice if one.note and one.status != "not judged")
        blocks += [Text(note, "note") for note in notes]
    return blocks


def advice_facts(advice: Any) -> list[tuple[str, str | Cell]]:
    """The change to try first: of those that were tried, the one that gained most."""
    if not isinstance(advice, list):
        return []
    tried = [one for one in advice if one.status == "tried" and (one.measured_gain or 0.0) > 1.0]
    untried = (one for one in advice if not one.measured_gain and one.status != "rejected")
    one = max(tried, key=lambda one: one.measured_gain or 0.0) if tried else next(untried, None)
    if one is None:
        known = "none of the changes that were tried makes" if advice else "no rule knows a change that makes"
        return [("try", f"{known} this step faster")]
    gains = [f"{fmt.gain(one.predicted_gain, one.predicted_range)} predicted"] if one.predicted_gain else []
    gains += [f"{fmt.gain(one.measured_gain)} measured"] if one.measured_gain else []
    note = one.note or ("" if gains else "its gain cannot be predicted")
    said = [", ".join(gains), note[:1].lower() + note[1:]]
    return [("try", f"{one.change}: {'; '.join(filter(None, said))}")]


def _gains(one: Advice) -> str:
    predicted = f"Predicted gain: {fmt.gain(one.predicted_gain, one.predicted_range)}"
    text = predicted if one.predicted_gain else "Its gain cannot be predicted"
    if one.measured_gain:
        text += f"; measured: {fmt.gain(one.measured_gain)}"
    return text + ("; it changes the losses" if one.same_losses is False else "")


def _tried(advice: list[Advice]) -> Table:
    rows = [
        cells(
            Cell(one.name, width=28),
            fmt.gain(one.predicted_gain, one.predicted_range),
            fmt.time(one.measured_ms),
            fmt.gain(one.measured_gain, one.measured_range),
            _same_losses(one),
            Cell(SHOWN_AS.get(one.status, one.status), TONES.get(one.status, "muted")),
        )
        for one in advice
    ]
    head = ("name", "predicted gain", "step", "measured gain", "same losses", "status")
    note = "Gains with their ranges; step: measured with the change."
    return Table(head, rows, note, left=(5,))


def _same_losses(one: Advice) -> str:
    same, difference = one.same_losses, one.largest_difference
    return fmt.yes_or_no(same) + (f" ({difference:.1e})" if difference and not same else "")
