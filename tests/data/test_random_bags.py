from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recperf.data.batch import ClickBatch
from recperf.data.random_bags import RandomBags
from recperf.data.random_config import RandomBagsConfig, read_profile, write_profile
from recperf.errors import ConfigError, DataError
from recperf.ops.draw.plan import scatter_factor
from recperf.train.metrics import auc

KINDS = ["uniform", "gaussian", "zipf", "replay"]
ROWS = (4, 1000, 37)
COUNTS = {"a": {0: 3, 3: 1}, "b": {999: 5, 0: 1, 17: 0, 400: 10}, "c": {36: 1}}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.json", COUNTS)
    return tmp_path / "profile.json"


def bags(profile: Path | None = None, **changes: Any) -> RandomBags:
    config = {name: changes.pop(name) for name in list(changes) if name in RandomBagsConfig.__dataclass_fields__}
    config = {"ids_per_bag": 6, "batches": 4, "held_out_batches": 2} | config
    if config.get("ids") == "replay":
        config["profile"] = profile
    tables = {} if "id_space" in changes else {"rows": ROWS}
    fields = {"keys": ("a", "b", "c"), "dense": 5, "batch_size": 32, "seed": 7} | tables | changes
    return RandomBags(config=RandomBagsConfig(**config), **fields)


SHARED = {"id_space": 10_000}
SOURCES: list[dict[str, Any]] = [*({"ids": ids} for ids in KINDS), SHARED, SHARED | {"ids": "zipf"}]
"""Every kind of ids from a table per feature, and those of an id space that features share."""


def same(one: ClickBatch, other: ClickBatch) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in (
            (one.dense_BD, other.dense_BD),
            (one.features.values_V, other.features.values_V),
            (one.features.offsets_FB1, other.features.offsets_FB1),
            (one.labels_B, other.labels_B),
        )
    )


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_batch_depends_on_seed_epoch_and_step_only(source: dict[str, Any], profile: Path) -> None:
    expected = bags(profile, **source).batch(2, 3)
    torch.manual_seed(5)
    fresh = bags(profile, **source)
    list(fresh.batches(0))
    list(fresh.held_out(2))
    assert same(fresh.batch(2, 3), expected)
    assert same(list(fresh.batches(2))[3], expected)
    assert same(next(fresh.batches(2, start=3)), expected)
    assert len(fresh) == 4


@pytest.mark.parametrize("source", [{}, SHARED], ids=["tables", "shared id space"])
def test_all_batches_differ_and_held_out_batches_stay_the_same(source: dict[str, Any]) -> None:
    random = bags(**source)
    held_out = list(random.held_out(6))
    batches = [batch for epoch in range(3) for batch in random.batches(epoch)]
    batches += held_out + list(replace(random, seed=8).batches(0))
    dense = {tuple(batch.dense_BD.flatten().tolist()) for batch in batches}
    values = {tuple(batch.features.values_V.tolist()) for batch in batches}
    assert len(dense) == len(values) == len(batches) == 22
    assert all(same(one, other) for one, other in zip(random.held_out(6), held_out, strict=True))


def test_a_step_beyond_the_epoch_is_an_index_error() -> None:
    for epoch, step in ((0, 4), (0, -1), (-1, 0)):
        with pytest.raises(IndexError, match="an epoch has 4"):
            bags().batch(epoch, step)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ids", KINDS)
def test_shapes_types_and_ranges(ids: str, fixed: bool, profile: Path) -> None:
    batch = bags(profile, ids=ids, fixed=fixed).batch(0, 0)
    features = batch.features
    assert batch.dense_BD.shape == (32, 5)
    assert batch.dense_BD.dtype == batch.labels_B.dtype == torch.float32
    assert features.values_V.dtype == features.offsets_FB1.dtype == torch.int64
    assert set(batch.labels_B.tolist()) == {0.0, 1.0}
    assert not features.one_id_a_bag
    for key, rows in zip(features.keys, ROWS):
        values, offsets = features[key]
        lengths, most = offsets.diff(), min(rows, 6)
        assert int(values.min()) >= 0
        assert int(values.max()) < rows
        assert int(offsets[-1]) == values.numel() == int(lengths.sum())
        assert set(lengths.tolist()) <= set([most] if fixed else range(1, most + 1))
        assert fixed or len(set(lengths.tolist())) > 2
    assert features.values_V.numel() == int(features.offsets_FB1[-1])


