"""Every command in README and docs is run: in order, page by page, in an empty folder, on sizes of a moment.

A command that needs a GPU, a network, several hosts or a program that is not here is at least read by the real option
parser. The tables below say what is made smaller, what is not run and why, and what a page presupposes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from movielens_files import write_files

import recperf.cli
from recperf.cli import main
from recperf.cli import parse as parsing
from recperf.data.known.movielens_like import generate

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))}

CPU = "--train.device cpu"
FEW = f"{CPU} --train.max-steps 12 --no-peaks --no-report"
MICRO = f"--train.epochs 1 {FEW} --target.beat none"
DLRM = f"--model.bottom 8 16 4 --model.dim 4 --model.top 8 1 --train.batch-size 64 --data.batches 6 {CPU}"
DLRM += " --data.held-out-batches 2"
CRITEO = f"--model.dim 4 --model.top 8 1 --model.bottom 13 8 4 --train.batch-size 64 {FEW} --target.beat none"
DRAM = f"--model.rows 20000 --data.ids-per-bag 4 --data.batches 12 --train.batch-size 128 {CPU}"
DRAM += " --data.held-out-batches 2"
V4 = f"--data.events 8000 --data.windows.min-history 5 {FEW} --train.max-steps 2 --target.beat none"
PROFILE = "--steps 5 --no-confirm"

SMALLER = {
    r"^run$|run micro-dlrm( |$)": MICRO,
    r"run dlrm .*criteo": CRITEO,
    r"run dlrm( |$)": f"{DLRM} --no-peaks",
    r"run dlrm-v4": f"{V4} --seeds 1",
    r"run (next-item|hstu)": "--data.users 60 --train.max-steps 2 --model.blocks 1 --no-peaks",
    r"run micro-dlrm-dram --preset movielens": f"{MICRO} --model.rows 20000 --model.dim 16",
    r"(sweep|pair) micro-dlrm-dram": DRAM,
    r"profile dlrm ": f"{DLRM} {PROFILE}",
    r"data make yambda-like": "--events 20000",
    r"data make shop": "--customers 200",
}
"""What is added to a command that takes long, by a pattern; the first that matches counts."""

NOT_RUN = {
    r"data (get|prepare|check) yambda-": "needs a download",
    r"data get (movielens|amazon)-": "needs a download",
    r"--data yambda-50m": "needs a download",
    r"^bench ": "trains every model; tests/cli/test_bench.py runs it",
    r"^ui( |$)": "serves until it is stopped; tests/browser/test_ui.py drives it",
    r"run dlrm-v4 --preset mlperf": "needs 600 GB of tables",
    r"^torchrun": "needs several hosts, or starts processes of its own; tests/distributed runs it",
    r"october": "needs a run on earlier events; tests/workloads/test_start_from.py has one",
    r"examples/(hosts|slurm|kubernetes)/": "needs several hosts; tests/distributed runs it",
    r"^hpc": "needs HPCToolkit",
    r"tests/reliability/chaos.py": "takes minutes; tests/reliability runs it",
    r"actions/measure/measure.py": "profiles two checkouts several times; tests/github runs it",
    r"^docker ": "needs a container engine; tests/test_docker.py checks the files",
    r"^make ": "sets up or tests everything; only its target is looked up",
    r"^pip ": "installs packages",
}
"""Commands that are only read by the option parser, and why."""

LONG = {
    r"--ranks|^torchrun --nproc": "starts processes, seconds each",
    r"--try-fixes": "measures every fix",
    r"^run$|--data shop( |$)|^recommend runs/shop |^profile --script train.py$": "the tutorial runs them",
    r"plan .*--calibrate": "measures ranks, half a minute; tests/planning/test_calibrate.py has its parts",
}
"""Commands of README that are only read there; another page has them too."""


@dataclass(frozen=True)
class Command:
    page: str
    text: str
    error: str | None = None
    """The message that the page shows below the command."""
    mentioned: bool = False
    """Mentioned in a sentence rather than meant to be typed."""

    @property
    def arguments(self) -> list[str]:
        """Without a comment and without the prompt; `...` stands for more of the same."""
        return [word for word in shlex.split(self.text.split(" > ")[0], comments=True) if word.strip(".")]

    @property
    def key(self) -> str:
        """What the tables' patterns look at: no program's name for recperf's own commands."""
        return " ".join(self.arguments).removeprefix("recperf ")


PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:recperf|make|torchrun|sbatch|python|pip|docker|hpcrun|examples/\S+)(?: .*)?"


def commands(name: str) -> list[Command]:
    """The commands of a page in their order: lines of blocks, commands in tables, and those mentioned in sentences."""
    found: list[Command] = []
    text = PAGES[name].read_text(encoding="utf-8")
    for part in re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            found += commands_of_block(name, part)
        else:
            for code, table in codes(part):
                if re.fullmatch(PROGRAMS, code):
                    found += [Command(name, one, mentioned=not table) for one in alternatives(code)]
    return list(dict.fromkeys(found))


def to_type(name: str) -> list[Command]:
    return [command for command in commands(name) if not command.mentioned]


def commands_of_block(name: str, block: str) -> Iterator[Command]:
    language, _, content = block.removeprefix("```").removesuffix("```").partition("\n")
    if language not in ("", "sh", "bash", "console"):
        return
    lines = content.replace("\\\n", " ").splitlines()
    for line, after in zip(lines, [*lines[1:], ""]):
        typed = line.removeprefix("$ ")
        if re.fullmatch(PROGRAMS, typed):
            yield Command(name, typed, error=after if after.startswith("error: ") else None)


def codes(text: str) -> Iterator[tuple[str, bool]]:
    """Code in sentences and in tables, where it is a command to type."""
    for line in re.sub(r"\n(?!\s*[|*\n-])", " ", text).splitlines():
        for code in re.findall(r"`([^`]*)`", line):
            yield code.strip(), line.startswith("| `recperf")


def alternatives(code: str) -> list[str]:
    r"""`recperf data check\|info NAME` is two commands."""
    match = re.search(r"\S+(?:\\\|\S+)+", code)
    if not match:
        return [code]
    every = [word for word in match[0].split("\\|") if word != "..."]
    return [code.replace(match[0], word) for word in every]


class Parsed(BaseException):
    """The options of a command were read; the rest of it is not run."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """Commands end where their options have been read."""

    def parse_and_stop(*arguments: Any, **options: Any) -> None:
        real(*arguments, **options)
        raise Parsed

    real = parsing.parse
    with pytest.MonkeyPatch.context() as patch:
        names = [module.name for module in pkgutil.walk_packages(recperf.cli.__path__, "recperf.cli.")]
        for module in [importlib.import_module(name) for name in names]:
            if getattr(module, "parse", None) is real:
                patch.setattr(module, "parse", parse_and_stop)
        yield


def tiny_ceilings(patch: pytest.MonkeyPatch) -> None:
    """Ceilings are measured for a moment, as if this machine did nothing else."""
    from recperf.measure.peaks import sampling

    patch.setattr("recperf.measure.peaks.other_work.OtherWork.share", lambda *_: 0.0)
    patch.setattr(sampling, "QUICK", sampling.TINY)
    patch.setattr(sampling, "FULL", replace(sampling.TINY, knee_points=2))


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of micro-dlrm; beside it are the ceilings of this machine."""
    folder = tmp_path_factory.mktemp("small") / "run"
    options = f"{MICRO} --peaks --quiet --data.source embedded --run-dir {folder}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPERF_HOME", str(folder.parent))
        tiny_ceilings(patch)
        assert main(["run", "micro-dlrm", *options.split()]) == 0
    return folder


Maker = Callable[[Path, Path], object]


def copy_of_run(path: Path, run: Path) -> None:
    shutil.copytree(run, path)


def program(path: Path, run: Path) -> None:
    """The program of docs/your-model.md: its first example, in a loop."""
    (first, *_) = re.findall(r"^```python\n(.*?)^```$", PAGES["your-model.md"].read_text(), re.DOTALL | re.MULTILINE)
    loop = "def batches():\n    yield from loader\n\nfor batch in batches():\n    step(batch)\n"
    path.write_text(first.partition("report =")[0] + loop)


def slow_program(path: Path, run: Path) -> None:
    """The program of the tutorial."""
    path.write_text(python_of_tutorial()[-1])


def python_of_tutorial() -> list[str]:
    """What its user types, and the program that is slow."""
    return re.findall(r"^```python\n(.*?)^```$", PAGES["tutorial.md"].read_text(), re.DOTALL | re.MULTILINE)


