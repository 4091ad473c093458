"""Rules of advice on made-up evidence: where they apply, where they must not, and the gain that they predict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from recperf.measure import advice_rules as rules
from recperf.measure import program_facts
from recperf.measure.advice import AdviceFacts
from recperf.measure.attribution import classify
from recperf.measure.ceilings import Ceilings
from recperf.measure.program_facts import padding_of
from recperf.measure.program_records import EmbeddingFacts, LoaderFacts, OptimizerFacts, ProgramFacts
from recperf.measure.random_rows import random_rows
from recperf.measure.records import Advice, DividedOperator, Observed, Operator, Percentiles, Place, PlaceShare

CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float64": 5e10, "float32": 1e11, "bfloat16": 5e10}, stream=20e9,
    first_touch=2e9, cached=60e9, cache_bytes=8_000_000, stream_cache_bytes=8_000_000, largest_cache=8_000_000,
    rows_memory=((64, 100.0), (256, 130.0), (1024, 300.0)), rows_cache=((64, 5.0), (1024, 20.0)),
    calls={"elementwise": 1000.0, "index": 2000.0, "view": 1000.0}, kernel_ns=2000.0,
)  # fmt: skip
ADAM = OptimizerFacts(
    "Adam", "for-loop", fusable=True, plain=True, lr=0.001, parameters=2, elements=10_000_000, tables=[[300_000, 32]]
)
STEP = 100.0


def row(name: str, ms: float, limit: str = "operator", part: str | None = None, **more: Any) -> DividedOperator:
    known = {"kind": "elementwise", "calls": 1, "python_calls": 1, "limits": {limit: ms}, "random_ms": 0.0, "note": ""}
    return DividedOperator(name=f"aten::{name}", part=part, ms=ms, **{**known, **more})


def evidence(
    *rows: DividedOperator, facts: ProgramFacts | None = None, ceilings: Ceilings | None = CEILINGS,
    device: str = "cpu", **waits: float,
) -> AdviceFacts:  # fmt: skip
    """A step of 100 ms: what rows and waits do not explain is communication, about which no rule knows anything."""
    rest = STEP - sum(one.ms for one in rows) - sum(waits.values())
    observed = Observed(device, 2, Percentiles(STEP, STEP, STEP), {**waits, "communication": rest}, list(rows))
    return AdviceFacts(observed, list(rows), ceilings, facts or ProgramFacts(threads=2, cores=2))


def names(*arguments: Any, **more: Any) -> list[str]:
    return [one.name for one in rules.advise(evidence(*arguments, **more))]


def only(*arguments: Any, **more: Any) -> Advice:
    (advice,) = rules.advise(evidence(*arguments, **more))
    return advice


def table_rows(used: int = 500) -> list[DividedOperator]:
    size = {"row_bytes": 128, "table_rows": 300_000}
    return [
        row("embedding", 1.0, "latency", rows=used, distinct=used, **size),
        row("embedding_dense_backward", 4.0, rows=2 * used, distinct=used, **size),
        row("addcdiv_", 50.0, "bandwidth", "optimizer Adam.step", bytes=1_600_000_000),
    ]


def facts(**more: Any) -> ProgramFacts:
    return ProgramFacts(threads=2, cores=2, **more)


def test_a_step_that_no_rule_knows_has_no_advice() -> None:
    assert rules.advise(evidence()) == []
    assert names(row("sort", 90.0)) == []


def test_a_dense_optimizer_over_a_table_of_which_few_rows_are_used() -> None:
    model = [EmbeddingFacts("user", "Embedding", 300_000, 32, sparse=False)]
    step = evidence(*table_rows(), facts=facts(optimizers=[ADAM], embeddings=model))
    advice = rules.dense_table(step)
    assert "uses 500 of the 300,000 rows (0.2%) of a table, but Adam and the gradient" in advice.seen
    assert advice.change.startswith(
        "nn.Embedding(300000, 32, sparse=True); rows = torch.optim.SparseAdam([user.weight], lr=0.001)"
    )
    # The gradient and 9.6 of 10 million elements of the optimizer go; ten accesses of 500 rows and 60 calls stay.
    goes, needs = 4 + 50 * 0.96, 500 * 10 * 110e-6 + 60 * 2e-3
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - goes + needs))
    assert advice.predicted_range == pytest.approx([STEP / (STEP - (goes - needs) / 2), STEP / (STEP - goes)])
    assert advice.settings == {"sparse": [[300_000, 32]]}


@pytest.mark.parametrize(
    ("used", "optimizer", "more"),
    [
        (100_000, ADAM, []),
        (500, replace(ADAM, sparse=[[300_000, 32]], tables=[]), []),
        (500, OptimizerFacts("Adam", "for-loop"), [row("_coalesce", 1.0)]),
        (500, OptimizerFacts("Adam", "for-loop"), [row("embedding_sparse_backward", 1.0)]),
        (500, replace(ADAM, kind="RMSprop"), []),
        (500, replace(ADAM, kind="SGD", plain=False), []),
    ],
)
def test_sparse_gradients_are_not_advised_where_they_are_used_or_would_not_help(
    used: int, optimizer: OptimizerFacts, more: list[DividedOperator]
) -> None:
    rows = [replace(one, largest=[300_000, 32]) for one in table_rows(used)]
    assert "sparse" not in names(*rows, *more, facts=facts(optimizers=[optimizer]))


def test_an_optimizer_that_is_not_fused() -> None:
    part = "optimizer Adam.step"
    passes = [row("lerp_", 20.0, "bandwidth", part, calls=2), row("addcdiv_", 30.0, "bandwidth", part, calls=2)]
    advice = only(*passes, facts=facts(optimizers=[ADAM]))
    assert advice.change == "torch.optim.Adam(..., fused=True)"
    # Seven passes over 40 MB.
    needs = 280e6 / 20e9 * 1e3 + 0.002
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 50 + needs))
    assert names(*passes, facts=facts(optimizers=[replace(ADAM, way="fused")])) == []
    calls = [row("mul_", 30.0, "dispatch", "optimizer RMSprop.step", calls=300)]
    rms = replace(ADAM, kind="RMSprop", fusable=False, parameters=100)
    many = only(*calls, facts=facts(optimizers=[rms], compiled=True))
    assert (many.change, many.settings) == ("torch.optim.RMSprop(..., foreach=True)", {"optimizer": "foreach"})
    assert many.predicted_gain == pytest.approx(STEP / (STEP - 30 + 0.3))


def test_gradients_that_are_filled_with_zeros() -> None:
    assert only(row("zero_", 20.0, part="optimizer Adam.zero_grad")).predicted_gain == pytest.approx(1.25)
    assert names(row("zero_", 20.0, part="forward")) == []


def test_a_precision_is_advised_only_where_a_faster_one_was_measured() -> None:
    def product(precision: str) -> dict[str, Any]:
        return row("mm", 80.0, "compute", kind="product", flops=8e9, precision=precision)

    double = only(product("float64"))
    assert double.change.startswith("model.float()")
    assert double.predicted_gain == pytest.approx(STEP / (STEP - 40))
    # bfloat16 takes twice as long here.
    assert names(product("float32")) == []
    fast = dataclasses.replace(CEILINGS, flops={"float32": 1e11, "tf32": 4e11, "bfloat16": 8e11})
    single = only(product("float32"), ceilings=fast, device="H200")
    assert (single.change, single.settings) == ('torch.set_float32_matmul_precision("high")', {"tf32": True})
    assert "torch.autocast" in only(product("tf32"), ceilings=fast, device="H200").change


def test_a_product_far_below_its_ceiling() -> None:
    slow = row("mm", 50.0, "operator", kind="product", flops=1e8, precision="float32")
    advice = only(slow)
    assert (advice.name, "2 GFLOP/s where this machine reaches 100 GFLOP/s" in advice.seen) == ("shape", True)
    assert names(replace(slow, flops=4e9, limits={"compute": 50.0})) == []
    trained = only(replace(slow, part="top"), row("mm", 5.0, part="top, backward", kind="product", flops=1e8))
    assert (trained.predicted_gain, "Time both passes" in trained.seen) == (None, True)
    busy = evidence(slow, row("zero_", 20.0, part="optimizer Adam.zero_grad"))
    busy.observed.other_work = 0.5
    (other,) = rules.advise(busy)
    assert (other.name, other.note) == ("zero_grad", "Predicted while other work used 50% of the cores")


def test_attention_without_a_fused_kernel() -> None:
    products = row("bmm", 30.0, "compute", "attend", calls=12, kind="product", flops=12e-3 * CEILINGS.flops["float32"])
    softmax = row("_softmax", 15.0, "cache", "attend", calls=2)
    advice = only(softmax, row("masked_fill", 5.0, "cache", "attend"), row("masked_fill", 5.0, "cache"), products)
    assert "scaled_dot_product_attention(" in advice.change
    assert advice.predicted_gain == pytest.approx(100 / 70), "50 ms go, 12 ms at the ceiling take 20"
    assert names(softmax) == []
    assert names(softmax, products, row("_scaled_dot_product_flash_attention_for_cpu", 1.0)) == []


def test_a_device_is_not_faster_than_its_host() -> None:
    """On a GPU a change is worth what the host leaves of it: here a step of 4 ms, 2 ms of them on the host."""
    gpu = dataclasses.replace(CEILINGS, device="H200", queue_ns=5000.0, adamw=1e12, calls={"view": 3000.0})
    passes = row("mul_", 4.0, "bandwidth", "optimizer AdamW.step", kernels=200, bytes=1)
    facts = ProgramFacts(optimizers=[OptimizerFacts("AdamW", "for-loop", fusable=True, parameters=10, elements=10**6)])
    seen = Observed("H200", 2, Percentiles(4.0, 4.0, 4.0), {"communication": 0.0}, [passes], host_ms=2.0)
    step = AdviceFacts(seen, [passes], gpu, facts)
    floor = step.advice("name", "seen", "change", 3.9)
    assert floor.predicted_gain == pytest.approx(2.0)
    # A fused AdamW of ten parameters costs the host two kernels of 5 us and 29 calls of 3 us; the device needs less.
    fused = rules.optimizer_passes(step)
    assert fused.predicted_gain == pytest.approx(4.0 / 0.097)
    # A host that computes a metric in 1.5 of 2 ms, for which the device waits.
    waiting = replace(seen, waits={"python": 1.6}, operators=[replace(passes, ms=0.4)])
    metric = AdviceFacts(waiting, [replace(passes, ms=0.4)], gpu, facts).advice("name", "seen", "change", 0, 0, -1.5)
    assert metric.predicted_gain == pytest.approx(2.0 / 0.5)


def test_threads() -> None:
    arithmetic = row("mm", 80.0, "compute", kind="product", flops=8e9)
    assert names(arithmetic) == []
    few = only(arithmetic, facts=ProgramFacts(threads=1, cores=4))
    assert (few.change, few.predicted_gain) == ("torch.set_num_threads(4)", pytest.approx(STEP / 40))
    many = only(facts=ProgramFacts(threads=8, cores=4))
    assert (many.change, many.predicted_gain) == ("torch.set_num_threads(4)", None)
    assert names(row("add", 80.0, "bandwidth"), facts=ProgramFacts(threads=1, cores=4)) == []


def test_workers_of_a_loader() -> None:
    alone = ProgramFacts(threads=1, cores=4, loader=LoaderFacts(0, pinned=False, batch_size=64))
    advice = only(input=60.0, facts=alone)
    # Two processes make a batch in 30 ms, while the step computes for 40.
    assert advice.change == "DataLoader(..., num_workers=2, persistent_workers=True)"
    assert advice.predicted_gain == pytest.approx(2.5)
    assert names(input=1.0, facts=alone) == []
    assert names(input=60.0, facts=ProgramFacts(threads=1, cores=4)) == []
    crowd = replace(alone, loader=LoaderFacts(16, pinned=False))
    assert only(input=60.0, facts=crowd).settings == {"workers": 4}
    # A worker takes one of two cores from operators, which then take twice as long.
    narrow = only(row("mm", 30.0, "cache"), input=50.0, facts=replace(alone, threads=2, cores=2))
    assert narrow.change == "DataLoader(..., num_workers=1, persistent_workers=True); torch.set_num_threads(1)"
    assert narrow.settings == {"workers": 1, "threads": 1}
    assert narrow.predicted_gain == pytest.approx(STEP / 80)
    assert rules.advise(evidence(row("mm", 48.0, "cache"), input=50.0, facts=replace(alone, threads=2, cores=2))) == []
    # Passing 50 tensors costs both processes 5 ms.
    passed = replace(alone, loader=LoaderFacts(0, pinned=False, tensors=50))
    assert only(input=60.0, facts=passed).predicted_gain == pytest.approx(STEP / 45)
    # Batches that two threads make take a worker, which has one, twice as long.
    parallel = evidence(input=60.0, facts=replace(alone, threads=2, cores=2))
    parallel.observed.input_cores = 2.0
    assert rules.advise(parallel) == []


def test_rows_in_host_memory() -> None:
    """They take the link's time, and are no copies that pinned memory would hide."""
    with_link = dataclasses.replace(CEILINGS, device="H200", link=50e9, stream=4e12)
    lookup = Operator("fbgemm::lookup", None, "embedding_bag", 1, 1, 2.0, kernels=1, host_bytes=50_000_000)
    divided = classify(lookup, with_link, 0.5)
    assert divided.limits["transfer"] > 0.9 * lookup.ms
    slow = row("tables", 60.0, "transfer", host_bytes=2_000_000_000)
    advice = only(slow, device="H200", ceilings=with_link)
    assert (advice.name, "2 GB of rows" in advice.seen) == ("host rows", True)
    host, ids, cache = torch.zeros(1000, 64), torch.tensor([3, 3, 7]), torch.zeros(32, 64)
    arguments = {"weights": host, "linear_cache_indices": ids, "lxu_cache_weights": cache}
    filled = random_rows("fbgemm::lru_cache_populate", arguments, None, set())
    assert (filled.in_host_memory, filled.ids.tolist(), filled.row_bytes) == (True, [3, 7], 256)


