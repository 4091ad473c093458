"""recperf plan as a user types it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., tuple[int, str, str]]
MLPERF = ("dlrm-v4", "--preset", "mlperf", "--rank-batch", "1024")


@pytest.fixture
def call(call: Call) -> Call:
    return functools.partial(call, "plan")


def as_json(call: Call, *arguments: str) -> dict[str, Any]:
    code, out, _ = call(*arguments, "--json")
    assert code == 0
    value: dict[str, Any] = json.loads(out)
    return value


def test_a_plan_states_its_figures_and_their_sources(call: Call) -> None:
    code, out, _ = call(*MLPERF, "--gpu", "b200", "--price", "4USD")
    assert code == 0
    for text in (
        "8 ranks with 1,024 samples each, global batch 8,192",
        "memory: fits",
        "gradients all-to-all",
        "user_x_artist",
        "69.3 M samples to the quality target",
        "USD",
        "data sheet",
        "assumed: input and ids overlap with the previous step",
    ):
        assert text in out


def test_the_all_reduce_overlaps_only_where_requested(call: Call) -> None:
    """As recperf's own ranks do: after the backward pass."""
    arguments = (*MLPERF, "--ranks", "16", "--gpu", "b200")
    own, ddp = (as_json(call, *arguments, *more)["points"][0] for more in ((), ("--overlap", "on")))
    assert (own["choices"]["overlapped"], ddp["choices"]["overlapped"]) == (False, True)
    assert "nothing overlaps with the backward pass" in own["origins"]["overlap"]
    assert own["samples_per_s"] < ddp["samples_per_s"]


def test_several_ranks_are_a_table_a_plot_and_a_page(call: Call, tmp_path: Path) -> None:
    arguments = (*MLPERF, "--ranks", "8,64,512", "--gpu", "b200")
    code, out, _ = call(*arguments, "--out", "plan.svg")
    assert code == 0
    assert "details for 8 ranks" in out
    assert "extrapolated beyond the published batch sizes" in out
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    assert call(*arguments, "--out", "plan.html", "--quiet")[0] == 0
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "scaling" in page


def test_json_holds_every_point(call: Call) -> None:
    value = as_json(call, *MLPERF, "--ranks", "8,16", "--gpu", "mi350x", "--price", "3")
    eight, sixteen = value["points"]
    assert (eight["scaling"], eight["ranks"], sixteen["global_batch"]) == (1.0, 8, 16_384)
    assert len(sixteen["memory"]["by_rank"]) == 16
    assert sum(eight["exposed"].values()) == pytest.approx(eight["seconds"])
    assert eight["target"]["cost"] == pytest.approx(eight["target"]["hours"] * 8 * 3)


def test_a_skew_is_shown_with_remedies(call: Call) -> None:
    arguments = (*MLPERF, "--model.row-scale", "0.003", "--ranks", "32", "--gpu", "mi350x", "--skew", "zipf:0.7")
    broken = (*arguments, "--sharding", "row", "--dedup", "off", "--codec", "clamp-copy")
    (point,) = as_json(call, *broken)["points"]
    assert point["memory"]["verdict"] == "does not fit"
    assert point["memory"]["remedies"]
    out = call(*broken, "--shard", "album_id=column")[1]
    assert "fits with: " in out
    assert "skew: data received by a rank in a step" in out
    assert "column-wise, without dedup" in out
    (cured,) = as_json(call, *arguments, "--shard", "album_id=column", "--shard", "artist_id=table")["points"]
    kinds = {one["name"]: one["kind"] for one in cured["tables"]}
    assert (kinds["album_id"], kinds["artist_id"]) == ("column", "table")


def test_what_does_not_fit_is_explained(call: Call) -> None:
    code, out, _ = call(*MLPERF, "--ranks", "2,8", "--gpu", "h200")
    assert code == 0
    assert "2 ranks: does not fit" in out
    assert "no other sharding makes it fit" in out


def test_failures_are_simulated(call: Call) -> None:
    arguments = (*MLPERF, "--gpu", "b200", "--mtbf-hours", "20", "--checkpoint-seconds", "10")
    arguments += ("--samples-to-target", "1e10")
    first, again = (as_json(call, *arguments)["points"][0]["failures"] for _ in range(2))
    assert first == again
    assert first["mtbf_s"] == 20 * 3600 / 8
    assert 0 < first["chosen"]["mean"] <= first["best"]["mean"] < 1
    assert "goodput" in call(*arguments)[1]


def test_the_skew_of_a_dataset_is_counted(call: Call) -> None:
    from recperf.data.yambda import catalogue
    from recperf.data.yambda.synthesize.config import YambdaLike

    made = YambdaLike(users=60, events_per_user=200, items=500)
    store = catalogue.embedded(say=lambda _: None, config=made)
    arguments = ("dlrm-v4", "--ranks", "4", "--skew", str(store.folder), "--data.windows.min-history", "50")
    code, out, _ = call(*arguments, "--skew-batches", "2", "--global-batch", "64")
    assert code == 0
    assert "counted: 2 batches of yambda-like" in out
    assert "largest global batch that fits" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--ranks", "eight"), 2, "not a list of numbers"),
        (("--ranks", "0"), 3, "ranks is 0"),
        (("--gpu", "b20"), 2, "did you mean 'b200'"),
        (("--shard", "album=row"), 3, "did you mean 'album_id'"),
        (("--shard", "album_id"), 2, "names no kind"),
        (("--rank-batch", "8", "--global-batch", "64"), 2, "exclude each other"),
        (("--price", "cheap"), 2, "is not a price"),
        (("--out", "plan.png"), 2, "neither .svg nor .html"),
        (("--skew", "nowhere"), 3, "there are no events here"),
        (("--skew", "zipf:x"), 2, "no exponent"),
    ],
)
def test_mistakes_are_reported_in_one_line(call: Call, arguments: tuple[str, ...], code: int, says: str) -> None:
    got, _, err = call("dlrm-v4", *arguments)
    assert got == code
    assert says in err
    assert "Traceback" not in err


def test_this_machine_is_a_device(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"copy": {"p50": 2e10}, "gemm": {"float32": {"p50": 6e10}}}
    monkeypatch.setattr("recperf.cli.plan.stored_or_measured", lambda _: peaks)
    value = as_json(call, "micro-dlrm", "--gpu", "cpu", "--ranks", "1,2")
    assert value["network"] == "loopback"
    assert [point["rank_batch"] for point in value["points"]] == [256, 128]


def test_a_plan_needs_no_torch(runs_without_torch: Callable[..., None]) -> None:
    runs_without_torch("plan", "dlrm-v4", "--preset", "mlperf", "--quiet")


def test_tables_that_do_not_fit_into_one_device_are_priced_in_tiers(call: Call) -> None:
    code, out, _ = call("dlrm-v4", "--preset", "mlperf", "--ranks", "1", "--served", "0.95")
    assert code == 0
    assert "tables in tiers: 560 GiB of rows beside a cache of" in out
    assert "serves 95.0% of" in out
    small = as_json(call, "dlrm-v4", "--preset", "gpu", "--ranks", "1")["points"][0]
    assert "tiers" not in small
