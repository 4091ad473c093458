"""The batch types every model reads.

Shapes: B samples, F sparse features, D dense features, V ids in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor


class Tensors:
    """A dataclass of tensors, or of other such dataclasses, that are moved together."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        return self._each(lambda part: part.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep its memory until a CUDA stream has executed what is queued so far."""
        for part in self._parts().values():
            part.record_stream(stream)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts().values())

    def _each(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, **{name: change(part) for name, part in self._parts().items()})

    def _parts(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in values.items() if isinstance(value, (Tensor, Tensors))}


def largest_ids(ids_FN: Tensor) -> tuple[int, ...]:
    """The largest id of each feature in CPU memory, read without a sign: a negative id is larger than any table."""
    unsigned = np.uint64 if ids_FN.dtype is torch.int64 else np.uint32
    return tuple(ids_FN.contiguous().numpy().view(unsigned).max(1).tolist())


@dataclass(frozen=True, eq=False)
class JaggedFeatures(Tensors):
    """Bags of ids for several features, feature-major: the layout of TorchRec's KeyedJaggedTensor.

    The bag of feature f and sample b is `values[offsets[f * B + b] : offsets[f * B + b + 1]]`.
    """

    keys: tuple[str, ...]
    values_V: Tensor
    offsets_FB1: Tensor
    one_id_a_bag: bool = False
    """Every bag holds exactly one id, so that a lookup needs no pooling. The caller guarantees it."""
    padded: bool = False
    """Values after the last bag are to be ignored; they keep shapes independent of the batch."""
    largest_F: tuple[int, ...] | None = None
    """A bound on the ids of each feature (see `largest_ids`), where it is known: a lookup need not read them again."""

    def __post_init__(self) -> None:
        bags = self.offsets_FB1.numel() - 1
        if not self.keys or bags < 0 or bags % len(self.keys):
            raise ValueError(f"{bags} bags cannot be divided evenly among {len(self.keys)} features")

    @staticmethod
    def from_ids(keys: tuple[str, ...], ids_FB: Tensor) -> JaggedFeatures:
        """Build features with one id per bag."""
        values_V = ids_FB.reshape(-1)
        return JaggedFeatures(keys, values_V, torch.arange(values_V.numel() + 1, device=values_V.device), True)

    @staticmethod
    def from_bags(keys: tuple[str, ...], bags: list[list[list[int]]]) -> JaggedFeatures:
        """Build features from nested lists, `bags[feature][sample]`; for tests and small examples."""
        flat = [bag for feature in bags for bag in feature]
        lengths = torch.tensor([0] + [len(bag) for bag in flat])
        values = torch.tensor([index for bag in flat for index in bag], dtype=torch.int64)
        return JaggedFeatures(keys, values, lengths.cumsum(0))

    @property
    def batch_size(self) -> int:
        return (self.offsets_FB1.numel() - 1) // len(self.keys)

    @cached_property
    def ids_per_key(self) -> tuple[int, ...]:
        """Number of ids of each feature. Reads offsets on the host: a GPU sync unless every bag has one id."""
        batch = self.batch_size
        if self.one_id_a_bag:
            return (batch,) * len(self.keys)
        edges = self.offsets_FB1[::batch].tolist() if batch else [0] * (len(self.keys) + 1)
        return tuple(stop - start for start, stop in zip(edges, edges[1:]))

    def __getitem__(self, key: str) -> tuple[Tensor, Tensor]:
        """Return the ids and the B + 1 offsets of one feature; offsets start at 0."""
        index, batch = self.keys.index(key), self.batch_size
        offsets_B1 = self.offsets_FB1[index * batch : (index + 1) * batch + 1]
        start = sum(self.ids_per_key[:index])
        return self.values_V[start : start + self.ids_per_key[index]], offsets_B1 - start

    def slice(self, start: int, stop: int) -> JaggedFeatures:
        """Return the samples start..stop of every feature."""
        batch = self.batch_size
        start, stop, _ = slice(start, stop).indices(batch)
        stop = max(start, stop)
        if self.one_id_a_bag:
            return JaggedFeatures.from_ids(self.keys, self.values_V.view(len(self.keys), batch)[:, start:stop])
        values, lengths = [], [self.offsets_FB1.new_zeros(1)]
        for key in self.keys:
            ids, offsets_B1 = self[key]
            values.append(ids[int(offsets_B1[start]) : int(offsets_B1[stop])])
            lengths.append(offsets_B1[start : stop + 1].diff())
        return JaggedFeatures(self.keys, torch.cat(values), torch.cat(lengths).cumsum(0))

    def trimmed(self) -> JaggedFeatures:
        """Drop the values after the last bag. Reads an offset on the host: a GPU sync if the features are padded."""
        if not self.padded:
            return self
        return replace(self, values_V=self.values_V[: int(self.offsets_FB1[-1])], padded=False)


@dataclass(frozen=True, eq=False)
class ClickBatch(Tensors):
    """Dense features, bags of ids and a 0/1 label for B samples."""

    dense_BD: Tensor
    features: JaggedFeatures
    labels_B: Tensor

    def __len__(self) -> int:
        return self.labels_B.shape[0]

    def slice(self, start: int, stop: int) -> ClickBatch:
        return ClickBatch(self.dense_BD[start:stop], self.features.slice(start, stop), self.labels_B[start:stop])


@dataclass(frozen=True, eq=False)
class HistoryBatch(Tensors):
    """The histories of B users, and whether the label of one candidate item was positive.

    The batch has T history events, sample after sample. `features` holds the ids to look up: one per sample for context
    features and the candidate, and three of every history event: the item and two groups of it.
    """

    features: JaggedFeatures
    history_offsets_B1: Tensor
    """Where each sample's history begins in the arrays of T."""
    actions_T: Tensor
    """Actions as bits: 1 listened, 2 liked, 4 skipped."""
    times_T: Tensor
    """Times of the events in seconds."""
    query_times_B: Tensor
    """Time of the last event of the history; without a history, the time of the candidate."""
    labels_B: Tensor
    """1.0 where the candidate was listened to, else 0.0."""
    rates_BF: Tensor | None = None
    """Running rates of user and item before the anchor (schema.RATES), for a model that reads them."""

    def __len__(self) -> int:
        return self.labels_B.shape[0]

    def slice(self, start: int, stop: int) -> HistoryBatch:
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        offsets_B1 = self.history_offsets_B1[start : stop + 1]
        first, last = int(offsets_B1[0]), int(offsets_B1[-1])
        return HistoryBatch(
            self.features.slice(start, stop),
            offsets_B1 - first,
            self.actions_T[first:last],
            self.times_T[first:last],
            self.query_times_B[start:stop],
            self.labels_B[start:stop],
            None if self.rates_BF is None else self.rates_BF[start:stop],
        )
