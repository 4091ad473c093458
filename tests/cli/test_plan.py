"""recperf plan as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recperf import cli

Call = Callable[..., tuple[int, str, str]]
MLPERF = ("dlrm-v4", "--preset", "mlperf", "--rank-batch", "1024")


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        said = capfd.readouterr()
        return code, said.out, said.err

    return call


def found(call: Call, *words: str) -> dict[str, Any]:
    code, out, _ = call(*words, "--json")
    assert code == 0
    value: dict[str, Any] = json.loads(out)
    return value


def test_a_plan_says_all_it_rests_on(call: Call) -> None:
    code, out, _ = call(*MLPERF, "--gpu", "b200", "--price", "4USD")
    assert code == 0
    for words in (
        "8 ranks, 1,024 samples each, 8,192 in all",
        "memory: fits",
        "gradients all-to-all",
        "user_x_artist",
        "69.3 M samples to the target",
        "USD",
        "stated by maker",
        "assumed: input and ids behind the step before",
    ):
        assert words in out


def test_gradients_are_waited_for_unless_it_says_otherwise(call: Call) -> None:
    """As recperf's own ranks do: after the backward pass."""
    words = (*MLPERF, "--ranks", "16", "--gpu", "b200")
    own, ddp = (found(call, *words, *more)["points"][0] for more in ((), ("--overlap", "on")))
    assert (own["choices"]["overlapped"], ddp["choices"]["overlapped"]) == (False, True)
    assert "nothing behind the backward pass" in own["origins"]["overlap"]
    assert own["samples_per_s"] < ddp["samples_per_s"]


def test_several_ranks_are_a_table_a_plot_and_a_page(call: Call, tmp_path: Path) -> None:
    words = (*MLPERF, "--ranks", "8,64,512", "--gpu", "b200")
    code, out, _ = call(*words, "--out", "plan.svg")
    assert code == 0
    assert "in detail, at 8 ranks" in out
    assert "extrapolated beyond the published batch sizes" in out
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    assert call(*words, "--out", "plan.html", "--quiet")[0] == 0
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "scaling" in page


def test_json_holds_every_point(call: Call) -> None:
    value = found(call, *MLPERF, "--ranks", "8,16", "--gpu", "mi350x", "--price", "3")
    eight, sixteen = value["points"]
    assert (eight["scaling"], eight["ranks"], sixteen["global_batch"]) == (1.0, 8, 16_384)
    assert len(sixteen["memory"]["by_rank"]) == 16
    assert sum(eight["exposed"].values()) == pytest.approx(eight["seconds"])
    assert eight["target"]["cost"] == pytest.approx(eight["target"]["hours"] * 8 * 3)


def test_a_skew_is_told_with_what_helps(call: Call) -> None:
    words = (*MLPERF, "--model.row-scale", "0.01", "--ranks", "32", "--gpu", "mi350x", "--skew", "zipf:0.7")
    broken = (*words, "--sharding", "row", "--dedup", "off", "--codec", "clamp-copy")
    (point,) = found(call, *broken)["points"]
    assert point["memory"]["verdict"] == "does not fit"
    assert point["memory"]["remedies"]
    out = call(*broken, "--shard", "album_id=column")[1]
    assert "would fit: " in out
    assert "skew: bytes that reach a rank, each way" in out
    assert "column-wise, without dedup" in out
    (cured,) = found(call, *words, "--shard", "album_id=column", "--shard", "artist_id=table")["points"]
    kinds = {one["name"]: one["kind"] for one in cured["tables"]}
    assert (kinds["album_id"], kinds["artist_id"]) == ("column", "table")


def test_what_does_not_fit_is_explained(call: Call) -> None:
    code, out, _ = call(*MLPERF, "--ranks", "2,8", "--gpu", "h200")
    assert code == 0
    assert "2 ranks: does not fit" in out
    assert "no override of sharding helps" in out


def test_failures_are_simulated(call: Call) -> None:
    words = (
        *MLPERF,
        "--gpu",
        "b200",
        "--mtbf-hours",
        "20",
        "--checkpoint-seconds",
        "10",
        "--samples-to-target",
        "1e10",
    )
    first, again = (found(call, *words)["points"][0]["failures"] for _ in range(2))
    assert first == again
    assert first["mtbf_s"] == 20 * 3600 / 8
    assert 0 < first["chosen"]["mean"] <= first["best"]["mean"] < 1
    assert "goodput" in call(*words)[1]


def test_a_dataset_s_skew(call: Call) -> None:
    from recperf.data.yambda import catalogue
    from recperf.data.yambda.synthesize.config import YambdaLike

    made = YambdaLike(users=60, events_per_user=200, items=500)
    store = catalogue.embedded(say=lambda _: None, config=made)
    words = ("dlrm-v4", "--ranks", "4", "--skew", str(store.folder), "--data.windows.min-history", "50")
    code, out, _ = call(*words, "--skew-batches", "2", "--global-batch", "64")
    assert code == 0
    assert "counted: 2 batches of yambda-like" in out
    assert "where memory ends" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--ranks", "eight"), 2, "no list of numbers"),
        (("--ranks", "0"), 3, "ranks is 0"),
        (("--gpu", "b20"), 2, "did you mean 'b200'"),
        (("--network", "ib40"), 2, "did you mean 'ib400'"),
        (("--shard", "album=row"), 3, "did you mean 'album_id'"),
        (("--shard", "album_id"), 2, "names no kind"),
        (("--rank-batch", "8", "--global-batch", "64"), 2, "exclude each other"),
        (("--price", "cheap"), 2, "is no price"),
        (("--out", "plan.png"), 2, "neither a plot nor a page"),
        (("--skew", "nowhere"), 3, "there are no events here"),
        (("--skew", "zipf:x"), 2, "no exponent"),
        (("--efficiency", "0"), 3, "efficiency"),
    ],
)
def test_mistakes_are_one_line(call: Call, words: tuple[str, ...], code: int, says: str) -> None:
    got, _, err = call("dlrm-v4", *words)
    assert got == code
    assert says in err
    assert "Traceback" not in err


def test_this_machine_is_a_device(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"copy": {"p50": 2e10}, "gemm": {"float32": {"p50": 6e10}}}
    monkeypatch.setattr("recperf.cli.plan.at_hand", lambda _: peaks)
    value = found(call, "micro-dlrm", "--gpu", "cpu", "--ranks", "1,2")
    assert value["network"] == "loopback"
    assert [point["rank_batch"] for point in value["points"]] == [256, 128]


def test_help_and_a_plan_need_no_torch() -> None:
    code = (
        "import sys, recperf.cli as cli\n"
        "code = cli.main(['plan', 'dlrm-v4', '--preset', 'mlperf', '--quiet'])\n"
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
