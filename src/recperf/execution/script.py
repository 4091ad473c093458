"""Profiles a program that is not changed: it runs as __main__ in this process, and hooks tell its steps and waits.

The end of an optimizer's step is the end of a step, and iterating a torch DataLoader is a wait for input. Functions of
the program can be named for both.
"""

from __future__ import annotations

import ast
import builtins
import gc
import sys
import tokenize
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from importlib.machinery import SourceFileLoader
from multiprocessing import active_children
from pathlib import Path
from time import monotonic, process_time
from types import ModuleType
from typing import Any

import torch

from ..errors import MachineError, UsageError
from ..measure.learning_records import LearningReport
from ..measure.limits import memory_sentence
from ..measure.memory import at_failure, is_out_of_memory
from ..measure.places import USER, Stacks
from ..measure.records import StepMemory
from ..runs.step_report import Report
from .learning import Watch
from .memory_advice import advise_on_memory
from .program_hooks import Hooks, ProgramStopped, Wrap, patched, patched_function, patched_path
from .rank_profiles import COUNTS, Meeting, RankFile, SampledRank, of_children, together, world_size
from .side_effects import SideEffects
from .source_rules import advise_on_sources
from .started_processes import StartedProcesses
from .step_profile import Evidence, Profiler

MAIN = "__main__:"
RANKS_END_S = 10.0
"""Time for ranks that the program started to end after they have sent what they saw."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class Program:
    """A Python program as it would be started."""

    script: Path
    arguments: tuple[str, ...] = ()
    step_function: str | None = None
    """`module:function` whose return ends a step, instead of an optimizer's step."""
    input_functions: tuple[str, ...] = ()
    """`module:function` that return or yield batches."""
    to_the_end: bool = False
    """Let the program end by itself after enough steps were seen."""
    sources: dict[str, str] = field(default_factory=dict)
    """Texts that take the place of files, by their paths."""
    learning: bool = False
    """Also watch how its models learn."""

    @property
    def profile(self) -> list[str]:
        """The command that profiles it as a further rank, before its arguments."""
        options = [f"--{kind}-function={name}" for kind, name in self.named] + ["--to-the-end"] * self.to_the_end
        command = [sys.executable, "-m", "recperf", "profile", "--script", str(self.script.resolve()), *options]
        return [*command, "--no-try", "--no-peaks", "--no-report", "--quiet", "--"]

    @property
    def named(self) -> list[tuple[str, str]]:
        """The functions that were named, each after its kind: step or input."""
        steps = [] if self.step_function is None else [("step", self.step_function)]
        return steps + [("input", name) for name in self.input_functions]


@dataclass
class ScriptOutcome:
    """How the program ended and what was seen of it."""

    report: Report | None = None
    evidence: Evidence | None = None
    """From which its verdict follows."""
    code: int = 0
    """Exit code of the program; 0 if it was stopped."""
    stopped: bool = False
    cpu_s: float = 0.0
    """CPU time while it ran."""
    wall_s: float = 0.0
    steps: int = 0
    workers: int = 0
    """Of its DataLoaders."""
    effects: list[str] = field(default_factory=list)
    """What it changed outside of its memory."""
    read_input: bool = False
    files: list[Path] = field(default_factory=list)
    """Its own source files, the script first."""
    missing: MachineError | None = None
    """Why there is no report."""
    learning: LearningReport | None = None
    out_of_memory: StepMemory | None = None