def test_lengths_are_those_of_the_public_generator() -> None:
    """round(max(1, u * 6)): 1.5 sixths are 1, one sixth each 2 to 5, half a sixth 6."""
    lengths = bags(batch_size=6000, rows=(10,) * 3).batch(0, 0).features.offsets_FB1.diff()
    shares = torch.bincount(lengths, minlength=7).double() / lengths.numel()
    expected = torch.tensor([0, 1.5, 1, 1, 1, 1, 0.5], dtype=torch.float64) / 6
    assert float((shares - expected).abs().max()) < 0.012


def test_each_feature_may_have_its_own_maximum_length() -> None:
    features = bags(ids_per_feature=(3, 2, 1), fixed=True).batch(0, 0).features
    assert features.ids_per_key == (96, 64, 32)
    assert bags(ids_per_feature=(1, 1, 1)).batch(0, 0).features.one_id_a_bag
    with pytest.raises(ConfigError, match="one number for each of the 3 features"):
        bags(ids_per_feature=(1, 2))


@pytest.mark.parametrize("ids", KINDS)
def test_distinct_drops_repeats_and_nothing_else(ids: str, profile: Path) -> None:
    with_repeats = bags(profile, ids=ids).batch(0, 0)
    without = bags(profile, ids=ids, distinct=True).batch(0, 0)
    assert torch.equal(with_repeats.dense_BD, without.dense_BD)
    dropped = 0
    for key in without.features.keys:
        bags_of = []
        for batch in (with_repeats, without):
            values, offsets = batch.features[key]
            bags_of.append([values[a:b].tolist() for a, b in zip(offsets.tolist(), offsets[1:].tolist())])
        for repeated, unique in zip(*bags_of):
            assert unique == list(dict.fromkeys(repeated))
            dropped += len(repeated) - len(unique)
    assert dropped > 0


def test_distinct_bags_are_short() -> None:
    assert bags(distinct=True, ids_per_bag=100, rows=(8, 3, 2)).batch(0, 0)
    with pytest.raises(ConfigError, match="may have 9 ids; at most 8 can be compared"):
        bags(distinct=True, ids_per_bag=9)


def test_uniform_ids_are_uniform_in_every_table_and_place() -> None:
    features = bags(rows=(20, 20, 20), fixed=True, batch_size=4000).batch(0, 0).features
    for table in features.values_V.view(3, 4000, 6).unbind():
        for place in table.unbind(1):
            counts = torch.bincount(place, minlength=20).double()
            chi_square = float(((counts - 200) ** 2 / 200).sum())
            assert chi_square < 50


def test_gaussian_ids_have_the_mean_and_deviation_asked_for() -> None:
    source = bags(ids="gaussian", mean=0.4, deviation=0.05, rows=(1_000_000,) * 3, batch_size=4000)
    share = source.batch(0, 0).features.values_V.double() / 1_000_000
    assert abs(float(share.mean()) - 0.4) < 0.001
    assert abs(float(share.std()) - 0.05) < 0.001
    within_one = float(((share - 0.4).abs() < 0.05).double().mean())
    assert abs(within_one - 0.6827) < 0.01
    edge = bags(ids="gaussian", mean=0.0, deviation=0.1).batch(0, 0).features.values_V
    assert float((edge == 0).double().mean()) > 0.4


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
@pytest.mark.parametrize("per_bag", [1, 3])
def test_a_shared_id_space_has_bags_of_one_length(ids: str, per_bag: int) -> None:
    batch = bags(**SHARED, ids=ids, ids_per_bag=per_bag).batch(0, 0)
    features = batch.features
    assert batch.dense_BD.shape == (32, 5)
    assert batch.dense_BD.dtype == batch.labels_B.dtype == torch.float32
    assert features.offsets_FB1.tolist() == list(range(0, 3 * 32 * per_bag + 1, per_bag))
    assert 0 <= features.values_V.min() <= features.values_V.max() < 10_000
    assert features.one_id_a_bag == (per_bag == 1)
    assert set(batch.labels_B.tolist()) == {0.0, 1.0}


