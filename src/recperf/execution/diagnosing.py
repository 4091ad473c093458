"""Experiments that say what limits the quality of a run: the config with one change each, trained on the same split
within a budget of time.

The unchanged run has three seeds first, which tell how much a seed matters. Experiments are screened with a quarter of
the steps where there is no time to train each in full. What gains most on the rows that choose the epoch is kept, and
tried again on top of it, until nothing gains. The gain of each kept change on the scored rows is its share, with the
seeds of the unchanged run. In the end the best config loses each kept change once. Every child is a run in a folder of
its own: a diagnosis that was stopped goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from ..config import flatten, to_json
from ..errors import ConfigError, DataError, GateFailed, MachineError, UsageError
from ..files import write_json, writing
from ..jsonfile import as_json
from ..learn.curve import SHARES, LearningCurve
from ..learn.diagnosis import FILE, Diagnosis, Share, Sum, Tried
from ..learn.experiments import Change, changes, left_out, much_larger_rates, without_leaks
from ..learn.gains import Gain, Scored, gain, holm, pooled
from ..learn.records import QualityLimit
from ..learn.rules import distance_of, leaking_inputs
from ..learn.shares import shares_of
from ..learn.verdict import Outcome, verdict
from ..runs.derive import best_of, compared
from ..runs.evidence import Evidence
from ..runs.record import CONFIG_SCHEMA
from ..runs.schemas import LEARNING, SavedLearning
from ..stop import poll
from ..tasks import ORACLES, Task, signed
from .beside_changes import curve_of, part_of, save_logits, sums_of
from .run import TrainingRun
from .tried_configs import SCREENED, command_of, key_of, scored_of, shortened, with_change, without
from .workload import RankingConfig, Reporter, Workload

FOLDER = "diagnosis"
TIMES, LEAST_S = 5.0, 60.0
"""The budget is so many times the training, and at least so many seconds."""
SEEDS = 3
FULL = 2
"""The best of the screened experiments that are trained in full."""


class Quiet:
    """Shows nothing of a child."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **options: None


