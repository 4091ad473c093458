"""A trained model as files that need no recperf: tables as Parquet, the dense part as safetensors and as a program.

The program (`torch.export`) takes rows of the tables, looked up, and other inputs that manifest.json describes; the
first dimension of each is the number of samples.

Shapes: R rows of a table, W width of a row.
"""

from __future__ import annotations

import io
import os
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count as counting
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.tables import pyarrow
from ..errors import MachineError, UsageError
from ..files import write_atomic, write_json
from ..folders import new_folder, temporary_folder
from ..jsonfile import as_json
from ..stop import call, poll
from ..train.checkpoint_state import write_tensors
from ..train.device import applied
from .serving import Export, Served, TableExport, TrainedModel, in_tiers

FORMAT = 1
EXAMPLES = 8
ROUNDINGS = 8
"""Roundings of a matrix product with its norm and activation, each in the worst direction."""
EPSILON = {"float32": 2.0**-23, "tf32": 2.0**-10, "bfloat16": 2.0**-7}
GROUP_BYTES = 1 << 24
"""Bytes of a row group of a table."""
REFUSED = 74
"""Exit code of the process that traces a model if it could not write, with the system's error number as output."""
TRACE = f"""
import io, sys
_, given, path, logits, compiled, *sys.path = sys.argv
import torch
module, traced, inputs = torch.load(given, weights_only=False)
batch = torch.export.Dim("batch", min=1, max=1 << 20)
with torch.no_grad():
    program = torch.export.export(module, (), kwargs=traced, dynamic_shapes={{name: {{0: batch}} for name in traced}})
    content, outcome = io.BytesIO(), io.BytesIO()
    torch.export.save(program, content)
    content.seek(0)
    results = [torch.export.load(content).module()(**inputs)]
    if compiled:
        from torch._inductor import aoti_compile_and_package, aoti_load_package

        results.append(aoti_load_package(aoti_compile_and_package(program, package_path=compiled))(**inputs))
    torch.save(results, outcome)
try:
    for name, written in ((path, content), (logits, outcome)):
        with open(name, "wb") as file:
            file.write(written.getbuffer())
except OSError as error:
    print(error.errno)
    sys.exit({REFUSED})
"""
"""The program of the process that traces a model."""
PROGRAM, DENSE, EXAMPLE, EXAMPLE_ROWS = "program.pt2", "dense.safetensors", "example.safetensors", "example.parquet"
COMPILED = "compiled.pt2"
INDEX = "items.faiss"