def test_no_random_number_of_a_shared_id_space_is_used_twice() -> None:
    random = bags(id_space=1 << 40, batch_size=2048, ids_per_bag=3)
    ids = torch.cat([b.features.values_V for b in (*random.batches(0), *random.batches(1), *random.held_out(4))])
    by_chance = ids.numel() ** 2 / 2 / (1 << 40)
    assert ids.numel() - ids.unique().numel() < 5 + 5 * by_chance


@pytest.mark.parametrize("space", [1, 2, 3, 1000, 1 << 40, (1 << 40) - 1])
@pytest.mark.parametrize("ids", ["uniform", "zipf"])
def test_small_and_large_shared_id_spaces(space: int, ids: str) -> None:
    values = bags(id_space=space, ids=ids, batch_size=4096).batch(0, 0).features.values_V
    assert 0 <= values.min() <= values.max() < space
    assert values.unique().numel() >= min(space, 1000 if ids == "uniform" else 900)
    if space > 1000:
        assert values.max() > 0.9 * space
        popular, counts = values.unique(return_counts=True)
        assert ids == "uniform" or popular[counts.topk(50).indices].sort().values.diff().min() > 1000


def test_uniform_ids_of_a_shared_id_space_are_uniform() -> None:
    seen = torch.bincount(bags(id_space=1682, batch_size=20_000).batch(0, 0).features.values_V, minlength=1682).double()
    expected = float(seen.mean())
    # Chi-square with this many degrees of freedom is all but normal.
    assert abs(float(((seen - expected) ** 2 / expected).sum()) - 1681) < 4 * (2 * 1681) ** 0.5


def test_the_size_of_a_shared_id_space_changes_the_ids_alone() -> None:
    cold, hot = bags(id_space=1 << 30).batch(0, 0), bags(id_space=10).batch(0, 0)
    assert torch.equal(cold.dense_BD, hot.dense_BD)
    assert torch.equal(cold.features.offsets_FB1, hot.features.offsets_FB1)


@pytest.mark.parametrize("rows", [997, 1000, 1024])
def test_ranks_are_scattered_one_to_one(rows: int) -> None:
    ids = [rank * scatter_factor(rows) % rows for rank in range(rows)]
    assert sorted(ids) == list(range(rows))
    head = sorted(ids[:20])
    assert min(b - a for a, b in zip(head, head[1:])) > rows // 100


@pytest.mark.parametrize("source", [{"rows": (1000,) * 3}, {"id_space": 1000}], ids=["tables", "shared id space"])
@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.05, 2.0])
def test_zipf_ids_follow_the_power_law(exponent: float, source: dict[str, Any]) -> None:
    rows = 1000
    random = bags(ids="zipf", exponent=exponent, batch_size=20_000, fixed=True, **source)
    values = random.batch(0, 0).features["b"][0]
    popular = torch.bincount(values, minlength=rows).sort(descending=True).values.double() / values.numel()
    # The cell of rank k is the integral of x^-exponent from k - 1/2 to k + 1/2.
    edges = torch.arange(0, rows + 1, dtype=torch.float64) + 0.5
    integral = edges.log() if exponent == 1.0 else edges ** (1 - exponent) / (1 - exponent)
    expected = integral.diff() / integral.diff().sum()
    for rank in (0, 1, 2, 5):
        assert math.isclose(float(popular[rank]), float(expected[rank]), rel_tol=0.06), rank
    assert math.isclose(float(popular[:100].sum()), float(expected[:100].sum()), rel_tol=0.02)


