from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from recperf.measure import stalls as module
from recperf.measure.stalls import function_name, ncu_options, parse, stalls, summary

BAG = "_bag_forward_kernel"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::relu<float>(int)::{lambda(float)#1}>(int, float)"
GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_cublas"

HEAD = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Device", "CC"]
METRICS = [
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard",
    "smsp__pcsamp_warps_issue_stalled_long_scoreboard_not_issued",
    "smsp__pcsamp_warps_issue_stalled_selected",
    "smsp__pcsamp_warps_issue_stalled_wait",
]


def line(options: list[str]) -> str:
    return ",".join(f'"{word}"' for word in options)


def launch(number: int, kernel: str, metrics: list[str]) -> str:
    return line([str(number), "77", "python3.11", "127.0.0.1", kernel, "1", "7", "0", "9.0", *metrics])


PRINTED = "\n".join(
    [
        "==PROF== Connected to process 77 (/usr/bin/python3.11)",
        '==PROF== Profiling "_bag_forward_kernel" - 0: 0%....50%....100% - 2 passes',
        "==PROF== Disconnected from process 77",
        line(HEAD + METRICS),
        line([""] * len(HEAD) + ["%", "%", "warp", "warp", "warp", "warp"]),
        launch(0, BAG, ["80.5", "20", "1,500", "1400", "300", "200"]),
        launch(1, BAG, ["79.5", "22", "1,500", "1400", "300", "200"]),
        launch(2, BAG, ["0", "0", "0", "0", "0", "9000"]),
        launch(3, RELU.replace("(int, float)", "(int, float )"), ["10", "30", "0", "0", "25", "75"]),
    ]
)


def test_reasons_are_shares_of_the_samples_of_the_first_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCHES", 2)
    result = summary(parse(PRINTED), [RELU, BAG, GEMM])
    bag, relu = result.kernels
    assert (bag.name, bag.launches, bag.samples) == (BAG, 2, 4000)
    assert bag.reasons == pytest.approx({"long_scoreboard": 0.75, "selected": 0.15, "wait": 0.1})
    assert next(iter(bag.reasons)) == "long_scoreboard"
    assert bag.dram_percent == pytest.approx(80.0)
    assert bag.sm_percent == pytest.approx(21.0)
    # Spelt a little differently by ncu than by the trace, it is still the kernel that was asked for.
    assert relu.name == RELU
    assert relu.reasons == pytest.approx({"wait": 0.75, "selected": 0.25})
    assert result.not_seen == [GEMM]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (BAG, BAG),
        ("void at::native::<unnamed>::copy<T<U<int> > >(T)", "copy"),
        ("std::enable_if<true, void>::type internal::gemvx::kernel<int, 8>(P)", "kernel"),
    ],
)
def test_the_name_ncu_filters_by(kernel: str, name: str) -> None:
    assert function_name(kernel) == name


def test_names_are_escaped_and_match_only_themselves() -> None:
    options = ncu_options(["triton_poi_fused_0.1d2c", BAG])
    pattern = options[options.index("--kernel-name") + 1].removeprefix("regex:")
    assert re.search(pattern, "triton_poi_fused_0.1d2c")
    assert not re.search(pattern, "triton_poi_fused_0x1d2c")
    assert not re.search(pattern, f"other{BAG}")
    assert options[options.index("--clock-control") + 1] == "none"


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in ncu's place; what is written into it runs with the path of the log as `log`."""
    tool = tmp_path / "ncu.py"
    monkeypatch.setattr(module.shutil, "which", lambda name: sys.executable)
    plain = module.ncu_options
    monkeypatch.setattr(module, "ncu_options", lambda names: [str(tool), *plain(names)])
    return tool


START = "import sys, time\nlog = sys.argv[sys.argv.index('--log-file') + 1]\n"


def test_what_ncu_writes_becomes_the_section(pretend: Path) -> None:
    pretend.write_text(START + f"open(log, 'w').write({PRINTED!r})")
    assert [row.name for row in stalls(["python"], [BAG, RELU]).kernels] == [BAG, RELU]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("open(log, 'w').write('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)", "NVreg_Restrict"),
        (
            "open(log, 'w').write('==ERROR== LibraryNotLoaded\\n'); sys.exit(9)",
            "ncu failed: LibraryNotLoaded",
        ),
        ("print('no such file'); sys.exit(3)", r"exit 3\): no such file"),
        ("time.sleep(60)", "stopped after 1 s"),
    ],
)
def test_failures_are_explained(pretend: Path, program: str, says: str) -> None:
    pretend.write_text(START + program)
    assert re.search(says, stalls(["python"], [BAG], timeout_s=1.0 if "sleep" in program else 30.0).missing)


def test_missing_ncu_or_kernels_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert "not on PATH" in stalls(["python"], [BAG]).missing
    monkeypatch.setattr(module.shutil, "which", lambda name: "ncu")
    assert "the profile has no kernels" in stalls(["python"], []).missing
