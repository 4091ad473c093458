"""Checks of this machine: each reports its result and, if something is missing, the command that fixes it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .errors import RecperfError
from .places import dataset_folder, home
from .units import size

OK, MISSING, OPTIONAL = "ok", "missing", "optional"


@dataclass(frozen=True)
class Finding:
    name: str
    state: str
    """ok; missing: recperf cannot work fully; optional: only one feature is unavailable."""
    found: str
    fix: str | None = None


def examine() -> list[Finding]:
    """Run every check; one that fails does not stop the others."""
    findings = []
    for check in CHECKS:
        try:
            findings.append(check())
        except Exception as error:
            own = isinstance(error, RecperfError)
            text = str(error) if own else f"{type(error).__name__}: {error}"
            findings.append(Finding(check.__name__.replace("_", " "), MISSING, text, getattr(error, "fix", None)))
    return findings


def python() -> Finding:
    fine = sys.version_info >= (3, 11)
    return Finding(
        "python", OK if fine else MISSING, platform.python_version(), None if fine else "install Python 3.11 or newer"
    )


def torch() -> Finding:
    """That torch imports and multiplies, not only that it is installed."""
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        return Finding("torch", MISSING, str(error), "pip install torch==2.13.0")
    product = module.ones(4, 4) @ module.ones(4, 4)
    if float(product[0, 0]) != 4.0:
        return Finding(
            "torch", MISSING, "a matrix product came out wrong", "pip install --force-reinstall torch==2.13.0"
        )
    version = tuple(int(part) for part in module.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= version < (2, 14):
        return Finding(
            "torch", MISSING, f"{module.__version__}; recperf knows 2.11 to 2.13", "pip install torch==2.13.0"
        )
    return Finding("torch", OK, f"{module.__version__}, {module.get_num_threads()} threads")


def gpu() -> Finding:
    module = importlib.import_module("torch")
    if not module.cuda.is_available():
        return Finding("gpu", OPTIONAL, "torch sees none; everything runs on the CPU", None)
    names = ", ".join(module.cuda.get_device_name(i) for i in range(module.cuda.device_count()))
    return Finding("gpu", OK, names)


def package(name: str, module: str, *, needed: bool, why: str, fix: str) -> Finding:
    try:
        importlib.import_module(module)
    except ImportError:
        return Finding(name, MISSING if needed else OPTIONAL, f"not installed; {why}", fix)
    try:
        return Finding(name, OK, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, OK, "importable")


def numpy() -> Finding:
    return package("numpy", "numpy", needed=True, why="reads data", fix="pip install 'numpy>=2.0'")


def pooch() -> Finding:
    return package("pooch", "pooch", needed=False, why="recperf data get needs it", fix="pip install pooch")


def triton() -> Finding:
    return package("triton", "triton", needed=False, why="GPU kernels need it", fix="pip install triton")


def report() -> Finding:
    return _extra("report", ("matplotlib", "jinja2"), "recperf report needs it")


def yambda() -> Finding:
    return _extra("yambda", ("pyarrow", "huggingface_hub"), "raw listening events need it")


def mlperf() -> Finding:
    return _extra("mlperf", ("mlperf_logging",), "MLPerf logs and recperf mlperf need it")


def _extra(extra: str, names: tuple[str, ...], why: str) -> Finding:
    """The packages of an extra: the first that is missing, else the first."""
    fix = f"pip install 'recperf[{extra}]'"
    findings = [package(name, name, needed=False, why=why, fix=fix) for name in names]
    return next((finding for finding in findings if finding.state != OK), findings[0])


def distributed() -> Finding:
    """Runs operators: a build of fbgemm for another torch installs cleanly and fails when it is loaded."""
    from .distributed.library import FIX, jagged_op

    if not all(importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu")):
        return Finding("torchrec", OPTIONAL, "not installed; runs on several ranks need it", FIX)
    return Finding("torchrec", OK, jagged_op())


def compiler() -> Finding:
    path = shutil.which("cc") or shutil.which("gcc")
    if path:
        return Finding("C compiler", OK, path)
    return Finding("C compiler", OPTIONAL, "none; the slower torch and numpy code runs instead", "apt-get install gcc")


def c_code() -> Finding:
    """Compiles the C body of every op and runs it against its reference."""
    from .ops import native_bodies

    if compiler().state != OK:
        return Finding("C code", OPTIONAL, "not compiled: there is no C compiler", "apt-get install gcc")
    problems = {name: native_bodies.problem(name) for name in native_bodies.names()}
    failures = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if failures:
        return Finding("C code", MISSING, "; ".join(failures), "reinstall recperf, or install a working gcc")
    return Finding("C code", OK, f"{', '.join(problems)} compiled and gave the right results")


def ceilings() -> Finding:
    from .measure import peaks

    measured = peaks.load()
    if measured is None:
        return Finding("ceilings", OPTIONAL, "not measured yet; the first run measures them quickly", "recperf peaks")
    return Finding("ceilings", OK, f"measured {measured['measured']}{' (quick)' if measured['quick'] else ''}")


def movielens() -> Finding:
    folder = dataset_folder("movielens-100k")
    if (folder / "u.data").is_file():
        return Finding("movielens-100k", OK, str(folder))
    return Finding(
        "movielens-100k",
        OPTIONAL,
        "not downloaded; runs use embedded synthetic data",
        "recperf data get movielens-100k",
    )


def cache_folder() -> Finding:
    return _writable("cache folder", home(), "set RECPERF_HOME to a folder you may write")


def run_folder() -> Finding:
    return _writable("run folder", Path("runs"), "cd to a folder you may write, or use recperf run --run-dir")


def _writable(name: str, folder: Path, fix: str) -> Finding:
    """The folder, or the nearest parent that exists, must be a folder one may write, with some space left."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding(name, MISSING, f"{folder} cannot be written", fix)
    free = shutil.disk_usage(place).free
    if free < 100 << 20:
        return Finding(name, MISSING, f"{folder}: {size(free)} free", "free some disk space")
    return Finding(name, OK, f"{folder}, {size(free)} free")


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, torch, numpy, gpu, triton, compiler, c_code, pooch, report, yambda, mlperf, distributed, ceilings,
    movielens, cache_folder, run_folder,
)  # fmt: skip