def test_popular_ids_are_scattered_and_differ_by_feature() -> None:
    features = bags(ids="zipf", rows=(100_000,) * 3, batch_size=5000).batch(0, 0).features
    tops = [int(features[key][0].mode().values) for key in features.keys]
    assert len(set(tops)) == 3


def test_large_tables_are_reached_everywhere() -> None:
    """Float32 would draw only every 64th id or so near the end of such a table."""
    source = bags(ids="gaussian", mean=0.9, deviation=0.001, rows=(1 << 30,) * 3, batch_size=4000)
    values = source.batch(0, 0).features.values_V
    assert float((values % 64 == 0).double().mean()) < 0.05


def test_replay_draws_what_the_profile_says(profile: Path) -> None:
    features = bags(profile, ids="replay", batch_size=8000).batch(0, 0).features
    for key, counts in COUNTS.items():
        seen, total = Counter(features[key][0].tolist()), sum(counts.values())
        drawn = sum(seen.values())
        assert set(seen) == {index for index, count in counts.items() if count}
        for index, count in counts.items():
            assert abs(seen[index] / drawn - count / total) < 0.015


@pytest.mark.parametrize("name", ["p.json", "p.csv"])
def test_a_profile_comes_back_as_it_was_written(name: str, tmp_path: Path) -> None:
    write_profile(tmp_path / name, COUNTS)
    assert read_profile(tmp_path / name, {"c": 37, "a": 4}) == {"c": COUNTS["c"], "a": COUNTS["a"]}


BAD_CSV = {
    "a,b\n": ("not 'feature,id,count'", "1"),
    "feature,id,count\na,0,1\na,4,1\n": ("id 4 of feature 'a' is outside its table of 4 rows", "3"),
    "feature,id,count\na,-1,1\n": ("id -1 of feature 'a' is outside", "2"),
    "feature,id,count\na,1,-1\n": ("count -1 of id 1", "2"),
    "feature,id,count\na,1\n": ("2 columns instead of 3", "2"),
    "feature,id,count\na,1,x\n": ("not two integers", "2"),
    "feature,id,count\na,1,1\na,1,2\n": ("id 1 of feature 'a' occurs twice", "3"),
    "feature,id,count\na,1,0\n": ("feature 'a' has no id that occurs", None),
    "feature,id,count\nb,1,1\n": ("feature 'a' has no id that occurs", None),
    "": ("feature 'a' has no id that occurs", None),
}


@pytest.mark.parametrize("content", BAD_CSV, ids=range(len(BAD_CSV)))
def test_a_bad_csv_profile_is_named_with_its_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_profile(path, {"a": 4})
    what, line = BAD_CSV[content]
    assert what in caught.value.what
    assert caught.value.where["file"] == str(path)
    assert caught.value.where.get("line") == line


BAD_JSON = {
    "{": "not JSON",
    "[]": "it should be an object",
    '{"features": []}': "features should be an object",
    '{"features": {"a": {}}}': "features.a should be an array",
    '{"features": {"a": []}}': "'a' has no id",
    '{"features": {"a": [[0]]}}': "features.a.0 should be an array of 2",
    '{"features": {"a": [[0, 1.5]]}}': "features.a.0.1 should be an integer, is 1.5",
    '{"features": {"a": [[0, true]]}}': "features.a.0.1 should be an integer, is true",
    '{"features": {"a": [[9, 1]]}}': "id 9 of feature 'a' is outside",
    '{"features": {"a": [[0, NaN]]}}': "is not JSON",
    '{"features": {"a": [[0, 1e400]]}}': "Number out of range",
}


@pytest.mark.parametrize("content", BAD_JSON)
def test_a_bad_json_profile_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_profile(path, {"a": 4})
    assert BAD_JSON[content] in caught.value.what
    assert caught.value.where["file"] == str(path)


def test_a_profile_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.csv", tmp_path / "binary.csv", tmp_path):
        with pytest.raises(DataError, match="cannot read"):
            read_profile(path, {"a": 4})


