"""recperf doctor"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from ..errors import MachineError, RecperfError
from ..locations import dataset_folder, home
from ..terminal import print_json, print_text
from ..units import size
from . import REQUIRED
from .parse import SWITCHES, JsonOption, help_text, unknown_option

DESCRIPTION = "Check this machine and print the command that fixes each problem."
Options = JsonOption
OK, MISSING, OPTIONAL = "ok", "missing", "optional"


@dataclass(frozen=True)
class Diagnosis:
    name: str
    state: str
    """ok; missing: recperf cannot work fully; optional: only one feature is unavailable."""
    detail: str
    fix: str | None = None


def command(arguments: list[str]) -> int:
    # Without tyro, which may be what is missing.
    if SWITCHES & set(arguments):
        print_text(help_text(Options, "recperf doctor", DESCRIPTION, None, everything="--help-all" in arguments))
        return 0
    if others := [argument for argument in arguments if argument != "--json"]:
        raise unknown_option(others, ["--json"], "recperf doctor")
    options, findings = Options(json=bool(arguments)), []
    for name, check in CHECKS.items():
        # A check that fails does not stop the others.
        try:
            findings.append(check())
        except Exception as error:
            text = str(error) if isinstance(error, RecperfError) else f"{type(error).__name__}: {error}"
            findings.append(Diagnosis(name, MISSING, text, getattr(error, "fix", None)))
    broken = [finding.name for finding in findings if finding.state == MISSING]
    if options.json:
        print_json({"healthy": not broken, "findings": [vars(finding) for finding in findings]})
        return MachineError.exit_code if broken else 0
    for finding in findings:
        print_text(f"{finding.state:<9} {finding.name:<15} {finding.detail}")
        if finding.fix and finding.state != "ok":
            print_text(f"{'':<25} fix: {finding.fix}")
    print_text(f"\n{'needs attention: ' + ', '.join(broken) if broken else 'recperf works here'}")
    return MachineError.exit_code if broken else 0


def torch() -> Diagnosis:
    """That torch imports and multiplies, not only that it is installed."""
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        return Diagnosis("torch", MISSING, str(error), "pip install torch==2.13.0")
    if float((module.ones(4, 4) @ module.ones(4, 4))[0, 0]) != 4.0:
        fix = "pip install --force-reinstall torch==2.13.0"
        return Diagnosis("torch", MISSING, "a matrix product came out wrong", fix)
    version = tuple(int(part) for part in module.__version__.split("+")[0].split(".")[:2])
    if not (2, 11) <= version < (2, 14):
        text = f"{module.__version__}; recperf knows 2.11 to 2.13"
        return Diagnosis("torch", MISSING, text, "pip install torch==2.13.0")
    return Diagnosis("torch", OK, f"{module.__version__}, {module.get_num_threads()} threads")


def required() -> Diagnosis:
    """The packages without which no other command starts."""
    absent = []
    for module in REQUIRED:
        try:
            importlib.import_module(module)
        except ImportError:
            absent.append(module)
    if absent:
        what = f"not installed: {', '.join(absent)}; every command needs it"
        return Diagnosis("packages", MISSING, what, f"pip install {' '.join(absent)}")
    return Diagnosis("packages", OK, ", ".join(REQUIRED))


def gpu() -> Diagnosis:
    module = importlib.import_module("torch")
    if not module.cuda.is_available():
        return Diagnosis("gpu", OPTIONAL, "torch sees none; everything runs on the CPU", None)
    names = ", ".join(module.cuda.get_device_name(i) for i in range(module.cuda.device_count()))
    return Diagnosis("gpu", OK, names)


def packages(modules: tuple[str, ...], why: str, fix: str) -> Diagnosis:
    """Packages that belong together: the first that is missing, else the version of the first."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            return Diagnosis(module, OPTIONAL, f"not installed; {why}", fix)
    try:
        return Diagnosis(modules[0], OK, metadata.version(modules[0]))
    except metadata.PackageNotFoundError:
        return Diagnosis(modules[0], OK, "importable")