def trace(path: Path, run: Path) -> None:
    import example_traces

    path.parent.mkdir(parents=True, exist_ok=True)
    rank = re.search(r"rank(\d)", path.name)
    header = {"recperf": {"run": "a", "rank": int(rank[1]), "ranks": 2, "host": "one"}} if rank else {}
    steps = [*example_traces.gpu_step(0, 0.0, 10), *example_traces.gpu_step(1, 1000.0, 20)]
    example_traces.write(path, steps, **header)


def mlperf_log(path: Path, run: Path) -> None:
    import example_logs

    path.parent.mkdir(parents=True, exist_ok=True)
    example_logs.write(path)


def clicks(path: Path, run: Path) -> None:
    """A log in Criteo's layout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        [at % 2, *(at % (3 + k) for k in range(13)), *(f"{at % (5 + k):08x}" for k in range(26))] for at in range(600)
    ]
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def films(path: Path, run: Path) -> None:
    write_files(path, generate(7))


def events(path: Path, run: Path) -> None:
    """Events of 60 days, in the columns that the pages name for a file of this name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(user, (user * 7 + at * 3) % 50, at % 5 + 1, 86_400 * at) for user in range(40) for at in range(60)]
    if path.name == "u.data":
        lines = ["\t".join(map(str, row)) for row in rows]
    elif path.name == "ratings.dat":
        lines = ["::".join(map(str, row)) for row in rows]
    elif path.name == "movies.dat":
        lines = [f"{item}::Film {item}::{('Drama', 'Comedy|Drama')[item % 2]}" for item in range(50)]
    elif path.name == "Beauty.txt":
        lines = [" ".join([str(user), *(str(item) for one, item, *_ in rows if one == user)]) for user in range(40)]
    elif path.name == "ratings.csv":
        lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in rows)]
    else:
        lines = ["who,what,clicked,at", *(f"{user},{item},{rating // 4},{time}" for user, item, rating, time in rows)]
    path.write_text("\n".join(lines) + "\n")


def labelled(path: Path, run: Path) -> None:
    rows = [
        f"c{at % 9},ad{at * 7 % 20},{20 + at % 50},{at % 13}.5,{86_400 * at},{at * at % 3 % 2}" for at in range(2_000)
    ]
    path.write_text("\n".join(["city,ad,age,price,ts,clicked", *rows]) + "\n")


PRESUPPOSED: dict[str, dict[str, Maker]] = {
    "README.md": {
        "runs/NAME": copy_of_run, "runs/A": copy_of_run, "runs/B": copy_of_run,
        "train.py": program, "FILE": trace, "LOG": mlperf_log, "ratings.csv": events,
    },
    "checkpoints.md": {"RUN": copy_of_run},
    "contracts.md": {"runs/<name>": copy_of_run},
    "distributed.md": {
        "runs/mine": copy_of_run, "runs/that-profile/trace.rank0.json.gz": trace,
        "runs/that-profile/trace.rank1.json.gz": trace,
    },
    "launching.md": {"shared/runs/mine": copy_of_run},
    "micro-dlrm-dram.md": {"FOLDER": films},
    "mlperf.md": {"runs/<run>/mlperf.log": mlperf_log},
    "profiling.md": {"OLD": copy_of_run, "NEW": copy_of_run},
    "quality.md": {"train.py": program},
    "report.md": {"runs/<name>": copy_of_run, "runs/<one>": copy_of_run, "runs/<other>": copy_of_run},
    "traces.md": {
        "trace.json.gz": trace, "before.json": trace, "after.json": trace, "FOLDER/trace.rank0.json": trace,
        "FOLDER/trace.rank1.json": trace,
    },
    "tutorial.md": {"train.py": slow_program},
    "your-clicks.md": {"clicks.csv": labelled, "ratings.csv": events, "u.data": events, "train.txt": clicks},
    "next-item.md": {"Beauty.txt": events},
    "your-events.md": dict.fromkeys(
        ("ratings.csv", "log.csv", "u.data", "ratings.dat", "movies.dat"), events
    ),
    "your-model.md": {"train.py": program},
}  # fmt: skip
"""What a page presupposes: files and folders by the names it uses for them."""


@pytest.fixture(autouse=True)
def a_moment(tmp_path: Path, small_run: Path, monkeypatch: pytest.MonkeyPatch, untraced: None) -> None:
    """An empty folder, ceilings of a moment, short profiles, and exports without their programs."""
    from recperf.measure import schedule

    monkeypatch.chdir(tmp_path)
    tiny_ceilings(monkeypatch)
    shutil.copytree(small_run.parent / "machines", Path(os.environ["RECPERF_HOME"], "machines"))
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)


