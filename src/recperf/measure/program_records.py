"""Records of a program that operators do not tell: its optimizers, loaders, embeddings and settings. Torch-free."""

from __future__ import annotations

from ..jsonfile import Struct


class OptimizerFacts(Struct):
    kind: str
    """Its class."""
    way: str
    """fused, foreach, or for-loop: how it passes over its parameters."""
    fusable: bool = False
    """Whether fused=True is possible for all of them."""
    plain: bool = False
    """Whether it has neither momentum nor weight decay, which updates of single rows would lose."""
    lr: float | None = None
    parameters: int = 0
    elements: int = 0
    """Of the parameters with dense gradients."""
    element_bytes: int = 4
    tables: list[list[int]] = []
    """Shapes of matrices of many rows with dense gradients."""
    sparse: list[list[int]] = []
    """Shapes of parameters with sparse gradients."""


class LoaderFacts(Struct):
    workers: int
    pinned: bool
    batch_size: int | None = None
    samples: int = 0
    """Of its dataset; 0: not known."""
    tensors: int = 0
    """Of a batch, where one was seen."""
    padding: float | None = None
    """Share of the ids of that batch that are zeros which fill rows."""


class EmbeddingFacts(Struct):
    name: str
    """Its path in the model."""
    kind: str
    rows: int
    width: int
    sparse: bool


class ProgramFacts(Struct):
    """tell about a program."""

    threads: int = 0
    """0: not known."""
    cores: int = 0
    optimizers: list[OptimizerFacts] = []
    loader: LoaderFacts | None = None
    """The loader that most steps use."""
    embeddings: list[EmbeddingFacts] = []
    has_model: bool = False
    """Whether the model is known, so that it can be compiled from outside."""
    compiled: bool = False
    huge_pages: str | None = None
    """Linux: whether transparent huge pages are used: always, madvise or never."""
    allocator: str = ""
    """Which one has the host's memory: glibc, mimalloc, jemalloc or tcmalloc; empty: not known."""