def export(
    model: TrainedModel,
    folder: Path,
    facts: Mapping[str, Any],
    notice: Callable[[str], None] = lambda text: None,
    *,
    earlier: TrainedModel | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Write a model to a new folder; `facts` go into its manifest. Returns the manifest. Where there is an `earlier`
    model, tables have only the rows that are new or differ from that model's. With `compiled` the program is also
    compiled for this machine's processor."""
    served: Served = model.served
    content, changes = _content(model), None
    if earlier is not None:
        changes = compared(content.tables, _content(earlier).tables)
        content = replace(content, tables=[one.table for one in changes], vectors_IW=None)
    with new_folder(folder) as draft:
        manifest = {
            "format": FORMAT,
            **facts,
            **as_json(model.facts),
            "tables": [
                {
                    **_write_table(draft, one, number),
                    **(_write_change(draft, changes[number], number) if changes else {}),
                }
                for number, one in enumerate(content.tables)
            ],
            "dense": {"file": DENSE},
            "program": _write_program(draft, content, served.settings.precision, compiled),
            "example": {"inputs": EXAMPLE, "rows": EXAMPLE_ROWS, "logits": "logits of example.safetensors"},
            "more": [f"{name}.parquet" for name in content.more],
            "index": None if content.vectors_IW is None else _write_index(draft, content.vectors_IW),
            "encoding": dict(content.encoding),
        }
        tensors = {**content.inputs, "logits": content.logits_B}
        for file, parts in ((DENSE, content.program.state_dict()), (EXAMPLE, tensors)):
            write_tensors(draft / file, {name: one.detach().cpu().contiguous() for name, one in parts.items()})
        for name, rows in {Path(EXAMPLE_ROWS).stem: content.example, **content.more}.items():
            pyarrow(".parquet").write_table(rows, str(draft / f"{name}.parquet"))
        write_json(draft / "manifest.json", manifest)
        write_atomic(draft / "README.md", _readme(manifest).encode())
    program = manifest["program"]
    if not program["largest_difference"] <= program["expected_difference"]:
        notice(
            f"the exported program differs from the model by {program['largest_difference']:.2g} on the example, more "
            f"than the {program['expected_difference']:.2g} that rounding explains: do not use it unexamined"
        )
    return manifest


def _content(model: TrainedModel) -> Export:
    """What a model has to export, with an example from its held-out rows."""
    served = model.served
    if in_tiers(served.model):
        raise MachineError(
            f"an export reads whole tables, which do not fit here: {served.settings.reasons['tables']}",
            fix="a machine with more memory; recperf score and recperf recommend work here",
        )
    table, inputs = next(iter(served.held_out(model.seed)))
    inputs, table = served.first(inputs, EXAMPLES), table.slice(0, EXAMPLES)
    with applied(served.settings), torch.no_grad():
        return served.export(table, inputs)


@dataclass(frozen=True, eq=False)
class TableChange:
    """The rows of a table that are new or differ from those of an earlier model, and the ids that only that one has."""

    table: TableExport
    dropped: Any
    counts: dict[str, int]
    rows: Any = None
    """The row of every id, also of those whose weights are the same; None for a table without ids."""


def compared(tables: list[TableExport], earlier: list[TableExport]) -> list[TableChange]:
    """What changed in each table since an earlier model."""
    before = {one.name: one for one in earlier}
    for table in tables:
        old = before.get(table.name)
        if old is None or old.weight_RW.shape[1] != table.weight_RW.shape[1]:
            what = f"the earlier run has no table {table.name!r} of width {table.weight_RW.shape[1]}"
            raise UsageError(what, fix="--since the run that this one started from")
    changes = [_change(_by_row(table), _by_row(before[table.name])) for table in tables]
    return [
        change if table.ids is None else replace(change, rows=pyarrow().table({"id": table.ids, "row": table.rows_I}))
        for table, change in zip(tables, changes)
    ]


def _by_row(table: TableExport) -> TableExport:
    """A table without ids with the numbers of its rows as ids."""
    rows_R = np.arange(len(table.weight_RW))
    return replace(table, ids=pyarrow().array(rows_R), rows_I=rows_R) if table.ids is None else table


def _change(table: TableExport, old: TableExport) -> TableChange:
    arrow, compute = pyarrow(), pyarrow(".compute")
    if table.ids.type != old.ids.type:
        raise UsageError(f"the ids of table {table.name!r} are of another kind in the earlier run")
    place_I = compute.index_in(table.ids, value_set=old.ids).fill_null(-1).to_numpy(zero_copy_only=False).copy()
    # Entries without an id are those of any other id, in row 0, and of a missing one.
    without_I, old_without = (np.asarray(compute.is_null(one.ids)) for one in (table, old))
    for is_other in (True, False):
        there = np.flatnonzero(old_without & ((old.rows_I == 0) == is_other))
        place_I[without_I & ((table.rows_I == 0) == is_other)] = there[0] if len(there) else -1
    new_I, both = place_I < 0, np.flatnonzero(place_I >= 0)
    rows, old_rows = torch.as_tensor(table.rows_I[both]), torch.as_tensor(old.rows_I[place_I[both]])
    same_I = np.zeros(len(place_I), np.bool_)
    same_I[both] = (table.weight_RW.detach().cpu()[rows] == old.weight_RW.detach().cpu()[old_rows]).all(1).numpy()
    chosen = np.flatnonzero(~same_I)
    dropped = old.ids.filter(compute.invert(compute.is_in(old.ids, value_set=table.ids))).drop_null()
    counts = {
        "new": int(new_I.sum()), "changed": len(chosen) - int(new_I.sum()), "unchanged": int(same_I.sum()),
        "dropped": len(dropped),
    }  # fmt: skip
    written = replace(table, ids=table.ids.take(arrow.array(chosen)), rows_I=table.rows_I[chosen])
    return TableChange(written, dropped, counts)


def _write_change(draft: Path, change: TableChange, number: int) -> dict[str, Any]:
    """Write the ids that a table no longer has, and the row of each that it has; returns what the manifest says of the
    changes."""
    files = {}
    for name, rows in (("dropped", pyarrow().table({"id": change.dropped})), ("rows", change.rows)):
        if rows is not None:
            files[f"{name}_file"] = file = f"tables/{number:03d}-{name}.parquet"
            pyarrow(".parquet").write_table(rows, str(draft / file))
    return {**change.counts, **files}


def _write_table(draft: Path, table: TableExport, number: int) -> dict[str, Any]:
    arrow, compute, parquet = pyarrow(), pyarrow(".compute"), pyarrow(".parquet")
    weight_RW = table.weight_RW.detach().cpu()
    count = len(weight_RW) if table.ids is None else len(table.ids)
    width = weight_RW.shape[1]
    kind = arrow.int64() if table.ids is None else table.ids.type
    schema = arrow.schema(
        {
            table.kind: kind,
            **({} if table.ids is None else {"entry": arrow.string(), "row": arrow.int64()}),
            "embedding": arrow.list_(arrow.float32(), width),
        }.items()
    )
    (draft / "tables").mkdir(exist_ok=True)
    # A user's column may have any name, also one that is a path or too long for a file.
    file = f"tables/{number:03d}-{re.sub('[^A-Za-z0-9_]+', '-', table.name)[:40]}.parquet"
    step = max(1, GROUP_BYTES // (4 * width))
    with parquet.ParquetWriter(str(draft / file), schema) as writer:
        for first in range(0, count, step):
            poll()
            here = slice(first, min(first + step, count))
            if table.ids is None:
                columns, rows_RW = [arrow.array(range(here.start, here.stop), kind)], weight_RW[here]
            else:
                rows = torch.as_tensor(table.rows_I[here])
                ids, others = table.ids[here], arrow.array((rows == 0).numpy())
                without = compute.if_else(others, "other", "missing")
                entries = compute.if_else(compute.is_null(ids), without, "id")
                columns, rows_RW = [ids, entries, arrow.array(rows.numpy())], weight_RW[rows]
            flat = arrow.array(rows_RW.contiguous().float().flatten().numpy())
            columns.append(arrow.FixedSizeListArray.from_arrays(flat, width))
            writer.write_table(arrow.table(columns, schema=schema))
    return {
        "name": table.name, "file": file, "key": table.kind, "entries": count, "rows": len(weight_RW), "dim": width,
        "meaning": table.meaning,
    }  # fmt: skip


def _write_index(draft: Path, vectors_IW: Tensor) -> dict[str, Any]:
    """Write vectors as FAISS writes an exact index for inner products (IndexFlatIP)."""
    items, width = vectors_IW.shape
    inner_product, trained, unused = 0, True, 1 << 20
    header = struct.pack("<4siqqq?iQ", b"IxFI", width, items, unused, unused, trained, inner_product, items * width)
    write_atomic(draft / INDEX, header + vectors_IW.detach().cpu().float().contiguous().numpy().tobytes())
    return {"file": INDEX, "items": items, "dim": width, "metric": "inner product"}


def _write_program(draft: Path, content: Export, precision: str, compiled: bool) -> dict[str, Any]:
    """Trace the dense part for any number of samples, and check that it, also if it is `compiled`, gives what the model
    gives."""
    module, inputs = content.program.cpu().eval(), {name: one.cpu() for name, one in content.inputs.items()}
    # A prime number of samples that divides no other size, and is larger than usual numbers of features: where sizes or
    # products of them are equal, inside the model too, the tracer may take the number of samples for a constant.
    sizes = {size for one in (*inputs.values(), *module.state_dict().values()) for size in one.shape if size}
    primes = (number for number in counting(31) if all(number % factor for factor in range(2, number)))
    samples = next(prime for prime in primes if all(size % prime for size in sizes))
    traced = {name: one[torch.arange(samples) % len(one)] for name, one in inputs.items()}
    results = _trace(module, traced, inputs, draft / PROGRAM, draft / COMPILED if compiled else None)
    difference = max(float((logits_B - content.logits_B.cpu()).abs().max()) for logits_B in results)
    described = [
        {"name": name, "shape": ["batch", *one.shape[1:]], "dtype": str(one.dtype).removeprefix("torch."),
         "meaning": content.meanings[name]}
        for name, one in inputs.items()
    ]  # fmt: skip
    return {
        "file": PROGRAM, **({"compiled": COMPILED} if compiled else {}), "inputs": described,
        "output": content.output, "largest_difference": difference,
        "expected_difference": _expected_difference(content, precision),
    }  # fmt: skip


def _trace(
    module: nn.Module, traced: dict[str, Tensor], inputs: dict[str, Tensor], path: Path, compiled: Path | None
) -> list[Tensor]:
    """Write the program of a module for any number of samples, compiled too if that has a path, and return what each
    gives for `inputs`.

    This is done in a process of its own: where the calling one counts operators or records their FLOPs, the number of
    samples would become a constant. It writes with Python's own files: torch's do not say why they cannot be written.
    """
    with temporary_folder() as folder:
        given, logits = folder / "given.pt", folder / "logits.pt"
        content = io.BytesIO()
        torch.save((module, traced, inputs), content)
        given.write_bytes(content.getbuffer())
        command = [sys.executable, "-c", TRACE, *map(str, (given, path, logits, compiled or "")), *sys.path]
        done = call(command)
        if done.returncode == REFUSED:
            number = int(done.stdout.split()[-1])
            raise OSError(number, os.strerror(number), str(path))
        if done.returncode:
            *_, last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            what = "trace the model, or AOTInductor cannot compile it" if compiled else "trace the model"
            raise MachineError(f"torch.export cannot {what}: {last}")
        results: list[Tensor] = torch.load(logits)
    return results


def _expected_difference(content: Export, precision: str) -> float:
    """What rounding may change: the model computes in its own precision, the program in float32 and in another order.

    Each matrix product is counted as a few roundings of a number as large as the largest logit.
    """
    products = sum(one.dim() > 1 for one in content.program.parameters())
    largest = max(1.0, float(content.logits_B.abs().max()))
    return ROUNDINGS * (1 + products) * EPSILON[precision] * largest


INDEXED = f"""
`{INDEX}` holds the vectors of the items in the order of the first table: `index = faiss.read_index("{INDEX}")`, and
`scores, rows = index.search(program(**example).detach().numpy(), 10)`. hnswlib takes the column
`embedding` of that table with `add_items`, in the space `ip`.
"""


COMPILED_README = f"""
`torch._inductor.aoti_load_package("{COMPILED}")` is the same program, compiled for the processor that exported it.
"""


SINCE = """
They have the embeddings that are new or differ from those of the run {since}, and a file beside each has the ids
dropped since. Embeddings that are not here are as that run exported them; `…-rows.parquet` has the row of every id,
which may differ from that run's. The program and its weights are complete.
"""


def _readme(manifest: dict[str, Any]) -> str:
    inputs = "\n".join(
        f"- `{one['name']}` {one['shape']} {one['dtype']}: {one['meaning']}" for one in manifest["program"]["inputs"]
    )
    tables = "\n".join(
        f"- `{one['file']}`, {one['entries']:,} entries by `{one['key']}`, width {one['dim']}: {one['meaning']}"
        for one in manifest["tables"]
    )
    return f"""# {manifest["workload"]}, seed {manifest["seed"]}, step {manifest["step"]}

Exported by recperf. Reading it needs torch, pyarrow and safetensors only; `manifest.json` has the same facts, and under
`encoding` how the values of imported columns become inputs.

Tables, with the column `embedding`; `entry` says whether it is that of an id, of a missing one or of any other:
{SINCE.format(**manifest) if "since" in manifest else ""}
{tables}

Inputs of the program, given by name:

{inputs}

```python
import torch
from safetensors.torch import load_file

program = torch.export.load("{PROGRAM}").module()
example = load_file("{EXAMPLE}")
logits = example.pop("logits")
print((program(**example) - logits).abs().max())  # {manifest["program"]["output"]}
```
{COMPILED_README if "compiled" in manifest["program"] else ""}{INDEXED if manifest["index"] else ""}
`{EXAMPLE_ROWS}` has the rows of the example, `{DENSE}` the weights of the program.
"""
