"""What can limit the quality of a model. Each limit is declared here once: sentences, pages and docs/quality.md follow
from its fields. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limit:
    name: str
    meaning: str
    """Its line in docs/quality.md and on pages."""


LIMITS = {
    limit.name: limit
    for limit in (
        Limit(name="steps", meaning="it was still getting better when it ended"),
        Limit(name="rate", meaning="its steps are too small or too large"),
        Limit(name="capacity", meaning="it is too small for what the data holds"),
        Limit(name="overfit", meaning="it memorises training rows"),
        Limit(name="ignored", meaning="it does not use an input that tells something"),
        Limit(name="dead", meaning="a part of it does not learn"),
        Limit(name="unseen", meaning="held-out users, items or categories have few training rows or none"),
        Limit(name="drift", meaning="what it learned is no longer so in the held-out time"),
        Limit(name="data", meaning="more rows like these would help"),
        Limit(name="negatives", meaning="its loss contrasts with items that are too easy"),
        Limit(name="popularity", meaning="its lists concentrate on few items"),
        Limit(name="complement", meaning="something simple knows what it does not"),
        Limit(name="noise", meaning="it is about as good as these labels allow"),
        Limit(name="leak", meaning="it is better than is possible"),
        Limit(name="protocol", meaning="too few rows or users are held out to tell"),
    )
}