def profile_program(program: Program, *, quiet: bool = False, peaks: bool = True) -> ScriptOutcome:
    """Run the program until it is clear what limits its steps; its own errors are printed as Python prints them."""
    profiler, effects, imported = Profiler(quiet=quiet, peaks=peaks), SideEffects(), set(sys.modules)
    script = program.script.resolve()
    meeting, started = Meeting(script, program.profile), StartedProcesses()
    profiler.counts = COUNTS if world_size() > 1 else None
    profiler.child_kind = SampledRank

    def joined() -> None:
        if meeting.size > 1 and profiler.counts is None:
            profiler.counts = COUNTS
            profiler.restart()

    outcome, hooks = run_program(program, profiler, effects, meeting.watched(joined))
    ended_early = outcome.stopped or outcome.code == INTERRUPTED
    if ended_early and meeting.size == 1:
        started.end()
    outcome.effects, outcome.read_input = effects.seen, effects.read_input
    names = (getattr(sys.modules[name], "__file__", None) for name in sys.modules.keys() - imported)
    own = {Path(name).resolve() for name in names if name and Stacks().file(name)[0] == USER}
    outcome.files = [script, *sorted(one for one in own if one.suffix == ".py")]
    _conclude(program, profiler, hooks, outcome, meeting)
    if ended_early and meeting.size > 1:
        # A launcher that sees a rank fail ends all others.
        started.end(patience=RANKS_END_S)
    # What the first rank shows is the report of all.
    if outcome.report is not None and not meeting.rank:
        advise_on_sources(outcome.report, outcome.files)
        advise_on_memory(outcome.report, outcome.files)
    return outcome


def run_program(
    program: Program, profiler: Profiler, effects: SideEffects, around: AbstractContextManager[None] | None = None
) -> tuple[ScriptOutcome, Hooks]:
    """Run the program until the profiler has seen enough of its steps."""
    code = _compiled(program)
    outcome = ScriptOutcome()
    profiler.__enter__()
    # Also where the program fails; no report is built.
    with closing(profiler):
        began, began_cpu = monotonic(), process_time()
        hooks = Hooks(profiler, to_the_end=program.to_the_end, ends_by_optimizer=program.step_function is None)
        if program.sources:
            hooks.enter_context(patched(SourceFileLoader, "get_code", _replaced(program.sources)))
        watch = Watch(lambda: hooks.roots(vars(sys.modules["__main__"])), None) if program.learning else None
        with hooks, around or nullcontext(), _as_main(program) as module, effects, watch or nullcontext():
            outcome.code, outcome.stopped = _run(program, code, module, hooks, outcome)
        del module
        outcome.learning = watch.report() if watch else None
        if active_children():
            # Iterators of loaders that are not referenced any more end their worker processes.
            gc.collect()
        outcome.wall_s, outcome.cpu_s = monotonic() - began, process_time() - began_cpu
        outcome.steps, outcome.workers = hooks.steps_seen, hooks.workers
    return outcome, hooks


def _conclude(program: Program, profiler: Profiler, hooks: Hooks, outcome: ScriptOutcome, meeting: Meeting) -> None:
    if ranks := of_children(profiler):
        outcome.report = together(ranks)
        outcome.report.program = {"script": str(program.script), "arguments": list(program.arguments)}
        return
    seen, observer = hooks.steps_seen, profiler.observer
    ends = f"calls of {program.step_function}" if program.step_function else "steps of a torch optimizer"
    if not observer.plain:
        count = f"only {seen}" if seen else "no"
        if outcome.out_of_memory is not None:
            outcome.missing = MachineError(memory_sentence(outcome.out_of_memory), where={"script": program.script})
            return
        findings = outcome.learning.findings if outcome.learning else []
        outcome.missing = MachineError(
            f"{count} {ends} were seen in this process; about 8 are needed",
            where={"script": program.script, **({"learning": findings[0].sentence} if findings else {})},
            fix="a longer run"
            if seen
            else "--step-function module:name names the function that is one step of the program",
        )
        return
    report = profiler.build()
    report.program = {"script": str(program.script), "arguments": list(program.arguments)}
    report.notes += hooks.notes()
    report.learning = outcome.learning
    own = report.own_cpu_s
    beside = max(1e-9, outcome.cpu_s - profiler.observer.cost.ns / 1e9)
    report.notes.append(
        f"profiling took {own:.1f} s of CPU time, {own / beside:.0%} of the {beside:.1f} s that the program used"
    )
    if outcome.stopped:
        report.notes.append(f"the program was stopped after {seen:,} steps; --to-the-end lets it run")
    outcome.evidence = profiler.evidence
    if outcome.out_of_memory is not None:
        report.memory.insert(0, outcome.out_of_memory)
    if meeting.size > 1:
        ranks = meeting.gather(RankFile.of(meeting.rank, meeting.size, report, profiler))
        report = together(ranks) if ranks else report
    outcome.report = report


