"""How a step whose operators ran on a processor is divided: equations over clocks, samples and a trace. Torch-free.

A plain step is as long as its user sees it, but only its clocks are known. A traced step is slower, and its operators
are known. In ms of one step, the thread of a plain step does this:

    |<----------------------- own ----------------------->|   without waits for input, and in exchanges of ranks
    | communication | blocked | python |    operators     |
                              |<--------- rest ---------->|

and that of a traced one:

    |<--- outside --->|<----- others ----->|<--- inside --->|<-- stuck -->|
    | no operator     | collectives, or    | operators      | operators that wait for a page of a file
                      | beside: only other                      or of swap space
                        threads run operators

`communication` and `blocked` are measured. The rest is divided as the traced step is: python to operators as what the
interpreter took outside of operators to the time inside them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostClocks:
    """What was measured of plain steps and of traced ones, in ms of one step."""

    own: float
    """Of a plain step, without its waits for input and in exchanges of ranks."""
    off: float
    """Of it, the time in which the thread was off its core, but not because other work had it."""
    sampled_off: float | None
    """The same outside of operators, by samples of the stack of all steps; None: there are too few."""
    outside: float
    """Of a traced step: its thread runs no operator, and waits for nothing that the trace shows."""
    collectives: float
    """Its thread waits in collectives."""
    beside: float
    """Only other threads run operators."""
    inside: float
    """Its operators, without `stuck` and `cut`."""
    stuck: float
    """They wait for pages of a file or of swap space, by the share that a counted step tells."""
    cut: float
    """What was cut of single calls, because other work had their core meanwhile."""
    traced_off: float
    """The thread of a traced step was off its core."""
    waited_off: float
    """The same while operators waited for threads of their own, by a counted step."""
    preempted: float
    """Share of the traced time in which other work had the core."""


@dataclass(frozen=True, kw_only=True)
class HostParts:
    """The parts of a plain step in ms; they add up to `own`."""

    communication: float
    blocked: float
    python: float
    operators: float
    scale: float
    """Times of a plain step over those of the traced one, by which each operator is scaled."""
    slowed: float
    """The same without the time that other work took from either."""


def divided(step: HostClocks) -> HostParts:
    """The parts of a plain step."""
    others = step.collectives + step.beside
    # The thread is off its core while it waits for others, and while an operator waits for its own threads: by what
    # was counted, or beside other work by what a traced thread was off and cannot have been outside of operators.
    explained = others + max(step.waited_off, step.traced_off - others - step.stuck - step.outside)
    # Outside of operators it is off for no longer than traced steps are there, or than samples of all steps tell.
    most = step.outside + step.stuck + (step.off if step.sampled_off is None else step.sampled_off)
    communication = min(step.own, step.collectives)
    blocked = min(step.own - communication, max(0.0, min(step.off - explained, most)))
    rest = step.own - communication - blocked
    # Of the time outside of operators the interpreter has what the thread was on its core, and other work took the
    # core at moments that do not depend on what it ran.
    cut = step.cut / max(1e-9, step.inside + step.cut)
    interpreter = max(0.0, step.outside - max(0.0, step.traced_off - explained - step.stuck))
    interpreter *= 1 - min(step.preempted, cut)
    traced = interpreter + step.inside
    scale = rest / traced if traced > 0 else 0.0
    return HostParts(
        communication=communication,
        blocked=blocked,
        python=interpreter * scale if traced > 0 else rest,
        operators=step.inside * scale,
        scale=scale,
        slowed=scale / max(1e-9, 1 - max(0.0, step.preempted - cut)),
    )