def test_the_device_waits() -> None:
    unpinned = only(device="H200", transfer=20.0, facts=facts(loader=LoaderFacts(2, pinned=False)))
    assert (unpinned.settings, unpinned.predicted_gain) == ({"pinned": True}, pytest.approx(1.25))
    pinned = only(device="H200", transfer=20.0, facts=facts(loader=LoaderFacts(2, pinned=True)))
    assert pinned.settings == {}
    assert only(row("item", 0.1), device="H200", sync=20.0).change == "read the value in every 100th step only"
    launches = only(*(row("add", 0.01, "bandwidth", kernels=1) for _ in range(100)), device="H200", launch=50.0)
    assert "reduce-overhead" in launches.change
    assert launches.predicted_gain == pytest.approx(STEP / (STEP - 50))


def test_a_metric_in_every_step_is_named_with_its_line() -> None:
    lines = "loop()", "value = roc_auc_score(y, p)", "logits = model(history).log()"

    def step(line: int) -> AdviceFacts:
        made = evidence(python=40.0)
        made.observed.places = [PlaceShare("python", 0.75, Place("fit", "train.py", line), lines[line - 1])]
        return made

    (advice,) = rules.advise(step(2))
    assert advice.seen.startswith("train.py:2 in fit ")
    assert advice.change == "if step % 100 == 0: value = roc_auc_score(y, p)"
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 30 * 0.99))
    (seen := step(2)).observed.long_python_ms = 20.0
    assert rules.advise(seen)[0].predicted_gain == pytest.approx(STEP / (STEP - 20 * 0.99))
    assert rules.advise(step(1)) == []
    # Logits and histories are not reports.
    assert rules.advise(step(3)) == []


