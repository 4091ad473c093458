"""The rules about the work of operators in round numbers: both sides of every threshold, and what gains follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from example_steps import CPU, GPU, HOST, after, facts_of, row
from msgspec.structs import replace as changed

from recperf.measure import advice_rules as rules
from recperf.measure.attribution import attribute
from recperf.measure.limits import decide
from recperf.measure.program_records import EmbeddingFacts, OptimizerFacts, ProgramFacts
from recperf.measure.records import Advice, DividedOperator, Operator, Percentiles

ADAGRAD = OptimizerFacts(
    "Adagrad", "fused", plain=True, parameters=4, elements=400_000, tables=[[10_000, 16], [10_000, 16], [9, 9]]
)
"""Two tables of 10,000 rows of 64 bytes have four fifths of its elements."""
TABLE = {"table_rows": 10_000, "row_bytes": 64}
LOOKUPS = [
    row("embedding", 1.0, rows=500, distinct=200, **TABLE),
    row("embedding", 1.0, rows=100, **TABLE),
    row("embedding_dense_backward", 4.0, rows=500, distinct=250, **TABLE),
]
"""300 rows forward, 250 backward."""
UPDATE = row("addcdiv_", 40.0, part="optimizer Adagrad.step", bytes=1)
PYTHON = {"optimizer_python": {"optimizer Adagrad.step": 10.0}}


def one(advice: Advice | None) -> Advice:
    assert advice is not None
    return advice


def program(*optimizers: OptimizerFacts, **more: Any) -> ProgramFacts:
    return ProgramFacts(threads=2, cores=2, optimizers=list(optimizers), **more)


def test_tables_with_a_sparse_gradient() -> None:
    step = facts_of(*LOOKUPS, UPDATE, facts=program(ADAGRAD), seen=PYTHON)
    advice = one(rules.dense_table(step))
    # Four fifths of 50 ms and the gradient go; 6 accesses of 300 rows from memory and 90 calls remain.
    assert after(advice) == pytest.approx(100 - 44 + 1800 * 1e-4 + 90 * 0.002)
    assert advice.seen.startswith("A step uses 300 of the 20,000 rows (1.5%) of 2 tables, but Adagrad")
    assert "44.0 ms, 44% of the step" in advice.seen
    assert (advice.change, advice.settings) == ("nn.Embedding(10000, 16, sparse=True)", {"sparse": [[10_000, 16]]})
    # Both tables together fit a cache of 1.28 MB.
    for knee, ns in ((1_280_000, 10.0), (1_279_999, 100.0)):
        cached = facts_of(
            *LOOKUPS, UPDATE, facts=program(ADAGRAD), seen=PYTHON, ceilings=replace(CPU, cache_bytes=knee)
        )
        assert after(rules.dense_table(cached)) == pytest.approx(56 + 1800 * ns / 1e6 + 0.18)
    sgd = changed(ADAGRAD, kind="SGD")
    step = facts_of(*LOOKUPS, changed(UPDATE, part="optimizer SGD.step"), facts=program(sgd))
    assert after(rules.dense_table(step)) == pytest.approx(100 - 36 + 600 * 1e-4 + 12 * 0.002)


def test_tables_of_adam_get_an_optimizer_of_their_own() -> None:
    adam = changed(ADAGRAD, kind="Adam", plain=True, lr=0.001, tables=[[10_000, 16]])
    modules = [
        EmbeddingFacts("user", "EmbeddingBag", 10_000, 16, False),
        EmbeddingFacts("x", "Embedding", 5, 16, False),
    ]
    rows = [*LOOKUPS, changed(UPDATE, part="optimizer Adam.step")]
    decays = changed(adam, plain=False)
    assert rules.dense_table(facts_of(*rows, facts=program(decays, embeddings=modules))) is None, "its weight decay"
    advice = one(rules.dense_table(facts_of(*rows, facts=program(adam, embeddings=modules))))
    assert after(advice) == pytest.approx(100 - 4 - 40 * 0.4 + 3000 * 1e-4 + 60 * 0.002)
    assert advice.change.startswith(
        "nn.EmbeddingBag(10000, 16, sparse=True); rows = torch.optim.SparseAdam([user.weight], lr=0.001)  # Adam gets"
    )
    # The host of a device calls 60 more operators, of 0.5 ms each.
    rows = [changed(line, kernels=1) for line in rows]
    gpu = facts_of(*rows, facts=program(adam), ceilings=HOST, seen={"host_ms": 40.0})
    saved = 20 - 3000 * 1e-4 - 60 * 0.004
    assert gpu.gains(saved, 0, 0)[1] == pytest.approx(100 / (100 - saved))
    assert rules.dense_table(gpu) is None, "30 ms more of the host"
    cheap = replace(HOST, queue_ns=50_000.0)
    gpu = facts_of(*rows, facts=program(adam), ceilings=cheap, seen={"host_ms": 40.0})
    assert after(rules.dense_table(gpu)) == pytest.approx(100 - saved + 3)


@pytest.mark.parametrize(
    ("optimizer", "used", "advised"),
    [
        (ADAGRAD, 1999, True),
        (ADAGRAD, 2000, False),
        (changed(ADAGRAD, plain=False), 300, False),
        (changed(ADAGRAD, elements=0), 300, False),
        (changed(ADAGRAD, tables=[]), 300, False),
        (changed(ADAGRAD, kind="RMSprop"), 300, False),
    ],
)
def test_tables_of_which_a_step_uses_a_tenth_stay_dense(optimizer: OptimizerFacts, used: int, advised: bool) -> None:
    rows = [row("embedding_dense_backward", 30.0, rows=used, **TABLE), changed(UPDATE, ms=60.0)]
    assert (rules.dense_table(facts_of(*rows, facts=program(optimizer))) is not None) is advised


def test_tables_of_a_trace() -> None:
    """Its optimizer is known by name only: the passes over tensors with as many rows as the table are its own."""
    adam = OptimizerFacts("Adam", "for-loop")
    passes = [
        row("lerp_", 20.0, largest=[10_000, 16]),
        row("add", 5.0, largest=[10_000]),
        row("mul", 6.0, largest=[16, 10_000]),
        row("index_add_", 7.0, rows=100, largest=[10_000, 16], **TABLE),
    ]
    advice = one(rules.dense_table(facts_of(*LOOKUPS, *passes, facts=program(adam))))
    assert after(advice) == pytest.approx(100 - 24 + 3000 * 1e-4 + 60 * 0.002)
    assert "SparseAdam([embedding.weight], lr=lr)" in advice.change
    assert advice.settings == {}
    for name in ("_coalesce", "_sparse_mm", "embedding_sparse_backward"):
        assert rules.dense_table(facts_of(*LOOKUPS, *passes, row(name, 0.1), facts=program(adam))) is None
    whole = facts_of(*LOOKUPS, UPDATE, row("_coalesce", 0.1), facts=program(ADAGRAD))
    assert rules.dense_table(whole) is not None


def updates(kind: str, **more: Any) -> list[DividedOperator]:
    part = f"optimizer {kind}.step"
    return [row("mul_", 30.0, {"dispatch": 10.0, "bandwidth": 20.0}, part=part, **more), row("add_", 10.0, part=part)]


@pytest.mark.parametrize(
    ("kind", "elements", "moved_bytes", "adamw", "needs"),
    [
        # Bytes that a fused optimizer moves, at 20 GB/s, and one call of 2 us.
        ("Adam", 10_000_000, 0, 0.0, 10e6 * 4 * 7 / 20e6),
        ("AdamW", 10_000_000, 0, 0.0, 10e6 * 4 * 7 / 20e6),
        ("AdamW", 10_000_000, 0, 40e9, 10e6 * 4 * 7 / 40e6),
        ("SGD", 10_000_000, 0, 40e9, 10e6 * 4 * 3 / 20e6),
        ("Adagrad", 10_000_000, 0, 40e9, 10e6 * 4 * 5 / 20e6),
        ("Adam", 0, 380_000_000, 0.0, 380e6 * 7 / 19 / 20e6),
        ("AdamW", 0, 420_000_000, 0.0, 420e6 * 7 / 21 / 20e6),
        ("SGD", 0, 100_000_000, 0.0, 100e6 / 20e6),
        ("Adagrad", 0, 260_000_000, 0.0, 260e6 * 5 / 13 / 20e6),
    ],
)
def test_a_fused_optimizer(kind: str, elements: int, moved_bytes: int, adamw: float, needs: float) -> None:
    optimizer = OptimizerFacts(kind, "for-loop", fusable=True, parameters=3, elements=elements)
    rows = updates(kind, bytes=moved_bytes, calls=7)
    python = {"optimizer_python": {f"optimizer {kind}.step": 5.0}}
    step = facts_of(*rows, facts=program(optimizer), ceilings=replace(CPU, adamw=adamw), seen=python)
    advice = one(rules.optimizer_passes(step))
    assert after(advice) == pytest.approx(100 - 45 + needs + 0.002)
    assert (advice.change, advice.settings) == (f"torch.optim.{kind}(..., fused=True)", {"optimizer": "fused"})
    assert advice.seen.startswith(f"{kind} (for-loop) runs 8 operators (mul_, add_): 45.0 ms, 45% of the step")
    narrow = changed(optimizer, element_bytes=2)
    if elements:
        step = facts_of(*rows, facts=program(narrow), ceilings=replace(CPU, adamw=adamw), seen=python)
        assert after(rules.optimizer_passes(step)) == pytest.approx(100 - 45 + needs / 2 + 0.002)


def test_the_host_of_a_fused_optimizer() -> None:
    """80 ms of the host are those of 40 kernels; two of 0.5 ms and 29 calls of 0.1 ms remain for ten parameters."""
    optimizer = OptimizerFacts("SGD", "for-loop", fusable=True, parameters=10, elements=1)
    rows = [*updates("SGD", kernels=20), row("mm", 10.0, kernels=20)]
    for way, host in (("for-loop", 80 - 40 + 1 + 2.9), ("foreach", 80.0)):
        facts, seen = program(changed(optimizer, way=way)), {"host_ms": 80.0}
        step = facts_of(*rows, facts=facts, ceilings=HOST, seen=seen, python=40.0)
        assert after(rules.optimizer_passes(step)) == pytest.approx(host)


@pytest.mark.parametrize(
    ("more", "left"),
    [
        # 10 ms of calls for four parameters become those for one.
        ({"parameters": 4}, 92.5),
        ({"parameters": 2}, 95.0),
        ({"parameters": 1}, None),
        ({"parameters": 4, "sparse": [[9, 9]]}, None),
        ({"parameters": 4, "way": "foreach"}, None),
        ({"parameters": 4, "way": "fused", "fusable": True}, None),
    ],
)
def test_an_optimizer_that_cannot_be_fused(more: dict[str, Any], left: float | None) -> None:
    for kind, fusable in (("RMSprop", True), ("Adam", False)):
        optimizer = OptimizerFacts(kind, **{"way": "for-loop", "fusable": fusable, **more})
        advice = rules.optimizer_passes(facts_of(*updates(kind), facts=program(optimizer)))
        assert after(advice) == (left and pytest.approx(left))
        if advice:
            assert (advice.change, advice.settings) == (
                f"torch.optim.{kind}(..., foreach=True)",
                {"optimizer": "foreach"},
            )


def test_gradients_that_are_cleared() -> None:
    rows = [
        row("zero_", 6.0, part="optimizer Adam.zero_grad"),
        row("_foreach_zero_", 4.0, part="optimizer Adam.zero_grad"),
        row("add", 3.0, part="optimizer Adam.zero_grad"),
        row("zero_", 9.0, part="forward"),
        row("zero_", 9.0),
    ]
    advice = one(rules.cleared_gradients(facts_of(*rows)))
    assert (after(advice), advice.settings) == (pytest.approx(90.0), {"zero_grad": True})
    assert rules.cleared_gradients(facts_of(*rows[2:])) is None


def product(ms: float, precision: str | None = "float32", **more: Any) -> DividedOperator:
    known = {"flops": 1e9, "precision": precision, "kind": "product"}
    return row("mm", ms, more.pop("limits", {"compute": ms}), **{**known, **more})


@pytest.mark.parametrize(
    ("flops", "rows", "change", "left"),
    [
        ({"float32": 1e11, "bfloat16": 4e11}, [product(40.0)], "bfloat16", 100 - 30),
        ({"float32": 1e11, "bfloat16": 4e11}, [product(40.0, None)], "bfloat16", 100 - 30),
        ({"float32": 1e11, "bfloat16": 8e11, "tf32": 2e11}, [product(40.0)], "set_float32_matmul_precision", 80.0),
        ({"float32": 1e11, "bfloat16": 8e11, "float64": 5e10}, [product(40.0, "float64")], "model.float()", 80.0),
        ({"float32": 1e11, "bfloat16": 4e11, "tf32": 2e11}, [product(40.0, "tf32")], "bfloat16", 80.0),
        ({"float32": 1e11, "bfloat16": 1e11}, [product(40.0)], "", None),
        ({"float32": 1e11, "bfloat16": 4e11}, [product(40.0, "float16")], "", None),
        ({"float32": 1e11, "bfloat16": 4e11}, [product(40.0, flops=0)], "", None),
        # The precision with most of the time decides: 30 + 10 ms against 35.
        ({"float32": 1e11, "float64": 5e10, "bfloat16": 4e11},
         [product(30.0), product(35.0, "float64"), product(20.0, limits={"compute": 10.0, "cache": 10.0})],
         "bfloat16", 100 - 30),
    ],
)  # fmt: skip
def test_a_faster_precision(flops: Any, rows: list[DividedOperator], change: str, left: float | None) -> None:
    advice = rules.precision(facts_of(*rows, ceilings=replace(CPU, flops=flops)))
    assert after(advice) == (left and pytest.approx(left))
    if advice:
        assert change in advice.change
        assert advice.settings == ({"tf32": True} if "matmul" in change else {})
    assert rules.precision(facts_of(*rows, ceilings=None)) is None
    gpu = rules.precision(facts_of(*rows, ceilings=replace(GPU, flops=flops)))
    assert gpu is None or "autocast" not in gpu.change or 'autocast("cuda"' in gpu.change
    assert advice is None or "autocast" not in advice.change or 'autocast("cpu"' in advice.change


@pytest.mark.parametrize(
    ("slow", "left"),
    [
        # 5 ms at the ceiling; a suitable shape is taken to reach 30 % of it.
        (product(50.0, limits={"operator": 50.0}, flops=5e8), 50 + 5 / 0.3),
        (product(50.0, limits={"operator": 50.0}, flops=1.5e9), None),
        (product(50.0, limits={"compute": 50.0}, flops=5e8), None),
        (product(6.0, limits={"operator": 6.0}, flops=1e3), 94.0),
        (product(4.9, limits={"operator": 4.9}, flops=1e3), None),
        (product(50.0, limits={"operator": 50.0}, flops=5e8, kind="elementwise"), None),
        (product(50.0, limits={"operator": 50.0}, flops=0), None),
    ],
)
def test_the_shape_of_a_product(slow: DividedOperator, left: float | None) -> None:
    fast = product(20.0, limits={"compute": 19.0, "operator": 1.0}, flops=2e9)
    for rows in ([slow], [slow, fast], [fast, slow]):
        advice = rules.product_shape(facts_of(*rows))
        assert after(advice) == (left and pytest.approx(left, rel=1e-4))
    assert rules.product_shape(facts_of(slow, ceilings=None)) is None
    assert rules.product_shape(facts_of(slow, seen={"other_work": 0.5})) is None


def test_the_shape_of_a_product_in_both_passes() -> None:
    slow = product(50.0, limits={"operator": 50.0}, flops=5e8)
    assert (
        "computes 10 GFLOP/s where this machine reaches 100 GFLOP/s: 50.0 ms"
        in one(rules.product_shape(facts_of(slow))).seen
    )
    for largest, pads in (([64, 100], True), ([64, 128], False)):
        shape = one(rules.product_shape(facts_of(changed(slow, largest=largest))))
        assert ("multiples of 16" in shape.change) is pads
    for backward in (row("add", 1.0, part="top, backward"), row("MmBackward0", 1.0)):
        advice = one(rules.product_shape(facts_of(slow, backward)))
        assert (advice.name, advice.predicted_gain, "Time both passes" in advice.seen) == ("shape", None, True)
        for ms, advised in ((5.0, True), (4.9, False)):
            small = changed(slow, ms=ms, flops=1e3)
            assert (rules.product_shape(facts_of(small, backward)) is not None) is advised


def test_a_softmax_over_a_catalogue() -> None:
    softmax = row("_log_softmax", 30.0, largest=[64, 50_000])
    scores = row("mm", 20.0, kind="product", largest=[64, 50_000])
    of_optimizer = row("add", 9.0, largest=[50_000, 16], part="optimizer SGD.step")
    advice = one(rules.catalogue_softmax(facts_of(softmax, scores, of_optimizer)))
    # Of the 50 ms remain those of twice 512 items of 50,000.
    assert after(advice) == pytest.approx(100 - 50 + 50 * 1024 / 50_000)
    assert (advice.settings, "over 50,000 items" in advice.seen, "another loss" in advice.changes) == ({}, True, True)
    assert rules.catalogue_softmax(facts_of(row("_log_softmax", 30.0, largest=[64, 999]))) is None
    assert rules.catalogue_softmax(facts_of(row("_softmax", 30.0, largest=[64, 50_000]))) is None


def test_attention() -> None:
    softmax = row("_softmax", 10.0, calls=2, part="attend")
    products = row("bmm", 20.0, calls=4, part="attend", flops=3e8, kind="product")
    beside = [
        row("masked_fill", 5.0, part="attend"),
        row("masked_fill", 9.0, part="mlp"),
        row("exp", 9.0, part="attend"),
    ]
    # 35 ms go; 3 ms at the ceiling of products take 5 in a fused kernel.
    advice = rules.attention(facts_of(softmax, products, *beside))
    assert after(advice) == pytest.approx(100 - 35 + 5)
    back = row("_softmax_backward_data", 5.0, calls=9, part="attend")
    assert after(rules.attention(facts_of(softmax, products, back))) == pytest.approx(100 - 35 + 5)
    assert rules.attention(facts_of(softmax, changed(products, calls=3))) is None
    assert after(rules.attention(facts_of(softmax, changed(products, name="aten::baddbmm")))) == pytest.approx(75.0)
    assert rules.attention(facts_of(back, products)) is None
    assert rules.attention(facts_of(softmax, products, row("_scaled_dot_product_attention", 1.0))) is None
    # Products that are as fast as they can be leave nothing to save.
    assert rules.attention(facts_of(softmax, changed(products, flops=2e9))) is None
    unknown = one(rules.attention(facts_of(softmax, products, ceilings=None)))
    assert unknown.predicted_gain is None


def test_passes_over_memory() -> None:
    stream = {"bytes": 2e8, "memory_bytes": 1e8}
    norm = [row(name, 10.0, part="net/norm", calls=2, **stream) for name in ("mul", "add")]
    advice = one(rules.repeated_passes(facts_of(*norm, row("exp", 15.0, part="act", **stream))))
    # One of four passes remains.
    assert after(advice) == pytest.approx(85.0)
    assert advice.seen.startswith("4 element-wise passes of norm (mul, add) move 400 MB at 20 GB/s: 20.0 ms")
    assert advice.settings == {}
    model = one(rules.repeated_passes(facts_of(*norm, facts=ProgramFacts(has_model=True))))
    assert model.settings == {"compile": True}
    assert rules.repeated_passes(facts_of(*norm, facts=ProgramFacts(compiled=True))) is None
    assert rules.repeated_passes(facts_of()) is None
    single = changed(norm[0], calls=1)
    assert rules.repeated_passes(facts_of(single)) is None
    twice = one(rules.repeated_passes(facts_of(changed(norm[0], part=None))))
    assert "outside of all modules and regions" in twice.seen
    for other in (
        {"memory_bytes": 0}, {"flops": 1}, {"rows": 1}, {"fused": True}, {"kind": "reduction"}, {"name": "mine::mul"},
        {"part": "optimizer Adam.step"},
    ):  # fmt: skip
        assert rules.repeated_passes(facts_of(single, changed(norm[1], calls=1, **other))) is None


WIDTHS = replace(CPU, rows_memory=((64, 100.0), (128, 150.0), (256, 300.0)))


def test_wide_rows() -> None:
    lookup = row("embedding", 40.0, random_ms=30.0, memory_rows=1000, row_bytes=256, table_rows=5000)
    other = row("index_select", 20.0, random_ms=10.0, memory_rows=500, row_bytes=256, table_rows=7)
    narrow = row("gather", 20.0, random_ms=20.0, memory_rows=500, row_bytes=64)
    advice = one(rules.wide_rows(facts_of(lookup, other, narrow, ceilings=WIDTHS)))
    # Rows of 128 bytes take half the time of those of 256.
    assert after(advice) == pytest.approx(80.0)
    assert advice.seen.startswith("1,500 random rows of 256 bytes come from memory, at 300 ns each: 40.0 ms")
    assert advice.change.startswith("nn.Embedding(5000, 64, dtype=torch.float16)")
    line = changed(lookup, row_bytes=128)
    assert after(rules.wide_rows(facts_of(line, ceilings=WIDTHS))) == pytest.approx(90.0)
    for without in (changed(lookup, row_bytes=127), changed(lookup, row_bytes=None), changed(narrow, random_ms=90.0)):
        assert rules.wide_rows(facts_of(without, ceilings=WIDTHS)) is None
    assert rules.wide_rows(facts_of(lookup, changed(narrow, random_ms=31.0), ceilings=WIDTHS)) is None
    assert rules.wide_rows(facts_of(lookup, ceilings=None)) is None
    assert rules.wide_rows(facts_of(ceilings=WIDTHS)) is None
    unknown = one(rules.wide_rows(facts_of(changed(lookup, table_rows=None), ceilings=WIDTHS)))
    assert "nn.Embedding(0, 64," in unknown.change


def test_repeated_rows() -> None:
    often = row("embedding", 40.0, random_ms=20.0, memory_rows=1000, distinct=250)
    # More time, of which less is that of repeated rows: 12 ms against 15.
    longer = row("index", 40.0, random_ms=30.0, memory_rows=1000, distinct=600)
    advice = one(rules.repeated_rows(facts_of(longer, often)))
    assert after(advice) == pytest.approx(85.0)
    assert advice.seen.startswith("embedding reads 1,000 rows from memory, of which 250 are different: 20.0 ms")
    for other in ({"name": "aten::index_add_"}, {"distinct": 1000}, {"distinct": 0}, {"random_ms": 0.0}):
        assert rules.repeated_rows(facts_of(changed(often, **other))) is None
    assert after(rules.repeated_rows(facts_of(changed(often, distinct=1)))) == pytest.approx(100 - 20 * 0.999)


@pytest.mark.parametrize(
    ("mode", "ms", "advised"),
    [
        ("madvise", 20.0, True), ("never", 20.0, True), ("madvise", 19.9, False), ("always", 90.0, False),
        (None, 90.0, False),
    ],
)  # fmt: skip
def test_huge_pages(mode: str | None, ms: float, advised: bool) -> None:
    rows, facts = row("embedding", ms, {"latency": ms}), ProgramFacts(huge_pages=mode)
    advice = rules.huge_pages(facts_of(rows, facts=facts))
    assert (advice is not None) is advised
    assert advice is None or (advice.name, advice.predicted_gain) == ("huge pages", None)
    assert rules.huge_pages(facts_of(rows, facts=facts, ceilings=GPU)) is None


def test_page_faults() -> None:
    rows = [
        row("mul", 30.0, new_bytes=40_000_000),
        row("add", 20.0, new_bytes=60_000_000),
        row("exp", 9.0),
    ]
    advice = one(rules.page_faults(facts_of(*rows, facts=ProgramFacts(allocator="mimalloc"))))
    # 100 MB of new memory take 50 ms at 2 GB/s, in a stream 5.
    assert after(advice) == pytest.approx(55.0)
    assert advice.seen.startswith("100 MB of new memory per step (add, mul) cost page faults: 50.0 ms")
    assert advice.change == "MIMALLOC_PURGE_DELAY=-1 python ...  # or reuse the tensor: out=..."
    assert advice.settings == {"keep_memory": {"MIMALLOC_PURGE_DELAY": "-1"}}
    unknown = one(rules.page_faults(facts_of(*rows)))
    assert (unknown.change, unknown.settings) == ("reuse the tensor: out=...", {})
    short = [changed(line, ms=line.ms / 2) for line in rows]
    assert after(rules.page_faults(facts_of(*short))) == pytest.approx(100 - 25 + 5)
    assert rules.page_faults(facts_of(*rows, ceilings=GPU)) is None
    assert rules.page_faults(facts_of(*rows, ceilings=None)) is None
    assert rules.page_faults(facts_of(rows[2])) is None


def test_all_advice_and_the_explanation() -> None:
    lookup = row("embedding", 40.0, {"latency": 40.0}, random_ms=40.0, memory_rows=1000, distinct=250, row_bytes=64)
    zeros = row("zero_", 20.0, part="optimizer Adam.zero_grad")
    facts = ProgramFacts(threads=2, cores=2, huge_pages="never")
    step = facts_of(zeros, lookup, facts=facts)
    advice = rules.advise(step)
    assert [line.name for line in advice] == ["duplicates", "zero_grad", "huge pages"]
    assert {line.note for line in advice} == {None}
    busy = rules.advise(facts_of(zeros, lookup, facts=facts, seen={"other_work": 0.2}))
    assert {line.note for line in busy} == {"Predicted while other work used 20% of the cores"}
    observed = [
        Operator(**{name: getattr(one, name) for name in Operator.__struct_fields__}) for one in (zeros, lookup)
    ]
    seen = changed(step.observed, notes=["a note"], operators=observed)
    explained = rules.explain(seen, CPU, facts)
    divided = attribute(seen, CPU)
    assert (explained.shares, explained.operators) == (divided.shares, divided.operators)
    assert explained.verdict == decide(divided, seen, CPU)
    assert (explained.step_ms, explained.notes) == (Percentiles(100, 100, 100), ["a note"])
