"""AUC against samples, for own and published logs, and the samples that each needed to reach the target."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import to_json
from ...errors import DataError
from .library import TARGET
from .lines import LOG_NAME, logs_in, read


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    log: Path
    published: bool
    """Whether it is a published log, shown for comparison."""
    global_batch_size: int | None
    seed: int | None
    train_samples: int | None
    points: list[tuple[int, float]]
    """Training samples and AUC of every evaluation."""
    target: float

    @property
    def samples_to_target(self) -> int | None:
        """Samples at the first evaluation that reached the target; None if none did."""
        return next((samples for samples, auc in self.points if auc >= self.target), None)

    @property
    def best(self) -> float:
        return max(auc for _, auc in self.points)

    def as_json(self) -> dict[str, Any]:
        reached = self.samples_to_target
        epochs = reached / self.train_samples if reached and self.train_samples else None
        return {**to_json(self), "samples_to_target": reached, "epochs_to_target": epochs, "best_auc": self.best}


def curves(paths: list[Path], published: list[Path], target: float = TARGET) -> list[Curve]:
    """The curves of own logs, then of published logs that are not among them."""
    ours = logs_in(paths)
    known = {path.resolve() for path in ours}
    others = [path for path in logs_in(published) if path.resolve() not in known]
    return [
        *(_curve(path, _names(ours)[path], False, target) for path in ours),
        *(_curve(path, path.stem, True, target) for path in others),
    ]


def _names(paths: list[Path]) -> dict[Path, str]:
    """The log of a run is named by its folder, because all of them have the same file name."""
    names = {path: path.absolute().parent.name if path.name == LOG_NAME else path.stem for path in paths}
    ambiguous = len(set(names.values())) < len(names)
    return {path: str(path) for path in paths} if ambiguous else names


def _curve(path: Path, name: str, published: bool, target: float) -> Curve:
    lines = read(path)
    points = []
    for line in lines.good:
        if line.key == "eval_accuracy" and line.samples is not None and type(line.value) in (int, float):
            if not math.isfinite(line.value):
                raise DataError(f"an evaluation of this log is {line.value}", where={"file": path})
            points.append((line.samples, float(line.value)))
    if not points:
        raise DataError("this log has no evaluation: no eval_accuracy with a samples_count", where={"file": path})
    counts = {key: lines.first(key) for key in ("global_batch_size", "seed", "train_samples")}
    known = {key: value if type(value) is int else None for key, value in counts.items()}
    return Curve(name=name, log=path, published=published, points=sorted(points), target=target, **known)


def published_logs() -> list[Path]:
    """The folder of published logs, if it exists: mlperf_logs in $RECPERF_GOLDEN or ../shared/golden."""
    folder = Path(os.environ.get("RECPERF_GOLDEN") or Path("..") / "shared" / "golden") / "mlperf_logs"
    return [folder] if folder.is_dir() and any(folder.glob("*.log")) else []
