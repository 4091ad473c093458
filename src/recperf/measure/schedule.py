"""How many steps of a loop are observed: warm-up steps, then timed ones, then traced and counted ones. A loop that ends
soon is traced early and has fewer of each."""

from __future__ import annotations

from dataclasses import dataclass

from .clocks import MOST_PLAIN, TRACED, Counts

WARM_UPS = 3
COUNTED = 3
PLAIN_SECONDS, FEWEST_PLAIN = 1.0, 6
PATIENCE_S = 5.0
"""Where counting a step takes longer, two counted ones are enough."""
FEW_WARM_UPS, FEW_PLAIN, FEW_TRACED, FEW_COUNTED = 2, 2, 1, 2
"""Numbers of steps where the loop may end soon: eight steps are enough to see something of everything."""
FEW = 12
"""A loop of so few steps leaves no time for more than that."""
SHORT, PLAIN_FIRST = 30, 8
"""A loop of SHORT steps has time for PLAIN_FIRST plain ones before those that are traced."""
SAMPLES, SAMPLED_NS = 200, 3_000_000_000
"""A program that goes on anyway is sampled until there are so many samples, at most for so long."""
LONG = 60
"""A loop of this many steps is long enough for the usual order, with a third of them timed."""
ENDLESS = 1 << 30
WATCHED = 8
"""The light mode times one in this many steps."""
WAITS = 0.05
"""Share of a step from which waiting for input matters."""


@dataclass(kw_only=True)
class Schedule:
    """Says when enough steps of a kind were seen."""

    counts: Counts | None = None
    """How many steps to observe, where that is fixed."""
    most_plain: int = MOST_PLAIN
    expected: int | None = ENDLESS
    """Steps that the loop has, as far as known. Where they may be few, tracing and counting come early."""
    goes_on: bool = False
    """Whether the loop goes on however long it is observed."""

    @property
    def few(self) -> bool:
        return self.counts is None and self.expected is not None and self.expected <= FEW

    @property
    def hurries(self) -> bool:
        """Whether the loop may end before the usual order of states is through."""
        return self.counts is None and (self.expected is None or self.expected < LONG)

    @property
    def usual(self) -> bool:
        return self.counts is None and not self.hurries

    def warm(self, steps: int) -> bool:
        """Whether so many warm-up steps are enough."""
        usual = FEW_WARM_UPS if self.hurries else WARM_UPS
        return steps >= (self.counts.warm if self.counts else usual)

    def timed(self, steps: int, seconds: float, *, blocks: int | None, traced: bool) -> bool:
        """Whether enough steps were timed. `blocks`: stretches that a GPU timed, if there is one; `traced`: others were
        traced already."""
        if self.counts is not None:
            return steps >= self.counts.plain + traced * self.counts.again
        if steps >= 3 and seconds > 10 * PLAIN_SECONDS:
            return True
        if not traced and self.expected is not None and steps >= max(FEWEST_PLAIN, self.expected // 3):
            return True
        first = FEW_PLAIN if self.expected is None or self.expected < SHORT else PLAIN_FIRST
        if not traced and self.hurries and steps >= first:
            return True
        if steps < FEWEST_PLAIN or (blocks is not None and blocks < FEWEST_PLAIN):
            return False
        return seconds >= PLAIN_SECONDS or steps >= self.most_plain

    def traced(self, steps: int, seconds: float, *, few: bool) -> bool:
        """Whether enough steps were traced; `few`: one shows what there is to see."""
        if self.counts is not None:
            return steps >= self.counts.traced
        return steps >= (FEW_TRACED if few else TRACED) or (steps > 0 and seconds > 4 * PLAIN_SECONDS)

    def counted(self, steps: int, seconds: float) -> bool:
        """Whether enough steps were counted, of which the last took so many seconds."""
        if self.counts is not None:
            return steps >= self.counts.counted
        return steps >= (FEW_COUNTED if self.few else COUNTED) or (steps >= 2 and seconds > PATIENCE_S)

    def samples_missing(self, samples: int, ns: int) -> bool:
        """Whether places would be known better for a longer look, and the loop has time for that."""
        return self.goes_on and self.counts is None and samples < SAMPLES and ns < SAMPLED_NS