def rule(table: dict[str, str], command: Command) -> str | None:
    return next((value for pattern, value in table.items() if re.search(pattern, command.key)), None)


def run(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    """Run a command in this process, smaller where it takes long; it must end as the page says."""
    smaller = shlex.split(rule(SMALLER, command) or "")
    arguments = command.arguments[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments = [*arguments[:end], *smaller, *arguments[end:]]
    code = main(arguments)
    printed = capfd.readouterr()
    where = f"{command.page}: {command.text}: exit code {code}\n{printed.out[-2000:]}{printed.err[-2000:]}"
    if command.error:
        assert code != 0, where
        assert command.error in printed.err, where
    else:
        # A training of a moment may miss its target, and its claims about speed may fail.
        assert code in ((0, 5) if arguments[0] in ("run", "check") else (0,)), where


def read(command: Command) -> None:
    """Only read a command: recperf's options by its parser, torchrun's by its own, a target of make by make."""
    arguments = [word.replace("/shared/", "shared/") for word in command.arguments]
    while re.fullmatch("[A-Z_]+=.*", arguments[0]):
        del arguments[0]
    if arguments[0] == "make":
        subprocess.run(["make", "--dry-run", *arguments[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    elif arguments[:2] == ["docker", "build"]:
        assert (ROOT / (arguments[arguments.index("--file") + 1] if "--file" in arguments else "Dockerfile")).is_file()
    elif arguments[0] != "pip" and ("recperf" in arguments or "recperf:cuda" in arguments):
        for looked_up in ("--data", "--start-from"):  # A dataset or run that is not here could not be looked up.
            if looked_up in arguments:
                del arguments[arguments.index(looked_up) : arguments.index(looked_up) + 2]
        if arguments[0] == "torchrun":
            from torch.distributed.run import get_args_parser

            get_args_parser().parse_args(arguments[1:])
        with only_parsing(), pytest.raises(Parsed):
            start = arguments.index("recperf:cuda" if "recperf:cuda" in arguments else "recperf")
            assert main(arguments[start + 1 :]) == 0, command
    else:
        assert arguments[0] == "pip" or any((ROOT / word).is_file() for word in arguments if "/" in word), command


def test_commands_in_sentences_exist() -> None:
    """They name a command or part of one, often with a placeholder in capitals."""
    for command in (command for page in PAGES for command in commands(page) if command.mentioned):
        arguments = command.arguments
        whole = len(arguments) > 3 and "--help" not in arguments and not re.search(r"\b[A-Z]+\b", command.text)
        if arguments[0] == "recperf" and (not whole or "--ranks" in arguments[-1]):
            assert arguments[1:2] in ([], *([name] for name in (*recperf.cli.COMMANDS, "COMMAND", "--help"))), command
        elif arguments[0] == "make" or (whole and arguments[0] == "recperf"):
            read(command)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page == "README.md" else pytest.mark.long) for page in PAGES if to_type(page)],
)
def test_commands_of_a_page(page: str, small_run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, make in PRESUPPOSED.get(page, {}).items():
        make(Path(name), small_run)
    for command in to_type(page):
        if rule(NOT_RUN, command) or (page == "README.md" and rule(LONG, command)):
            read(command)
        else:
            run(command, capfd)


def test_no_rule_is_left_over() -> None:
    every = [command for page in PAGES for command in commands(page)]
    for pattern in (*SMALLER, *NOT_RUN, *LONG):
        assert any(re.search(pattern, command.key) for command in every), pattern
    assert PRESUPPOSED.keys() <= PAGES.keys()


@pytest.mark.long
def test_the_python_of_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "make", "shop", "--out", "orders.csv", "--customers", "200"]) == 0
    assert main(["data", "import", "orders.csv", "--name", "shop"]) == 0
    names: dict[str, Any] = {}
    *typed, _ = python_of_tutorial()
    for block in typed:
        smaller = block.replace("bench(shop)", 'bench(shop, models=["next-item"])')
        exec(re.sub(r"shop(, model=.*)?\)$", r"shop\1, train={'max_steps': 2})", smaller, flags=re.MULTILINE), names)
    assert "next-item" in set(names["table"]["name"])
    assert "NDCG@10" in capsys.readouterr().out
