"""result.json: the one file other tools read. `FIELDS` is its description; docs/result.md shows the same table."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from ..errors import DataError

SCHEMA = 1


@dataclass(frozen=True)
class Field:
    path: str
    """Dotted; `*` stands for any key or position."""
    kind: str
    """Types by their JSON names; `absent` among them: results of before the field existed lack it."""
    meaning: str


FIELDS = (
    Field("schema", "integer", f"version of this description; now {SCHEMA}"),
    Field("workload", "string", "name of the workload"),
    Field("run", "string", "name of the run's folder"),
    Field("quality", "object", "how good the model is on the validation rows after the last step"),
    Field("quality.metrics", "object", "mean over the seeds"),
    Field("quality.metrics.*", "number", "accuracy, auc, log_loss, calibration (predicted over observed positives), "
          "calibration_error (mean distance over 15 bins)"),
    Field("quality.spread", "object", "sample standard deviation over the seeds; empty with one seed"),
    Field("quality.spread.*", "number", "of the metric of that name"),
    Field("quality.seeds", "array", "each seed on its own"),
    Field("quality.seeds.*.seed", "integer", "training seed"),
    Field("quality.seeds.*.metrics", "object", "metrics after the last step"),
    Field("quality.seeds.*.metrics.*", "number", "as in quality.metrics"),
    Field("quality.seeds.*.best", "object", "evaluation with the highest AUC (chosen on validation rows: optimistic)"),
    Field("quality.seeds.*.best.step", "integer", "steps done then"),
    Field("quality.seeds.*.best.epoch", "integer", "epochs done then"),
    Field("quality.seeds.*.best.metrics", "object", "metrics then"),
    Field("quality.seeds.*.best.metrics.*", "number", "as in quality.metrics"),
    Field("quality.seeds.*.stopped_early", "integer or null or absent",
          "steps done when the target was met and training stopped; null: it went to its end"),
    Field("quality.target", "object", "what had to be reached; null means no bound"),
    Field("quality.target.beat", "string or null", "baseline whose AUC had to be exceeded"),
    Field("quality.target.accuracy", "number or null", "least accuracy"),
    Field("quality.target.auc", "number or null", "least AUC"),
    Field("quality.met", "boolean", "whether every bound of the target holds for the mean metrics"),
    Field(
        "quality.baselines",
        "object",
        "simple rules on the same split: majority, item_bias, user_item_bias; of dlrm-v4 popularity too",
    ),
    Field("quality.baselines.*", "object", "metrics of that rule"),
    Field("quality.baselines.*.*", "number", "as in quality.metrics"),
    Field("performance", "object", "how fast training was; evaluation and checkpoints excluded"),
    Field("performance.device", "string", "cpu or the GPU's name"),
    Field("performance.settings", "object", "what was chosen for speed, and why"),
    Field("performance.settings.*", "string", "the choice and its reason"),
    Field("performance.step_ms", "object or null", "wall time of a training step, data included; null: too few steps"),
    Field("performance.step_ms.p20", "number", "20th percentile"),
    Field("performance.step_ms.p50", "number", "median"),
    Field("performance.step_ms.p80", "number", "80th percentile"),
    Field("performance.steps_timed", "integer", "steps behind the percentiles; warm-up excluded"),
    Field("performance.samples_per_s", "number or null", "samples over training time; null: nothing was trained"),
    Field(
        "performance.mfu",
        "number or null or absent",
        "counted FLOPs of the steps of profile.json over the measured peak of this machine; null: no ceilings",
    ),
    Field("performance.budget", "object or null", "share of each part in a step, sums to 1; null: too few steps"),
    Field(
        "performance.budget.*",
        "number",
        "data, embedding, bottom, interaction, top, loss, backward, update, other; of dlrm-v4 its own parts in place "
        "of bottom, interaction and top",
    ),
    Field("performance.steps_in_budget", "integer", "steps behind the budget"),
    Field("performance.ranks", "object or absent", "of the steps of profile.json on several ranks, in ms a step"),
    Field("performance.ranks.slowest", "integer", "the rank with the most time of its own, which others wait for"),
    Field("performance.ranks.step_ms", "number", "a step, mean over the ranks"),
    Field("performance.ranks.own_ms", "number", "of it outside collectives"),
    Field("performance.ranks.exposed_ms", "number", "of it waiting in collectives"),
    Field("performance.ranks.late_ms", "number or null", "of the waiting for a rank that came late; null: not told"),
    Field("performance.ranks.moving_ms", "number or null", "of the waiting for bytes to move; null: not told"),
    Field("performance.ranks.each", "array", "the same of each rank"),
    Field("performance.ranks.each.*.rank", "integer", "its number"),
    *(
        Field(f"performance.ranks.each.*.{name}_ms", kind, f"as performance.ranks.{name}_ms")
        for name, kind in (
            ("step", "number"), ("own", "number"), ("exposed", "number"), ("late", "number or null"),
            ("moving", "number or null"),
        )
    ),
    Field("data", "object", "what was trained on"),
    Field("data.name", "string", "dataset"),
    Field("data.digest", "string", "SHA-256 of its content"),
    Field("data.rows", "integer", "rows in all"),
    Field("data.train_rows", "integer", "rows trained on"),
    Field("data.valid_rows", "integer", "rows scored"),
    Field("data.split", "string", "how they were divided"),
    Field("data.synthetic", "boolean", "true when the data is made up"),
    Field("data.skipped", "object or absent", "lines of a log that were left out; only where some were"),
    Field("data.skipped.*", "integer", "how many for that reason"),
    Field("provenance", "object", "where the result comes from"),
    Field("provenance.commit", "string or null", "commit of the checkout; null outside one"),
    Field("provenance.dirty", "boolean or null", "whether files differed from the commit"),
    Field("provenance.packages", "object", "installed versions"),
    Field("provenance.packages.*", "string", "version of that package"),
    Field("provenance.machine", "string", "fingerprint of the static facts in machine.json"),
    Field("provenance.seed", "integer", "first training seed"),
    Field("provenance.data_digest", "string", "the same as data.digest"),
    Field("provenance.command", "array", "command line of the process that finished the run"),
    Field("provenance.command.*", "string", "word"),
    Field("provenance.started", "string", "when the run began, UTC"),
    Field("provenance.ended", "string", "when it finished, UTC"),
    Field("provenance.resumes", "integer", "how often it was interrupted and resumed"),
)  # fmt: skip

_KINDS: dict[str, Any] = {
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= sys.float_info.max,
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "null": lambda v: v is None,
    "absent": lambda v: False,
}


def faults(result: Any, fields: tuple[Field, ...] = FIELDS) -> list[str]:
    """Every way in which a result differs from its description: missing, unknown and ill-typed fields."""
    if not isinstance(result, dict):
        return ["the result is not an object"]
    return _compare(result, [(field.path.split("."), field.kind) for field in fields], "")


def _compare(value: Any, fields: list[tuple[list[str], str]], where: str) -> list[str]:
    keyed = dict(enumerate(value)) if isinstance(value, list) else value
    found: list[str] = []
    known = {path[0]: kind for path, kind in fields if len(path) == 1}
    heads = {path[0] for path, _ in fields}
    for name in heads - {"*"}:
        if name not in keyed and "absent" not in known.get(name, ""):
            found.append(f"{where}{name} is missing")
    for key, inner in keyed.items():
        head = key if key in heads else "*"
        if head not in heads:
            found.append(f"{where}{key} is not described")
            continue
        kind = known.get(str(head), "object")
        if not any(_KINDS[word](inner) for word in kind.split(" or ")):
            found.append(f"{where}{key} should be {kind}, is {type(inner).__name__}")
        deeper = [(path[1:], kind) for path, kind in fields if path[0] == head and len(path) > 1]
        if isinstance(inner, (dict, list)):
            found += _compare(inner, deeper, f"{where}{key}.")
    if isinstance(keyed, dict) and where == "performance.budget." and abs(sum(keyed.values()) - 1) > 1e-6:
        found.append("performance.budget does not sum to 1")
    return found


def checked(result: dict[str, Any]) -> dict[str, Any]:
    """The result itself, refused when it does not fit its own description."""
    wrong = faults(result)
    if wrong:
        raise DataError(f"result.json would not fit its description: {'; '.join(wrong[:5])}")
    return result
