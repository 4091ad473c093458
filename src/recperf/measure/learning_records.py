"""The records of how a model learns: what was seen of a training loop, and what follows from it. Torch-free.

Numbers that can be NaN or infinite, such as losses, are in what was seen only; what is written holds finite ones.
"""

from __future__ import annotations

from typing import Any

from ..jsonfile import Count, Number, Struct, as_json

HIGH, MEDIUM, LOW = "high", "medium", "low"


class ParameterSeen(Struct, kw_only=True):
    """A parameter of the model, or one that only an optimizer holds, at the steps that were looked at."""

    name: str
    shape: list[int]
    trainable: bool = True
    """Whether it requires a gradient."""
    optimized: bool = False
    """Whether an optimizer holds it."""
    written: bool = False
    """Whether anything wrote to it during the loop, be it the value that it had."""
    moved: bool = False
    """Whether values that were compared at the start and the end differ."""
    looks: int = 0
    """Looks at steps in which its optimizer stepped; for a parameter without one, at any step."""
    gradients: int = 0
    """Of these, how many had a gradient."""
    nonzero: int = 0
    """Of these, how many had one that is not zero everywhere."""
    updates: list[float] = []
    """Size of the update relative to the size of the weights, at each look with a nonzero gradient."""
    rate: float | None = None
    """Learning rate of its group when it was last looked at."""
    idle_units: float | None = None
    """Of the weight of a linear or convolutional layer: share of the output units whose gradient was always zero."""


class UnitsSeen(Struct, kw_only=True):
    """The outputs of an activation module."""

    name: str
    kind: str
    units: int
    looks: int
    rows: int
    """Rows of all looks together."""
    dead: int = 0
    """Units that were zero in every row."""
    saturated: int = 0
    """Units that were at the end of their range in nearly every row."""


class TableSeen(Struct, kw_only=True):
    """Rows of an embedding table that were compared at the start and the end."""

    name: str
    rows: int
    sampled: int
    unchanged: int
    lookups: int
    """Ids of all steps, estimated from those that were looked at."""


class RateSeen(Struct, kw_only=True):
    """The learning rate of a group of parameters at every look."""

    name: str
    rates: list[float]
    steps: list[int]


class LossesSeen(Struct, kw_only=True):
    """The values on which one line of the program called `backward`."""

    place: str
    steps: list[int]
    values: list[float]


class NonFiniteSeen(Struct, kw_only=True):
    """The first loss that was NaN or infinite."""

    place: str
    step: int
    value: str
    """nan, inf or -inf."""
    cause: str = ""
    """operator: it made the value from finite ones; outside: it may have read it from a batch; weights, or input: the
    value was there before; empty: not known."""
    where: str = ""
    operator: str = ""
    gradient: bool = False
    """Whether a gradient of the last step that was looked at before was already not finite."""


class ClearingSeen(Struct, kw_only=True):
    """Whether gradients are cleared between two steps of an optimizer."""

    name: str
    intervals: int
    cleared: int
    parameter: str = ""


class InputSeen(Struct, kw_only=True):
    """What permuting an input over rows did to the score of each held-out batch."""

    name: str
    scores: list[float]
    permuted: list[float]
    constant: bool = False
    """Whether all rows of each batch are equal in it."""


class LearningSeen(Struct, kw_only=True):
    """Everything that was seen of a training loop."""

    steps: int = 0
    looks: int = 0
    backward_calls: int = 0
    cost: float = 0.0
    """Share of the loop's time that looking took."""
    model: str = "the model"
    parameters: list[ParameterSeen] = []
    units: list[UnitsSeen] = []
    tables: list[TableSeen] = []
    rates: list[RateSeen] = []
    losses: list[LossesSeen] = []
    clearing: list[ClearingSeen] = []
    nonfinite: NonFiniteSeen | None = None
    training: list[bool] = []
    """Whether the model was in train mode, at every look."""
    differ_in_eval: list[str] = []
    """Kinds of modules in the model that do something else in eval mode: dropout or batch norm."""
    inputs: list[InputSeen] = []
    notes: list[str] = []


class Finding(Struct, kw_only=True):
    """Something that keeps a model from learning, or a part of it."""

    name: str
    """Of the rule, such as `no-gradient`."""
    sentence: str
    where: str
    """The module or parameter, or file:line of the program."""
    confidence: str
    """high, medium or low."""
    evidence: dict[str, Number]

    def __str__(self) -> str:
        return f"{self.sentence} ({self.confidence} confidence)"


class LearningReport(Struct, kw_only=True):
    """What keeps the watched model from learning, the surest first."""

    findings: list[Finding]
    steps: Count
    """Steps of the loop."""
    looks: Count
    """How many of them were looked at."""
    cost: Number
    """Share of the loop's time that looking took."""
    notes: list[str]
    """What was not seen, and why."""

    def as_json(self) -> dict[str, Any]:
        """The report as objects, arrays and numbers."""
        value: dict[str, Any] = as_json(self)
        return value

    def __str__(self) -> str:
        seen = f"learning · {self.looks:,} of {self.steps:,} steps looked at, {self.cost:.1%} of the time"
        lines = [f"  {finding}" for finding in self.findings] or ["  nothing found"]
        return "\n".join([seen, *lines, *(f"  note: {note}" for note in self.notes)])