def test_many_small_operators() -> None:
    small = [row("add", 60.0, "dispatch", calls=30_000), row("mm", 10.0, "dispatch", calls=1000, kind="product")]
    advice = only(*small, facts=facts(has_model=True))
    assert (advice.change, advice.settings) == ("model.compile()", {"compile": True})
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 70 + 2), rel=0.01)
    assert names(*small, facts=facts(compiled=True)) == []
    batches = facts(compiled=True, loader=LoaderFacts(0, pinned=False, batch_size=64))
    larger = only(*small, facts=batches)
    assert larger.change.startswith("DataLoader(..., batch_size=128)")
    assert larger.predicted_gain == pytest.approx(STEP / 65, rel=0.01)


def test_element_wise_passes_outside_of_the_optimizer() -> None:
    stream = {"memory_bytes": 4e8, "bytes": 4e8}
    passes = [row(name, 20.0, "bandwidth", "norm", **stream) for name in ("mul", "add", "exp")]
    advice = only(*passes)
    assert "3 element-wise passes of norm (mul, add, exp) move 1.2 GB at 20 GB/s" in advice.seen
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 40))
    assert names(passes[0]) == []


def test_rows_that_zeros_fill() -> None:
    ids = torch.tensor([[0, 0, 0, 7], [0, 5, 0, 6], [1, 2, 3, 4], [0, 0, 0, 0]])
    assert padding_of([torch.zeros(9, 9), torch.arange(9), ids]) == 8 / 16
    assert padding_of([ids.flip(1)]) == 8 / 16
    assert padding_of([torch.rand(4, 4)]) is None
    filled = facts(loader=LoaderFacts(0, pinned=False, padding=0.5))
    advice = only(row("mm", 60.0, kind="product"), facts=filled)
    assert (advice.name, advice.settings) == ("padding", {})
    assert advice.seen.startswith("50% of the ids of a batch")
    assert names(row("mm", 60.0, kind="product"), facts=facts(loader=LoaderFacts(0, pinned=False, padding=0.01))) == []


