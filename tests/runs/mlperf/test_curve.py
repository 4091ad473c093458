"""Curves of AUC against samples, of our logs and of the published ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recperf.errors import DataError, MachineError, UsageError
from recperf.runs.mlperf import curve_plot
from recperf.runs.mlperf.curve import curves, published_logs


def test_the_published_logs_need_what_was_published(golden: Path) -> None:
    """Both figures are among the reference's own convergence points for their batch sizes."""
    found = {curve.global_batch_size: curve for curve in curves([], [golden / "mlperf_logs"])}
    assert {batch: curve.samples_to_target for batch, curve in found.items()} == {8192: 68_812_800, 32768: 98_631_680}
    assert [len(found[batch].points) for batch in (8192, 32768)] == [32, 72]
    assert found[8192].best == pytest.approx(0.76456, abs=1e-5)
    assert found[8192].train_samples == 2_290_835_423
    rcp = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker", reason="mlperf-logging is not installed")
    records = rcp.RCP_Checker("training", "6.1.0", "dlrmv4", False).rcp_data.values()
    for record in records:
        if record["BS"] in found:
            assert found[record["BS"]].samples_to_target in record["Epochs to converge"]


def test_ours_come_first_and_no_log_twice(golden: Path, write: Callable[..., Path]) -> None:
    own, folder = write("run-a/mlperf.log", last=27), golden / "mlperf_logs"
    found = curves([own.parent, folder / "dlrmv4_gbs8192_a.log"], [folder])
    assert [(curve.name, curve.published) for curve in found] == [
        ("run-a", False),
        ("dlrmv4_gbs8192_a", False),
        ("dlrmv4_gbs32768_a", True),
    ]
    assert found[0].samples_to_target == 27 * 280 * 8192


def test_another_target(golden: Path) -> None:
    paths = [golden / "mlperf_logs" / "dlrmv4_gbs8192_a.log"]
    assert curves(paths, [], 0.76)[0].samples_to_target == 73_400_320
    unreached = curves(paths, [], 0.9)
    assert unreached[0].samples_to_target is None
    assert curve_plot.rows(unreached)[1][-2:] == ["not reached", "-"]


def test_logs_of_one_name_keep_their_paths_apart(write: Callable[..., Path]) -> None:
    paths = [write("a/run/mlperf.log"), write("b/run/mlperf.log")]
    assert [curve.name for curve in curves(paths, [])] == [str(path) for path in paths]


def test_a_log_may_be_a_link_where_the_user_names_it_but_not_in_a_run(write: Callable[..., Path]) -> None:
    log = write("own.log")
    link = log.with_name("mlperf.log")
    link.symlink_to(log)
    assert len(curves([link], [])) == 1
    with pytest.raises(DataError, match=r"cannot read mlperf\.log: it is a link"):
        curves([link.parent], [])


def test_where_published_logs_lie(golden: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RECPERF_GOLDEN", str(golden))
    assert published_logs() == [golden / "mlperf_logs"]
    monkeypatch.setenv("RECPERF_GOLDEN", str(tmp_path))
    assert published_logs() == []


def test_a_log_without_evaluations(write: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no evaluation"):
        curves([write(last=20)], [])


@pytest.fixture
def two(write: Callable[..., Path]) -> list[Any]:
    return curves([write("a & <b>.log"), write("other.log", batch=32768, last=45)], [])


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")]
)
def test_figures(two: list[Any], tmp_path: Path, suffix: str, begins: bytes) -> None:
    out = curve_plot.write(two, tmp_path / "deep" / f"curve{suffix}")
    content = out.read_bytes()
    assert content.startswith(begins)
    if suffix == ".png":
        return
    text = content.decode()
    assert "a &amp; &lt;b&gt;" in text
    assert "66.5 M" in text
    assert "<b>" not in text
    assert str(tmp_path) not in text
    # The same numbers give the same file.
    assert curve_plot.write(two, tmp_path / f"again{suffix}").read_bytes() == content
    if suffix == ".html":
        assert re.search(r"<td>66,519,040</td>", text)


def test_a_small_run_beside_the_benchmark_has_room(two: list[Any], write: Callable[..., Path]) -> None:
    small = write("small.log")
    small.write_text(re.sub(r'"samples_count": (\d+)\d{3}\b', r'"samples_count": \1', small.read_text()))
    together = [*two, *curves([small], [])]
    assert curve_plot.draw(two).axes[0].get_xscale() == "linear"
    assert curve_plot.draw(together).axes[0].get_xscale() == "log"


@pytest.mark.parametrize("name", ["curve.pdf", "curve", ""])
def test_a_file_of_no_known_kind(two: list[Any], tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--out must be a file"):
        curve_plot.write(two, tmp_path / name)


def test_without_matplotlib(two: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MachineError) as raised:
        curve_plot.write(two, tmp_path / "curve.svg")
    assert raised.value.fix == "pip install 'recperf[report]'"
