"""recperf profile --script on small imitations of the loops that people write; times are short, ceilings not used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from recperf.cli import main
from recperf.errors import UsageError
from recperf.execution.program_hooks import Cycle
from recperf.execution.script import Program, ScriptOutcome, profile_program
from recperf.measure import schedule
from recperf.measure.records import ObservedSteps
from recperf.runs.step_report import Report

START = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, index):
        return torch.full((8,), index / 640)

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
PLAIN = """
for x in DataLoader(Rows(), 4):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
Profile = Callable[..., ScriptOutcome]


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """Profile a program; the class of the optimizer is restored afterwards."""
    # These programs are too short for the samples that places want.
    monkeypatch.setattr(schedule, "SAMPLES", 0)

    def call(loop: str, *arguments: str, **options: Any) -> ScriptOutcome:
        script = tmp_path / "train.py"
        main = 'if __name__ == "__main__":\n' + indent(dedent(loop).strip(), "    ") + "\n"
        script.write_text(START + (dedent(loop) if options.pop("plainly", False) else main))
        step = torch.optim.SGD.step
        outcome = profile_program(Program(script, arguments, **options), quiet=True, peaks=False)
        assert torch.optim.SGD.step is step or not hasattr(torch.optim.SGD.step, "recperf")
        assert sys.modules["__main__"].__dict__.get("Rows") is None
        return outcome

    return call


def content(outcome: ScriptOutcome) -> Report:
    assert outcome.report is not None, outcome.missing
    return outcome.report