def test_random_rows() -> None:
    lookup = row("embedding", 50.0, "latency", random_ms=50.0, rows=4e5, memory_rows=4e5, distinct=4e5, row_bytes=1024,
                 table_rows=10**7)  # fmt: skip
    advice = only(lookup)
    assert advice.change.startswith("nn.Embedding(10000000, 256, dtype=torch.float16)")
    half = CEILINGS.row_ns(512) / CEILINGS.row_ns(1024)
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 50 * (1 - half)))
    assert names(replace(lookup, row_bytes=64)) == []
    again = only(replace(lookup, row_bytes=64, distinct=1e5))
    assert "unique(return_inverse=True)" in again.change
    assert again.predicted_gain == pytest.approx(STEP / (STEP - 50 * 0.75))
    # A row that is updated is read and written, which no duplicates explain.
    update = replace(lookup, name="aten::embedding_dense_backward", row_bytes=64, memory_rows=8e5)
    assert names(update) == []
    small = replace(lookup, row_bytes=64)
    assert names(small, facts=facts(huge_pages="always")) == []
    pages = only(small, facts=facts(huge_pages="madvise"))
    assert (pages.name, pages.predicted_gain) == ("huge pages", None)


def test_page_faults_of_new_memory() -> None:
    advice = only(row("mul", 60.0, "bandwidth", new_bytes=1e8), facts=facts(allocator="glibc"))
    assert advice.change.startswith("MALLOC_MMAP_MAX_=0 ")
    assert advice.predicted_gain == pytest.approx(STEP / (STEP - 50 + 5))
    assert names(row("mul", 60.0, "bandwidth", new_bytes=1e6)) == []