@pytest.mark.parametrize(
    ("field", "value"),
    [("ids", "normal"), ("ids_per_bag", 0), ("exponent", math.nan), ("deviation", -1.0), ("mean", math.inf),
     ("batches", 0), ("held_out_batches", 0), ("ids_per_feature", (1, 0)), ("profile", Path("x"))],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"data.{field}"):
        RandomBagsConfig(**{field: value})  # type: ignore[arg-type]


def test_replay_needs_a_profile() -> None:
    with pytest.raises(ConfigError, match=r"data\.profile"):
        RandomBagsConfig(ids="replay")


@pytest.mark.parametrize(
    "changes",
    [{"rows": (1, 2)}, {"rows": (0, 1, 1)}, {"keys": ("a", "a", "b")}, {"dense": 0}, {"keys": ()}, {"id_space": 0},
     {"id_space": (1 << 40) + 1}, {"id_space": 9, "rows": ROWS}, {"id_space": 9, "ids": "gaussian"}],
    ids=str,
)  # fmt: skip
def test_inconsistent_arguments_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        bags(**changes)


def test_a_batch_of_too_many_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"2\^32"):
        bags(batch_size=1 << 28, dense=512)


@pytest.mark.parametrize("source", [{}, SHARED], ids=["tables", "shared id space"])
def test_dense_features_have_mean_0_and_variance_1(source: dict[str, Any]) -> None:
    dense = bags(dense=64, batch_size=2000, **source).batch(0, 0).dense_BD
    assert abs(float(dense.mean())) < 0.01
    assert abs(float(dense.var()) - 1) < 0.01
    assert float(dense.abs().max()) <= 3**0.5 + 1e-6


@pytest.mark.parametrize("source", [{}, {"distinct": True}, SHARED], ids=["tables", "distinct", "shared id space"])
def test_labels_are_drawn_from_the_planted_odds(source: dict[str, Any]) -> None:
    random = bags(batch_size=20_000, **source)
    batch = random.batch(0, 0)
    logits = random.planted_logits(batch)
    chances = logits.sigmoid()
    assert abs(float(batch.labels_B.mean() - chances.mean())) < 0.012
    for low in (0.1, 0.3, 0.6, 0.8):
        chosen = (chances >= low) & (chances < low + 0.1)
        assert abs(float(batch.labels_B[chosen].mean() - chances[chosen].mean())) < 0.045
    assert 0.7 < auc(logits, batch.labels_B) < 0.87
    assert float(logits.var()) > 1.0


def test_scores_of_popular_ids_can_be_learnt() -> None:
    """The mean label of each id in training batches predicts held-out labels."""
    random = bags(keys=("item",), ids="zipf", id_space=1000, ids_per_bag=1, batch_size=8192)
    total, count = torch.zeros(1000), torch.zeros(1000)
    for batch in random.batches(0):
        total.index_add_(0, batch.features.values_V, batch.labels_B)
        count.index_add_(0, batch.features.values_V, torch.ones(8192))
    rate, unseen = (total + 1) / (count + 2), next(random.held_out(1))
    assert auc(rate[unseen.features.values_V], unseen.labels_B) > 0.56


@pytest.mark.parametrize("source", [{"ids": "replay"}, SHARED], ids=["tables", "shared id space"])
def test_buffers_are_filled_with_the_batches(source: dict[str, Any], profile: Path) -> None:
    random = bags(profile, **source)
    buffers, index = random.buffers(), torch.zeros(1, dtype=torch.int64)
    address = buffers.features.values_V.data_ptr()
    for number, expected in ((0, random.batch(0, 0)), (6, random.batch(1, 2)), (-1, next(random.held_out(1)))):
        random.draw(index.fill_(number), buffers)
        assert same(replace(buffers, features=buffers.features.trimmed()), expected)
    assert buffers.features.values_V.data_ptr() == address


def test_a_config_survives_json() -> None:
    from recperf.config import from_json, to_json

    config = RandomBagsConfig(ids="replay", profile=Path("x.csv"), ids_per_feature=(1, 2))
    assert from_json(RandomBagsConfig, json.loads(json.dumps(to_json(config)))) == config
