"""Records of what limits the quality of a model: what was seen of a training, and what follows from it. Torch-free."""

from __future__ import annotations

from ..jsonfile import Count, Number, Struct

NOT_MEASURED, UNCLEAR = "not measured", "unclear"
FEW = (0, 2, 10)
"""Training rows up to which ids count as unseen, as nearly unseen and as rare."""


class Mean(Struct):
    """A mean over rows, with its standard error."""

    value: Number
    error: Number
    rows: Count


class InputSeen(Struct, omit_defaults=True):
    """An input of the model, whose values were exchanged between the rows that choose the epoch."""

    name: str
    costs: Mean
    """How much larger the loss of a row is then."""
    alone: Number | None = None
    """The AUC of this input alone on held-out rows; None: not known."""


class PartSeen(Struct):
    """A tensor of weights at the start and at the end, of a large one a sample of its rows."""

    name: str
    kind: str
    """table, weight or vector."""
    rows: Count
    """Rows that were compared."""
    moved: Number
    """Share of them that changed otherwise than in proportion, as weight decay changes them."""
    distance: Number
    """Size of the change relative to the weights at the start; 0 where these are zero."""


class GroupSeen(Struct):
    """Held-out rows whose user, item or value of a column has so many training rows."""

    name: str
    """user, item or a column."""
    loss: Mean
    at_most: Count | None = None
    """None: any number above those of the other groups."""


class RepeatsSeen(Struct):
    """Held-out rows that are also training rows, number by number."""

    rows: Count
    of: Count
    agree: Number
    """Share of these whose label is that of the training row."""


class TargetsSeen(Struct):
    """Where held-out items stand in the histories that they are predicted from."""

    in_history: Number
    last: Number
    """Share that is the last item of the history."""
    training: Number
    """The same as `last` of training targets."""


class QualityEvidence(Struct, omit_defaults=True):
    """What one training showed, beside its log and its scores. A loss is the log loss of a label, or 1 less the
    discounted gain of an item; None is not measured."""

    seconds: Number = 0.0
    """What this took."""
    held: Mean | None = None
    """The loss of rows that choose the epoch."""
    trained: list[Mean] = []
    """That of training rows, without dropout, in equal parts; with times the earliest first."""
    inputs: list[InputSeen] = []
    parts: list[PartSeen] = []
    groups: list[GroupSeen] = []
    ages: list[Mean] = []
    """The loss of the scored rows in equal parts, the earliest first."""
    strongest: InputSeen | None = None
    """The input that alone predicts the label best."""
    repeats: RepeatsSeen | None = None
    later: dict[str, Number] = {}
    """Inputs that are times, with the share of rows in which they are later than the row's own."""
    known_users: dict[str, Number] = {}
    """What shows that users train whom the split promises not to, with their share of the scored rows."""
    at_most: Number | None = None
    """The highest AUC that any scores of these inputs reach on the scored rows; None: not known."""
    targets: TargetsSeen | None = None
    lists: dict[str, Number] = {}
    notes: list[str] = []
    """What was not measured, and why."""


class QualityLimit(Struct, omit_defaults=True):
    """What limits the quality of a model, as far as one training shows it."""

    limit: str
    """One of the limits, "unclear" or "not measured"."""
    confidence: str
    """low: only an experiment can confirm it."""
    because: list[str]
    """Sentences with the figures that led to it."""
    gain: Number | None = None
    """About how much better the choosing metric would be without it; None where that does not follow."""
    doubts: list[str] = []
    second: str | None = None