def distributed() -> Diagnosis:
    """Runs operators: a build of fbgemm for another torch installs cleanly and fails when it is loaded."""
    from ..distributed.library import FIX, jagged_op

    if not all(importlib.util.find_spec(name) for name in ("torchrec", "fbgemm_gpu")):
        return Diagnosis("torchrec", OPTIONAL, "not installed; runs on several ranks need it", FIX)
    return Diagnosis("torchrec", OK, jagged_op())


def compiler() -> Diagnosis:
    path = shutil.which("cc") or shutil.which("gcc")
    if path:
        return Diagnosis("C compiler", OK, path)
    return Diagnosis(
        "C compiler", OPTIONAL, "none; the slower torch and numpy code runs instead", "apt-get install gcc"
    )


def c_code() -> Diagnosis:
    """Compiles the C body of every op."""
    from ..ops.compile import native_ops, native_problem

    if compiler().state != OK:
        return Diagnosis("C code", OPTIONAL, "not compiled: there is no C compiler", "apt-get install gcc")
    problems = {name: native_problem(name) for name in native_ops()}
    failures = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if failures:
        return Diagnosis("C code", MISSING, "; ".join(failures), "reinstall recperf, or install a working gcc")
    return Diagnosis("C code", OK, f"{', '.join(problems)} compiled")


def ceilings() -> Diagnosis:
    from ..measure import peaks

    measured = peaks.load()
    if measured is None:
        return Diagnosis("ceilings", OPTIONAL, "not measured yet; the first run measures them quickly", "recperf peaks")
    return Diagnosis("ceilings", OK, f"measured {measured.measured}{' (quick)' if measured.quick else ''}")


def movielens() -> Diagnosis:
    folder = dataset_folder("movielens-100k")
    if (folder / "u.data").is_file():
        return Diagnosis("movielens-100k", OK, str(folder))
    text = "not downloaded; runs use embedded synthetic data"
    return Diagnosis("movielens-100k", OPTIONAL, text, "recperf data get movielens-100k")


def writable(name: str, folder: Path, fix: str) -> Diagnosis:
    """The folder, or the nearest parent that exists, must be a folder one may write, with some space left."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Diagnosis(name, MISSING, f"{folder} cannot be written", fix)
    free = shutil.disk_usage(place).free
    if free < 100 << 20:
        return Diagnosis(name, MISSING, f"{folder}: {size(free)} free", "free some disk space")
    return Diagnosis(name, OK, f"{folder}, {size(free)} free")


PACKAGES = {
    "triton": (("triton",), "GPU kernels need it", "pip install triton"),
    "pooch": (("pooch",), "recperf data get needs it", "pip install pooch"),
    "pages": (("jinja2",), "pages need it", "pip install jinja2"),
    "data": (("pyarrow", "duckdb"), "imports of files need it", "pip install pyarrow duckdb"),
    "downloads": (("huggingface_hub",), "recperf data get needs it for events", "pip install 'recperf[data]'"),
    "mlperf": (("mlperf_logging",), "recperf mlperf needs it", "pip install 'recperf[mlperf]'"),
}
"""Modules that belong together, what needs them, and the command that installs them."""
CHECKS: dict[str, Callable[[], Diagnosis]] = {
    "packages": required,
    "torch": torch,
    "gpu": gpu,
    "C compiler": compiler,
    "C code": c_code,
    **{name: partial(packages, *facts) for name, facts in PACKAGES.items()},
    "torchrec": distributed,
    "ceilings": ceilings,
    "movielens-100k": movielens,
    "cache folder": lambda: writable("cache folder", home(), "set RECPERF_HOME to a folder you may write"),
    "run folder": lambda: writable("run folder", Path("runs"), "cd to a folder you may write, or use --run-dir"),
}
