"""One placement of tables: what `recperf plan` predicts is what TorchRec is told, for every workload with ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recperf.config import from_json, to_json
from recperf.distributed.config import Demand, DistributedConfig, Table
from recperf.distributed.placement import ShardPlacement, place, placed_by, shards_of
from recperf.distributed.rank_tables import ON_DEVICE
from recperf.distributed.ranks import Ranks
from recperf.distributed.sharding import require_possible, require_room
from recperf.errors import ConfigError, MachineError
from recperf.ops.table_rules import RULES
from recperf.planning.devices import KNOWN
from recperf.planning.memory import rank_demand
from recperf.planning.predict import predict
from recperf.planning.sharding import Parallelism
from recperf.workloads import find
from recperf.workloads.dlrm.config import criteo_kaggle, experiment
from recperf.workloads.dlrm_v4.config import laptop, mlperf
from recperf.workloads.micro_dlrm.config import default as micro

GIB = 2**30


def table(name: str, rows: int, **fields: Any) -> Table:
    values: dict[str, Any] = {"dim": 16, "ids": 1.0, "vectors": 1.0, "distinct": float, **fields}
    return Table(name=name, rows=rows, **values)


def kinds(placed: list[ShardPlacement]) -> dict[str, str]:
    return {one.table.name: one.kind for one in placed}


def test_auto_divides_what_is_sent_by_rows_and_leaves_small_bags_whole() -> None:
    sizes = {"large": 100_000, "medium": 20_000, "small": 900, "tiny": 5}
    rows = [table(name, count) for name, count in sizes.items()]
    assert kinds(place(rows, 4, 8)) == {"large": "row", "medium": "row", "small": "row", "tiny": "table"}
    bags = [replace(one, pooled=True) for one in rows]
    placed = place(bags, 4, 8)
    assert kinds(placed) == {"large": "row", "medium": "table", "small": "table", "tiny": "table"}
    homes = [int(np.argmax(one.width_R)) for one in placed[1:]]
    assert len(set(homes)) == 3, "each whole table goes where least is held"
    assert placed[0].why == "too large for one rank"
    equal = place([replace(bags[0], name=str(number)) for number in range(4)], 4, 8)
    assert [int(np.argmax(one.width_R)) for one in equal if one.kind == "table"] == [0, 1, 2, 3]


def test_a_kind_for_all_tables_and_single_ones() -> None:
    tables = tuple(table(name, rows) for name, rows in {"a": 90, "b": 90, "few": 5}.items())
    placed = placed_by(DistributedConfig(sharding="row,b=column"), Demand(tables=tables, batch=8), 4)
    assert kinds(placed) == {"a": "row", "b": "column", "few": "table"}
    assert [one.why for one in placed][1:] == ["--distributed.sharding", "too few rows for a block on every rank"]
    assert placed[1].width_R.tolist() == [4, 4, 4, 4]
    with pytest.raises(ConfigError, match="few=row: 5 rows are too few for 4 ranks"):
        place(tables, 4, 8, "auto", {"few": "row"})
    copied = [replace(one, copied="AdamW changes every row in every step", state=32) for one in tables]
    assert set(kinds(place(copied, 4, 8)).values()) == {"data-parallel"}
    assert place(copied, 4, 8)[0].state_R().tolist() == [4 * 90 * 32] * 4
    for kind, named in (("row", {}), ("auto", {"a": "row"})):
        with pytest.raises(ConfigError, match="AdamW changes every row"):
            place(copied, 4, 8, kind, named)  # type: ignore[arg-type]


def test_adam_is_sharded_on_gpus_only() -> None:
    """FBGEMM has none for a CPU; copies are updated by torch."""
    demand = Demand(tables=(table("a", 90), table("b", 90)), batch=8)
    for device, sharding in (("cuda", "row"), ("cpu", "data-parallel"), ("cpu", "row")):
        options, world = DistributedConfig(sharding=sharding), Ranks(size=2, device=device)
        placed = placed_by(options, demand, world.size)
        if (device, sharding) != ("cpu", "row"):
            require_possible(placed, world, optimizer="adam", tiers=ON_DEVICE)
            continue
        with pytest.raises(
            ConfigError, match="is adam, which FBGEMM does not have on a CPU, but sgd, adagrad, rowwise-adagrad"
        ):
            require_possible(placed, world, optimizer="adam", tiers=ON_DEVICE)


def test_an_optimizer_that_fbgemm_lacks_or_that_columns_divide_is_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    demand, world = Demand(tables=(table("a", 90),), batch=8), Ranks(size=2, device="cuda")
    rules = {"lacking": replace(RULES["sgd"], fbgemm=""), "mixed": replace(RULES["adagrad"], row_states=1)}
    monkeypatch.setattr("recperf.distributed.sharding.RULES", {**RULES, **rules})
    for name, sharding, refusal in (
        ("lacking", "data-parallel", ""),
        ("lacking", "row", "lacking, which FBGEMM does not have on a GPU, but sgd, adagrad"),
        ("mixed", "row", ""),
        ("mixed", "column", "mixed, whose number of a row is not divided by columns"),
    ):
        placed = placed_by(DistributedConfig(sharding=sharding), demand, world.size)
        with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
            require_possible(placed, world, optimizer=name, tiers=ON_DEVICE)  # type: ignore[arg-type]


CONFIGS = {
    "dlrm-v4": (laptop(), "table,item_id=row,uid=column"),
    "dlrm": (criteo_kaggle(), "t3=column,t9=data-parallel"),
    "dlrm, adagrad": (replace(experiment(), train=replace(experiment().train, optimizer="adagrad")), "table"),
    "micro-dlrm": (micro(), "data-parallel"),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_holds_the_bytes_that_the_plan_prints(name: str, ranks: int) -> None:
    config, sharding = CONFIGS[name]
    workload = find(name.split(",")[0])
    for options in (DistributedConfig(), DistributedConfig(sharding=sharding)):
        planned = workload.planned(from_json(type(config), to_json(replace(config, distributed=options))))
        predicted = predict(planned, ranks, KNOWN["h200"], parallelism=Parallelism(**vars(options)))
        demand = rank_demand(planned, ranks, options)
        placed = placed_by(options, demand, ranks)
        assert kinds(placed) == kinds(list(predicted.placed))
        held_R = [sum(int(one.weight_R[rank] + one.state_R()[rank]) for one in placed) for rank in range(ranks)]
        tables = sum(np.array(predicted.memory.parts[name]) for name in ("tables", "optimizer"))
        dense = 4 * predicted.work.dense_states * predicted.work.dense_parameters
        assert held_R == (tables - dense).astype(int).tolist()
        parts = shards_of(placed)
        assert held_R == [sum(part.nbytes for part in parts if part.rank == rank) for rank in range(ranks)]


@pytest.mark.parametrize(("batch", "too_small"), [(1024, 75), (8192, 125)])
def test_the_published_model_fits_eight_ranks_of_130_gib(batch: int, too_small: int) -> None:
    """559 GiB of tables; 8,192 samples are 1,024 for each rank, whose activations take 56 GiB."""
    config, options = mlperf(), DistributedConfig()
    planned = find("dlrm-v4").planned(replace(config, train=replace(config.train, batch_size=batch)))
    demand = rank_demand(planned, 8, options)
    placed = placed_by(options, demand, 8)
    require_room(placed, demand, "cuda", 130 * GIB)
    held = [sum(part.nbytes for part in shards_of(placed) if part.rank == rank) for rank in range(8)]
    assert sum(held) == 4 * (150_042_476_544 + 293_051_712)
    assert max(held) + demand.other_bytes < 130 * GIB
    message = rf"rank 0 needs 70.\d GiB for its part and [\d.]+ GiB beside it, but {too_small} GiB are free on the GPU"
    with pytest.raises(MachineError, match=message):
        require_room(placed, demand, "cuda", too_small * GIB)