def test_the_largest_gain_comes_first_and_without_ceilings_none_is_predicted() -> None:
    step = [row("zero_", 20.0, part="optimizer Adam.zero_grad"), *table_rows()]
    known = facts(optimizers=[ADAM])
    gains = [one.predicted_gain or 0.0 for one in rules.advise(evidence(*step, facts=known))]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == 3
    assert {one.predicted_gain for one in rules.advise(evidence(*step, facts=known, ceilings=None))} == {None}


@pytest.mark.parametrize(
    ("maps", "carried", "expected"),
    [
        ("/usr/lib/libc.so.6", b"mi_heap mimalloc: ", "mimalloc"),
        ("/usr/lib/libc.so.6", b"posix_memalign", "glibc"),
        ("/usr/lib/libjemalloc.so.2", b"mimalloc: ", "jemalloc"),
        ("/usr/lib/libtcmalloc_minimal.so.4", b"", "tcmalloc"),
    ],
)
def test_which_allocator_has_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maps: str, carried: bytes, expected: str
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libc10.so").write_bytes(carried)
    (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(program_facts, "_MAPS", tmp_path / "maps")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert program_facts.allocator() == expected
    monkeypatch.setattr(program_facts, "_MAPS", tmp_path / "none")
    assert program_facts.allocator() == ""