@dataclass(kw_only=True)
class Diagnosing:
    """One diagnosis of a finished run."""

    workload: Workload
    config: Any
    folder: Path
    report: Reporter
    minutes: float | None = None
    """The budget; None: five times the training."""
    _began: float = field(default_factory=monotonic)
    _scored: dict[str, Scored] = field(default_factory=dict)
    """By config."""
    _tried: list[Tried] = field(default_factory=list)
    _compared: list[tuple[str, str]] = field(default_factory=list)
    """The configs that each of them compares."""
    _left_out: list[str] = field(default_factory=list)
    _cost: float = 0.0
    """Seconds of a training in full."""
    _reserved: float = 0.0
    """Seconds of the budget that are kept for the learning curve."""
    _curve: LearningCurve | None = None
    _sums: list[Sum] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.evidence = Evidence(self.folder)
        self.result = self.evidence.result
        self.task: Task = self.workload.task
        quality = self.result.quality
        if self.task.choosing not in quality.metrics:
            fix = "recperf run with --data.validate, where the workload has it"
            raise UsageError("no rows choose the epoch, so that no experiment can be chosen", fix=fix)
        if not self.evidence.has("scores.json"):
            raise DataError("scores.json is missing", where={"run": self.folder}, fix="train the run again")
        waited = self.result.performance.waited
        self._cost = waited.training_s + waited.scoring_s if waited else LEAST_S / TIMES
        self._cost /= max(1, len(quality.seeds))
        self.budget = 60 * self.minutes if self.minutes is not None else max(LEAST_S, TIMES * self._cost)
        if part_of(self.config, SHARES[0]) is not None:
            self._reserved = min(sum(SHARES) * self._cost, self.budget / 4)
        self._inputs, self._at_most, self._moved, self._leaking = [], None, None, list[str]()
        if self.evidence.has(LEARNING):
            seen = next(iter(self.evidence.file(LEARNING, SavedLearning).seeds.values()), None)
            self._inputs = seen.inputs if seen and not self.task.ranks_items else []
            self._moved = distance_of(seen.parts) if seen else None
            self._leaking = [*leaking_inputs(seen)] if seen else []
            self._at_most = seen.at_most if seen and self.task.leading == "auc" else None

    @property
    def left(self) -> float:
        return self.budget - self._reserved - (monotonic() - self._began)

    def run(self) -> Diagnosis:
        """Run the experiments and write diagnosis.json, beside the config that is best."""
        base = self._base()
        best, kept = self._greedy(base)
        removed = self._without(best, kept)
        self._beside(best, kept)
        diagnosis = self._conclude(best, kept, removed)
        place = self.folder / FOLDER
        with writing(place):
            place.mkdir(exist_ok=True)
        saved = {"schema": CONFIG_SCHEMA, "workload": self.workload.name, "config": to_json(self._applied(kept))}
        write_json(place / "config.json", saved)
        write_json(place / FILE, as_json(diagnosis))
        return diagnosis

    # Trainings

    def _base(self) -> Scored:
        """The unchanged run with several seeds."""
        self._scored[key_of(self.config)] = scored_of(self.evidence, self.task)
        first = self.config.seed
        for seed in range(first, first + SEEDS):
            # Two at least: else nothing is known of how seeds differ.
            if seed - first < 2 or self.left > 3 * self._cost:
                began = monotonic()
                self._train(self.config, seed, f"the unchanged run, seed {seed}")
                # Other work may have begun since the run.
                self._cost = max(self._cost, monotonic() - began)
        return self._scored[key_of(self.config)]

    def _train(self, config: Any, seed: int, name: str) -> Scored:
        """The scores of a config with the seeds that it has so far and this one."""
        key = key_of(config)
        known = self._scored.get(key)
        if known is not None and seed in known.values:
            return known
        poll()
        config = replace(config, seed=seed, seeds=1, baseline_seconds=1e-6, ranking=self._ranking(config))
        folder = self.folder / FOLDER / "runs" / f"{key}-{seed}"
        began = monotonic()
        evidence = self._child(config, folder)
        self.report.say(f"  {name}: {monotonic() - began:.1f} s")
        scored = scored_of(evidence, self.task)
        if known is not None:
            scored = Scored(
                {**known.values, **scored.values},
                {**known.replicates, **scored.replicates},
                {**known.chosen, **scored.chosen},
            )
        self._scored[key] = scored
        return scored

    def _ranking(self, config: Any) -> RankingConfig:
        """Labels are not ranked among items: that would take longer than it tells."""
        ranking: RankingConfig = config.ranking
        return ranking if self.task.ranks_items else replace(ranking, users=0)

    def _child(self, config: Any, folder: Path) -> Evidence:
        options: dict[str, Any] = {"folder": folder}
        if (folder / "config.json").exists():
            if (folder / "result.json").exists() and (folder / "seal.json").exists():
                return Evidence(folder)
            options = {"resume": folder, "saved": config}
        quiet: Any = Quiet()
        run = TrainingRun(
            workload=self.workload, config=config, report=quiet, peaks=False, measured=False, **options
        )  # fmt: skip
        run.train()
        save_logits(self._logits(folder.name), run.assessment.logits_N)
        return Evidence(folder)

    def _logits(self, child: str) -> Path:
        return self.folder / FOLDER / "logits" / f"{child}.npy"

    def _applied(self, kept: Sequence[Change]) -> Any:
        config = self.config
        for change in kept:
            config = with_change(config, change)
        return config

    # Experiments

    def _greedy(self, base: Scored) -> tuple[Scored, list[Change]]:
        """Add the change that gains most on the rows that choose the epoch, again and again."""
        kept, free = list[Change](), self.result.quality.limit
        best, names, named = base, None, free.limit if free else None
        while True:
            options = [one for one in self._options(kept) if names is None or one.name in names]
            # Between changes that gain alike evidence decides.
            gained = self._compare(best, kept, options)
            near = max((one.chosen for _, one in gained), default=0.0) - 2 * math.sqrt(2) * self._noise()
            gained.sort(key=lambda one: (one[0].limit != named or one[1].chosen < near, -one[1].chosen))
            chosen = next((one for one in gained if self._holds(best, kept, *one)), None)
            if chosen is None and (not kept or names is None):
                return best, kept
            if chosen is None:
                # What gained nothing alone may gain on top of the others.
                names = None
                continue
            change, tried = chosen
            tried.kept = True
            kept, best = [*kept, change], self._scored[key_of(self._applied([*kept, change]))]
            # What lost alone hardly gains on top of it; what gained may be tried again.
            names = {one.name for one, _ in gained} | {change.name}

    def _holds(self, best: Scored, kept: Sequence[Change], change: Change, tried: Tried) -> bool:
        """Whether a change gains with the other seeds of the best config too, as far as there is time for them."""
        config = self._applied([*kept, change])
        scored = self._scored[key_of(config)]
        for seed in sorted(best.values.keys() - scored.values.keys()):
            if self.left > self._cost_of([*kept, change]):
                scored = self._train(config, seed, f"{change.name}, seed {seed}")
        tried.gain = gain(scored, best, self._seeds())
        tried.chosen = scored.mean_chosen - best.mean_chosen
        # Twice the standard error of the difference between means over so many seeds.
        return tried.chosen > 2 * self._noise() * math.sqrt(1 / len(scored.chosen) + 1 / len(best.chosen))

    def _options(self, kept: Sequence[Change]) -> list[Change]:
        """The changes that the config of the kept ones accepts, those first that the run's own evidence points to."""
        current, hinted = self._applied(kept), self._hinted()
        values, listed = to_json(current), []
        first = [] if kept else [*without_leaks(values, self._leaking), *much_larger_rates(values, self._moved)]
        for change in [*first, *changes(values), *left_out(values, self._inputs)]:
            try:
                with_change(current, change)
            except ConfigError:
                continue
            listed.append(change)
        return sorted(listed, key=lambda change: change.limit not in hinted)

    def _hinted(self) -> set[str | None]:
        """The limits that the run's own evidence points to."""
        free = self.result.quality.limit
        return {free.limit, free.second} if free else set()

    def _compare(self, best: Scored, kept: Sequence[Change], options: Sequence[Change]) -> list[tuple[Change, Tried]]:
        """The experiments that gain on top of the kept changes, trained in full with one seed."""
        cost = self._cost_of(kept)
        if self.left < cost:
            self._left_out += [one.name for one in options if one.name not in self._left_out]
            return []
        current = self._applied(kept)
        # One epoch has no quarter: those that the evidence points to come first.
        if self.left < 1.3 * cost * len(options) and shortened(current) != current:
            options = self._screened(kept, options)
        ahead = []
        for change in options:
            if self.left < self._cost_of([*kept, change]):
                self._left_out.append(change.name)
                continue
            config = self._applied([*kept, change])
            if self._attempt(config, change.name) is not None:
                tried = self._record(change, kept, config, self._applied(kept), screened=False)
                if tried.chosen > 0 and change.limit != "leak":
                    ahead.append((change, tried))
        gained = [one for one in ahead if one[1].chosen > self._noise()]
        # Seeds of the unchanged run may differ by more than those of a better one.
        return gained or sorted(ahead, key=lambda one: -one[1].chosen)[:1]

    def _cost_of(self, kept: Sequence[Change]) -> float:
        """About how long a training takes with these changes."""
        before, now = (flatten(to_json(one))["train.epochs"] for one in (self.config, self._applied(kept)))
        return float(self._cost * now / before)

    def _screened(self, kept: Sequence[Change], options: Sequence[Change]) -> list[Change]:
        """The best changes with a quarter of the steps; more steps cannot be screened, and what leaks is left out in
        full. What the run's own evidence
        points to comes first, also where there is time for only one of them in full."""
        current, gains, hinted = self._applied(kept), [], self._hinted()
        seed = self.config.seed
        steps = [one for one in options if one.limit == "steps"]
        self._train(shortened(current), seed, "the run with a quarter of the steps")
        leaks = [one for one in options if one.limit == "leak"]
        for change in (one for one in options if one.limit not in ("steps", "leak")):
            if self.left < self._cost_of(kept) * ((1 if change.limit in hinted else FULL) + 1 / SCREENED):
                self._left_out.append(change.name)
                continue
            config = shortened(with_change(current, change))
            if self._attempt(config, f"{change.name}, a quarter of the steps") is not None:
                tried = self._record(change, kept, config, shortened(current), screened=True)
                gains.append((tried.chosen, change))
        gains.sort(key=lambda pair: -pair[0])
        best = [change for chosen, change in gains[:FULL] if chosen > 0]
        return sorted([*leaks, *steps[:1], *best], key=lambda change: change.limit not in hinted)

    def _attempt(self, config: Any, name: str) -> Scored | None:
        return self._attempt_seed(config, self.config.seed, name)

    def _attempt_seed(self, config: Any, seed: int, name: str) -> Scored | None:
        """The scores of a config; None where it cannot be trained, as with steps so large that the loss diverges."""
        try:
            return self._train(config, seed, name)
        except (GateFailed, MachineError, ConfigError) as error:
            self.report.say(f"  {name}: {error.what}")
            return None

    def _record(self, change: Change, kept: Sequence[Change], config: Any, before: Any, *, screened: bool) -> Tried:
        keys = (key_of(config), key_of(before))
        new, old = (self._scored[key] for key in keys)
        tried = Tried(
            name=change.name, limit=change.limit, change=change.command, fields=dict(change.fields), screened=screened,
            chosen=new.mean_chosen - old.mean_chosen, gain=gain(new, old, self._seeds()),
            on_top=tuple(one.name for one in kept),
        )  # fmt: skip
        self._tried.append(tried)
        self._compared.append(keys)
        return tried

    def _seeds(self) -> tuple[float, int]:
        return pooled(scored.values.values() for scored in self._scored.values())

    def _noise(self) -> float:
        """How much the choosing metric differs between seeds."""
        variance, _ = pooled(scored.chosen.values() for scored in self._scored.values())
        return math.sqrt(variance)

    def _without(self, best: Scored, kept: Sequence[Change]) -> dict[str, Gain]:
        """What the best config loses without each kept change."""
        lost = {}
        for place, change in enumerate(kept[:-1]):
            others = [*kept[:place], *kept[place + 1 :]]
            if self.left < self._cost_of(others):
                self._left_out.append(f"without {change.name}")
                continue
            scored = self._attempt(self._applied(others), f"without {change.name}")
            if scored is not None:
                lost[change.name] = gain(best, scored, self._seeds())
        return lost

    def _beside(self, best: Scored, kept: Sequence[Change]) -> None:
        """What twice the rows would give, and sums with other models."""
        config, best = self._applied(kept), self._scored[key_of(self._applied(kept))]
        divided = part_of(config, SHARES[0]) is not None
        self._reserved = 0.0
        if divided:
            cost = self._cost_of(kept)
            self._curve = curve_of(best, config, self._attempt_seed, self._seeds, lambda: self.left, cost)
        if divided and self._curve is None:
            self._left_out.append("the learning curve")
        saved = {seed: self._logits(f"{key_of(config)}-{seed}") for seed in best.values}
        if self.left > 0:
            self._sums = sums_of(self.workload, config, saved, self._seeds(), self.task)

    # The verdict

    def _conclude(self, best: Scored, kept: Sequence[Change], removed: dict[str, Gain]) -> Diagnosis:
        quality, leading = self.result.quality, self.task.leading
        base = self._scored[key_of(self.config)]
        best = self._scored[key_of(self._applied(kept))]
        for one, (new, old) in zip(self._tried, self._compared):
            # Only now all is known of how seeds differ.
            one.gain = gain(self._scored[new], self._scored[old], self._seeds())
        full = [one for one in self._tried if not one.screened]
        for one, there in zip(full, holm([one.gain.chance for one in full])):
            one.confirmed = there
        rules = {name: row[leading] for name, row in quality.baselines.items() if leading in row}
        planted = next((rules.pop(name) for name in ORACLES if name in rules), None)
        name = max(rules, key=lambda rule: signed(leading, rules[rule]), default="")
        scores = [self._scored[key_of(self._applied(kept[:count]))] for count in range(len(kept) + 1)]
        keys = {change.name: key_of(with_change(self.config, change)) for change in kept}
        alone = {change: self._scored[key] for change, key in keys.items() if key in self._scored}
        shares = shares_of(kept, scores, alone, removed, self._seeds())
        if first := best_of(compared(self.task, quality)):
            whole = Gain(value=first.difference, low=first.low, high=first.high, chance=0.0, seeds=first.seeds)
            shares.insert(0, Share("baseline", name, whole))
        return Diagnosis(
            run=self.folder.resolve().name, folder=str(self.folder), workload=self.workload.name,
            task=self.task.name, metric=leading,
            verdict=self._verdict(best, base), baseline=rules.get(name), baseline_name=name, score=base.mean,
            best=best.mean, possible=self._at_most if planted is None else planted, shares=shares, tried=self._tried,
            left_out=self._missing(),
            advice=" ".join(command_of(self.config, self._applied(kept))),
            advised=gain(best, base, self._seeds()) if kept else None, seeds=len(base.values),
            seconds=monotonic() - self._began, free=quality.limit, curve=self._curve, sums=self._sums,
        )  # fmt: skip

    def _missing(self) -> list[str]:
        """Experiments that were never run."""
        tried = {one.name for one in self._tried}
        return [name for name in dict.fromkeys(self._left_out) if name not in tried]

    def _verdict(self, best: Scored, base: Scored) -> QualityLimit:
        below = best_of(compared(self.task, self.result.quality))
        first, (variance, _) = {self.config.seed}, self._seeds()
        whole = gain(best, base, self._seeds())
        return verdict(
            Outcome(
                free=self.result.quality.limit, tried=self._tried, left_out=self._missing(),
                below=below.baseline if below is not None and below.standing == "below" else "",
                noise=math.sqrt(variance), curve=self._curve, sums=self._sums, whole=whole,
                fresh=gain(without(best, first), without(base, first), self._seeds()),
                enough_seeds=whole.seeds >= SEEDS,
            )
        )  # fmt: skip
