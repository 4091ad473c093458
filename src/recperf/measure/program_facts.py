"""What operators do not tell about a program: its optimizers, loaders, embeddings and settings. Torch is imported only
where a running program is watched; the facts of a trace follow from the names in it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..machine import usable_cores
from .program_records import EmbeddingFacts, LoaderFacts, OptimizerFacts, ProgramFacts
from .records import Operator

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have `fused=True`."""
SMALLEST_TABLE = 1000
"""Rows of a parameter that may be a table."""
_STEP = re.compile(r"(?:Optimizer\.step#|optimizer )(\w+)\.step")
PADDED_ROWS = 1024
"""Rows of a batch whose padding is counted."""
KEEPING = {
    "mimalloc": {"MIMALLOC_PURGE_DELAY": "-1"},
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "0"},
    "glibc": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)},
}
"""Variables with which an allocator keeps the memory that is freed."""
_MAPS = Path("/proc/self/maps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class ProgramWatch:
    """Collects facts while a program trains: of each optimizer when it has stepped for the first time."""

    def __init__(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.optimizers: dict[int, OptimizerFacts] = {}
        self.stepped: list[Any] = []
        """The optimizers themselves."""
        self.loader: LoaderFacts | None = None
        self.close = register_optimizer_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        from torch.compiler import is_compiling

        if not is_compiling() and id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer_facts(optimizer)
            self.stepped.append(optimizer)

    def facts(self, threads: int, modules: Iterable[tuple[str, Any]], *, has_model: bool) -> ProgramFacts:
        """Everything that is known now; `modules` are those of the model or of the program, by name."""
        from torch import nn

        return ProgramFacts(
            threads=threads,
            cores=usable_cores(),
            optimizers=list(self.optimizers.values()),
            loader=self.loader,
            embeddings=[
                EmbeddingFacts(
                    name,
                    type(module).__name__,
                    int(module.num_embeddings),
                    int(module.embedding_dim),
                    bool(module.sparse),
                )
                for name, module in modules
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            ],
            has_model=has_model,
            compiled=is_compiled(),
            huge_pages=huge_pages(),
            allocator=allocator(),
        )


def is_compiled() -> bool:
    """Whether the program has compiled a function."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["frames"])


def optimizer_facts(optimizer: Any) -> OptimizerFacts:
    """The facts of an optimizer of torch whose gradients are still there."""
    groups = optimizer.param_groups
    parameters = [tensor for group in groups for tensor in group["params"] if tensor.grad is not None]
    dense = [tensor for tensor in parameters if not tensor.grad.is_sparse]
    kind = next((base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")), "")
    on_device = bool(dense) and all(tensor.is_cuda for tensor in dense)
    foreach = any(group.get("foreach") or (group.get("foreach") is None and on_device) for group in groups)
    lr = groups[0].get("lr") if groups else None
    return OptimizerFacts(
        kind=kind or type(optimizer).__name__,
        way="fused" if any(group.get("fused") for group in groups) else "foreach" if foreach else "for-loop",
        fusable=kind in FUSABLE
        and len(dense) == len(parameters)
        and all(tensor.is_floating_point() and not group.get("differentiable") for tensor, group in
                ((tensor, group) for group in groups for tensor in group["params"])),
        plain=not any(group.get(name) for group in groups
                      for name in ("momentum", "weight_decay", "maximize", "amsgrad")),
        lr=float(lr) if lr is not None else None,
        parameters=len(dense),
        elements=sum(tensor.numel() for tensor in dense),
        element_bytes=dense[0].element_size() if dense else 4,
        tables=[list(t.shape) for t in dense if t.dim() == 2 and t.shape[0] >= SMALLEST_TABLE],
        sparse=[list(tensor.shape) for tensor in parameters if tensor.grad.is_sparse],
    )  # fmt: skip


def loader_facts(loader: Any) -> LoaderFacts | None:
    """The facts of a torch DataLoader; None for any other iterable."""
    if not hasattr(loader, "num_workers"):
        return None
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    try:
        samples = len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        samples = 0
    pinned = bool(getattr(loader, "pin_memory", False))
    return LoaderFacts(int(loader.num_workers), pinned, size and int(size), samples)


def note_batch(facts: LoaderFacts, batch: Any) -> None:
    """Note the tensors of a batch of a loader."""
    tensors = list(_tensors(batch))
    facts.tensors = len(tensors)
    facts.padding = padding_of(tensors)


def _tensors(batch: Any, depth: int = 3) -> Iterator[Any]:
    """The tensors of a batch: in lists, tuples and dicts, or in the attributes of an object."""
    from torch import Tensor

    if isinstance(batch, Tensor):
        yield batch
    elif depth:
        inside = batch if isinstance(batch, (list, tuple, dict)) else getattr(batch, "__dict__", {})
        for one in inside.values() if isinstance(inside, dict) else inside:
            yield from _tensors(one, depth - 1)


def padding_of(tensors: Iterable[Any]) -> float | None:
    """The share of zeros at the beginning or the end of rows, in the largest matrix of ids."""
    from torch import long, strided

    ids = [one for one in tensors if one.dtype == long and one.device.type == "cpu" and one.layout == strided]
    ids = [one for one in ids if one.dim() == 2 and one.size(1) > 2 and one.numel()]
    if not ids:
        return None
    used = (max(ids, key=lambda one: int(one.numel()))[:PADDED_ROWS] != 0).cumsum(1)
    before, after = (used == 0).sum(), (used == used[:, -1:]).sum() - (used[:, -1] > 0).sum()
    return max(int(before), int(after)) / int(used.numel())


def optimizer_of(part: str | None) -> str | None:
    """The class of the optimizer whose step a part is."""
    match = _STEP.search(part or "")
    return match[1] if match else None


def facts_of_rows(operators: list[Operator]) -> ProgramFacts:
    """What the names in a trace tell: its optimizers and how they pass over their parameters."""
    facts = ProgramFacts()
    for kind in sorted({kind for row in operators if (kind := optimizer_of(row.part))}):
        names = [row.name for row in operators if optimizer_of(row.part) == kind]
        ways = [way for way, start in (("fused", "aten::_fused_"), ("foreach", "aten::_foreach_"))
                if any(name.startswith(start) for name in names)]  # fmt: skip
        facts.optimizers.append(OptimizerFacts(kind, ways[0] if ways else "for-loop", kind in FUSABLE))
    return facts


def allocator() -> str:
    """The allocator of torch's tensors in host memory: one that was loaded before all others, the one that torch
    carries, or glibc's; empty where none is known."""
    import platform

    import torch

    try:
        loaded = _MAPS.read_text()
        carried = (Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes()
    except OSError:
        return ""
    preloaded = (name for name in KEEPING if f"lib{name}" in loaded)
    own = "mimalloc" if b"mimalloc" in carried else platform.libc_ver()[0]
    return next(preloaded, own if own in KEEPING else "")


def huge_pages() -> str | None:
    try:
        match = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        return None
    return match[1] if match else None