def _run(program: Program, code: Any, module: ModuleType, hooks: Hooks, outcome: ScriptOutcome) -> tuple[int, bool]:
    """The program's exit code, and whether it was stopped."""
    wraps: dict[str, Wrap] = {"step": hooks.steps, "input": hooks.inputs}
    inside = [(name.removeprefix(MAIN), wraps[kind]) for kind, name in program.named if name.startswith(MAIN)]
    try:
        for kind, name in program.named:
            if not name.startswith(MAIN):
                hooks.enter_context(patched_function(name, wraps[kind]))
        exec(code, module.__dict__, _Hooked(module, inside, hooks) if inside else None)
    except ProgramStopped:
        return 0, True
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0, hooks.stops > 0
        print(exit.code, file=sys.stderr)
        return 1, False
    except UsageError:
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            outcome.out_of_memory = at_failure(error, Stacks())
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(program.script):
            own = own.tb_next
        traceback.print_exception(type(error), error, own or error.__traceback__)
        return (INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1), False
    return 0, hooks.stops == 1


@contextmanager
def _as_main(program: Program) -> Iterator[ModuleType]:
    """What Python sets up before it runs a script."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=str(program.script), __builtins__=builtins, __spec__=None, __package__=None, __cached__=None
    )
    before = sys.modules["__main__"], sys.argv, sys.path[:]
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    sys.modules["__main__"] = module
    sys.argv = [str(program.script), *program.arguments]
    sys.path.insert(0, str(program.script.resolve().parent))
    try:
        yield module
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before
        torch.set_grad_enabled(True)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def _compiled(program: Program) -> Any:
    """The program's code, which must define the functions of __main__ that were named."""
    try:
        source = program.sources.get(str(program.script.resolve()))
        if source is None:
            with tokenize.open(program.script) as file:
                source = file.read()
        tree = ast.parse(source, str(program.script))
    except OSError as error:
        raise UsageError(f"cannot read the program: {error.strerror}", where={"script": program.script}) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"the program is not valid Python: {error}", where={"script": program.script}) from None
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for kind, name in program.named:
        module, _, function = name.partition(":")
        if not module or not function:
            raise UsageError(f"--{kind}-function is {name!r}; it must be module:function, or __main__:function")
        if module == "__main__" and not defined.issuperset(function.split(".")):
            raise UsageError(f"the program defines no {function!r}", where={"script": program.script})
    return compile(tree, str(program.script), "exec", dont_inherit=True)


def _replaced(sources: dict[str, str]) -> Wrap:
    """Let modules be imported from these texts."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_code(loader: SourceFileLoader, name: str) -> Any:
            path = loader.get_filename(name)
            source = sources.get(str(Path(path).resolve()))
            return original(loader, name) if source is None else compile(source, path, "exec", dont_inherit=True)

        return get_code

    return wrap


class _Hooked(UserDict[str, Any]):
    """The names of a program while it runs: functions that were named pass through their hooks once defined."""

    def __init__(self, module: ModuleType, named: list[tuple[str, Wrap]], hooks: Hooks) -> None:
        self.data, self.module, self.named, self.hooks = module.__dict__, module, named, hooks

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        for path, wrap in self.named:
            if path.partition(".")[0] == name:
                self.hooks.enter_context(patched_path(self.module, path, wrap))
