"""What every test shares: a cache folder of its own and short windows."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before OpenMP is loaded: workers of pytest-xdist share the cores, which waiting threads would take by spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings
from torch.utils import _python_dispatch

import short
import warm

ROOT = Path(__file__).parents[1]
LEFT_ACTIVE = "left a counter of operators active"

# Triton decides once, when it is imported, whether its own functions can be interpreted. Without a GPU some tests
# interpret kernels, and torch may import Triton in any test before them.
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        importlib.import_module("triton.language")

# nohup and shells in the background ignore these for all that they start; tests send them.
for number, default in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# The same examples in every run: a failure is found by whoever causes it, and found again. RECPERF_HYPOTHESIS=random
# looks at new ones.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("RECPERF_HYPOTHESIS", "same"))


@pytest.fixture(scope="session")
def compiled() -> Path:
    """A folder of compiled C code for the processes of all tests, and of later runs: compiling takes longer than
    most tests. A library is found by a digest of what it was compiled from."""
    folder = ROOT / ".pytest_cache" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


HOMES = itertools.count()


def new_home(factory: pytest.TempPathFactory, compiled: Path) -> str:
    """Numbered here: pytest would list all earlier ones."""
    home = factory.getbasetemp() / f"home-{next(HOMES)}"
    home.mkdir()
    (home / "native").symlink_to(compiled)
    return str(home)


@pytest.fixture(scope="session", autouse=True)
def short_runs(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[dict[str, Any]]:
    """Runs are short, those of fixtures of a module too; returns the settings as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", new_home(tmp_path_factory, compiled))
        # Text is as wide as the terminal that tests run in, if nothing says otherwise.
        patch.setenv("COLUMNS", "110")
        before = short.shorten(patch.setattr)
        # On a busy machine there would be no time for all baselines.
        patch.setattr("recperf.execution.quality.spent", lambda phase: 0.0)
        yield before


@pytest.fixture
def all_ratings(short_runs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded ratings are as many as users have."""
    short.shorten(monkeypatch.setattr, {name: short_runs[name] for name in short.FEW})


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    """Tests must not see the user's datasets: with them `auto` would train on real data."""
    monkeypatch.setenv("RECPERF_HOME", new_home(tmp_path_factory, compiled))


@pytest.fixture(autouse=True)
def nothing_counts_operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """A counter of operators that a test leaves active would count in later tests, and nothing would be compiled."""
    yield
    left = _python_dispatch._get_current_dispatch_mode_stack()
    if left or _python_dispatch.is_in_torch_dispatch_mode():
        request.node.user_properties.append((LEFT_ACTIVE, str(left)))
        for _ in left:
            _python_dispatch._pop_mode()
        for name in [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]:
            setattr(_python_dispatch, name, False)
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("default")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports(""):
        for name, modes in report.user_properties:
            if name == LEFT_ACTIVE and report.when == "teardown":
                terminalreporter.write_line(f"{report.nodeid} left a counter of operators active: {modes}")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that a value a kernel forgets to write is seen."""

    def filled(make: Any) -> Any:
        def call(*sizes: Any, **more: Any) -> Any:
            tensor = make(*sizes, **more)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export without its program: tracing it, in a process of its own, takes longer than all the rest."""
    nothing = {"file": "", "inputs": [], "output": "", "largest_difference": 0, "expected_difference": 0}
    monkeypatch.setattr("recperf.execution.exporting._write_program", lambda *_: nothing)


@pytest.fixture
def warm_starts() -> None:
    """What a test starts by `warm.python` is a fork, where TorchRec is installed: the server has it loaded."""
    if all(map(importlib.util.find_spec, ("torchrec", "fbgemm_gpu"))):
        warm.home()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes by a fork server come first, one after another: pytest-xdist gives them to one worker,
    so that each server is started once."""
    servers = {"rank_pool", "killable", "tiny_v4"}
    modules = {
        item.module: {getattr(value, "__module__", "") for value in vars(item.module).values()} for item in items
    }
    items.sort(key=lambda item: "warm_starts" not in item.fixturenames and servers.isdisjoint(modules[item.module]))


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs on this machine, as far as recperf sees: beside other work it judges nothing."""
    monkeypatch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, kernels run in Triton's interpreter."""
    if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set torch's number of threads; the test's end restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