LOOPS = {
    "plain": (PLAIN, "SGD"),
    "gradient accumulation": (
        """
        for index, x in enumerate(DataLoader(Rows(), 2)):
            model(x).mean().backward()
            if index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        """,
        "SGD",
    ),
    "one optimizer steps more often": (
        """
        other = torch.optim.Adam(model.parameters())
        for index, x in enumerate(DataLoader(Rows(), 2)):
            model(x).mean().backward()
            optimizer.step()
            if index % 3 == 2:
                other.step()
        """,
        "Adam",
    ),
    "a scaler that leaves out steps": (
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for index, x in enumerate(DataLoader(Rows(), 4)):
            scaler.scale(model(x).mean() * (float("inf") if index % 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
        "SGD",
    ),
    "a closure, as Lightning has it, after a check of the validation": (
        """
        class Wrapped(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        validation, optimizer = DataLoader(Rows(), 320), Wrapped(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for x in validation:
            model(x)
        def closure():
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            return loss
        for x in DataLoader(Rows(), 4):
            optimizer.step(closure=closure)
            scheduler.step()
        """,
        "Wrapped",
    ),
    "a loader in a loader and a wrapped optimizer, as Hugging Face's": (
        """
        class Shard(DataLoader):
            def __iter__(self):
                ahead = None
                for batch in super().__iter__():
                    if ahead is not None:
                        yield ahead
                    ahead = batch
        class Accelerated(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer
            def step(self, closure=None):
                self.optimizer.step(closure)
        optimizer = Accelerated(optimizer)
        for x in Shard(Rows(), 4):
            model(x).mean().backward()
            optimizer.step()
        """,
        "SGD",
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_people_write(profile: Profile, name: str) -> None:
    loop, optimizer = LOOPS[name]
    outcome = profile(loop)
    seen = content(outcome)
    assert outcome.stopped
    assert outcome.code == 0
    assert f"a step ends with the step of {optimizer}" in seen.notes
    assert any(text.startswith("profiling took ") and "of CPU time" in text for text in seen.notes)
    assert sum(seen.shares.values()) == pytest.approx(1)
    assert 0 <= seen.shares["input"] < 1
    assert 1 <= seen.steps.traced <= 4, "fewer on a busy machine"
    assert seen.steps.counted == 3
    # Every step has the same operators: its ends are where the period is.
    calls = {"one optimizer steps more often": 3, "gradient accumulation": 4}.get(name, 1)
    products = [row for row in seen.operators if row.name == "aten::addmm"]
    assert sum(row.calls for row in products) == 2 * calls
    assert {row.part for row in products} == {"0", "2"}


def test_batches_from_worker_processes(profile: Profile) -> None:
    outcome = profile(PLAIN.replace("4)", "4, num_workers=1)"))
    notes = content(outcome).notes
    assert "batches come from 1 worker processes" in notes
    assert not torch.multiprocessing.active_children()


def test_steps_with_an_evaluation_are_left_out(profile: Profile) -> None:
    loop = """
    evaluation = DataLoader(Rows(), 64)
    for index, x in enumerate(DataLoader(Rows(), 4)):
        if index % 7 == 6:
            for y in evaluation:
                model(y)
        model(x).mean().backward()
        optimizer.step()
    """
    seen = content(profile(loop))
    products = [row.calls for row in seen.operators if row.name == "aten::addmm"]
    assert products == [1, 1]
    (note,) = [text for text in seen.notes if "as an evaluation does" in text]
    assert int(note.rpartition(" ")[2]) >= 2


def test_few_steps_are_enough(profile: Profile) -> None:
    seen = content(profile(PLAIN.replace("4)", "80)")))
    assert seen.steps == ObservedSteps(8, 2, 1, 2)
    assert seen.operators


def test_a_loop_in_a_thread_may_end_while_its_operators_are_counted(profile: Profile) -> None:
    loop = """
    import threading
    def train():
        for x in DataLoader(Rows(), 92):
            model(x).mean().backward()
            optimizer.step()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    """
    seen = content(profile(loop, plainly=True))
    assert seen.steps == ObservedSteps(6, 2, 1, 1)
    assert seen.operators
    assert not is_in_torch_dispatch_mode()


@pytest.mark.parametrize(
    "names",
    [
        {"step_function": "__main__:update", "input_functions": ("__main__:batches",)},
        {"step_function": "__main__:Trainer.update"},
        {"step_function": "steps_of_theirs:update"},
    ],
)
def test_functions_of_the_program(
    profile: Profile, tmp_path: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    monkeypatch.delitem(sys.modules, "steps_of_theirs", raising=False)
    (tmp_path / "steps_of_theirs.py").write_text("def update(call, x):\n    call(x)\n")
    loop = """
    from steps_of_theirs import update as theirs
    def batches():
        for _ in range(60):
            time.sleep(0.01)
            yield torch.rand(4, 8)
    class Trainer:
        @staticmethod
        def update(x):
            model(x).mean().backward()
    def update(x):
        theirs(Trainer.update, x)
    for x in batches():
        update(x)
    """
    seen = content(profile(loop, plainly=True, **names))
    assert "a step ends with the return of update" in seen.notes
    if "input_functions" in names:
        assert seen.verdict.limit == "input"
    else:
        assert any("no torch DataLoader was iterated" in note for note in seen.notes)
        assert seen.shares["input"] == 0


def test_what_cannot_be_hooked_is_refused(profile: Profile) -> None:
    for name, message in {
        "__main__:absent": "the program defines no 'absent'",
        "update": "--step-function is 'update'; it must be module:function, or __main__:function",
        "json:absent": "json has no 'absent'",
        "absent_module:x": "cannot import absent_module: No module named 'absent_module'",
    }.items():
        with pytest.raises(UsageError) as caught:
            profile(PLAIN, step_function=name)
        assert caught.value.what == message


def test_how_the_program_ends(profile: Profile, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = profile("sys.exit(int(sys.argv[1]))", "7")
    assert (outcome.code, outcome.report) == (7, None)
    assert outcome.missing is not None
    assert outcome.missing.what.startswith("no steps of a torch optimizer were seen")
    assert "--step-function" in str(outcome.missing.fix)
    outcome = profile(PLAIN + '    if x[0, 0] > 0.04: raise ValueError("planned")\n')
    assert outcome.code == 1
    assert content(outcome).steps.seen == 8
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1
    assert "train.py" in err.splitlines()[1]
    assert err.endswith("ValueError: planned\n")
    outcome = profile(f"try:\n{indent(PLAIN, '    ')}\nfinally:\n    print('left')", to_the_end=False)
    assert outcome.stopped
    assert capfd.readouterr().out == "left\n"


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(START + "print('theirs', sys.argv[1:])" + PLAIN)
    assert main(["profile", "--script", "train.py", "--json", "--no-peaks", "--", "--json", "3"]) == 0
    printed = capfd.readouterr()
    profile = json.loads(printed.out)
    assert "theirs ['--json', '3']" in printed.err
    assert profile["program"] == {"script": "train.py", "arguments": ["--json", "3"]}
    (saved,) = Path("runs").glob("script-profile-*/profile.json")
    assert json.loads(saved.read_text()) == profile
    assert saved.with_name("profile.html").exists()
    again = ["profile", "--script=train.py", "--no-peaks", "--quiet", "--run-dir", "a", "--no-report"]
    assert main(again) == 0
    assert sorted(path.name for path in Path("a").iterdir()) == [".profile", "profile.json", "stacks.folded"]
    assert len(list(Path("runs").iterdir())) == 1
    assert main(again) == 2
    assert "already holds a profile" in capfd.readouterr().err


def test_which_optimizer_ends_a_step() -> None:
    def ends(order: str) -> str:
        cycle = Cycle()
        return " ".join(letter for letter in order if cycle.ends(ord(letter)))

    assert ends("abcabcabc") == "a a a"
    assert ends("aabaabaab") == "a a b b b"
    # Another one begins to step as well, or the first does not step any more.
    assert ends("aaa" + "ab" * 3) == "a a a a b b b"
    assert ends("aa" + "b" * 12) == "a a b b b b b b b b b b b b"
