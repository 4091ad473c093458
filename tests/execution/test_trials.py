"""Advice that is tried: what is measured, which programs do not run again, and that nothing of the user's changes."""

from __future__ import annotations

import math
import socket
import sys
from io import StringIO
from pathlib import Path
from textwrap import dedent, indent
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import recperf
from recperf.cli import main
from recperf.execution import source_rules, step_profile, trial_search, trials
from recperf.execution.script import Program, ScriptOutcome
from recperf.execution.script_experiments import confirm
from recperf.execution.step_profile import Evidence
from recperf.execution.trial_search import ALL, Compared, NotTried, interval
from recperf.execution.trials import Run, Trials
from recperf.measure import advice_rules, schedule
from recperf.measure.ceilings import Ceilings
from recperf.measure.program_records import LoaderFacts, ProgramFacts
from recperf.measure.records import Advice, Observed, Operator, Percentiles

LOOP = """
import sys, time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 800
    def __getitem__(self, row):
        return torch.full((4,), row / 800)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if __name__ == "__main__":
    for step, x in enumerate(DataLoader(Rows(), 4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
ADVICE = Advice("threads", "Seen.", "torch.set_num_threads(1)", predicted_gain=1.5, settings={"threads": 1})


def program(tmp_path: Path, inside: str = "", before: str = "", after: str = "") -> Program:
    """The loop with further lines."""
    loop = LOOP.replace("model =", dedent(before) + "\nmodel =") + indent(dedent(inside), " " * 8)
    script = tmp_path / "train.py"
    script.write_text(loop + indent(dedent(after), " " * 4))
    return Program(script)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every profile is short and advises one thread."""
    monkeypatch.setattr(schedule, "PLAIN_SECONDS", 0.01)
    monkeypatch.setattr(advice_rules, "RULES", (lambda evidence: replace(ADVICE),))
    monkeypatch.setattr(source_rules, "RULES", ())
    monkeypatch.setattr(sys, "stdin", StringIO("input"))
    monkeypatch.chdir(tmp_path)


def test_the_interval_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert high - 2.5 == pytest.approx(3.182 * math.sqrt(5 / 3) / 2, rel=0.01)
    assert low + high == pytest.approx(5.0)


def tried(monkeypatch: pytest.MonkeyPatch, results: dict[str, Any], advice: list[Advice], repeats: float = 0.0) -> None:
    """Trials whose measurements are these, by the names of the settings together."""

    def compare(self: Trials, settings: dict[str, Any], deadline: float, most: int) -> Compared:
        self.repeats = repeats
        result = results[" ".join(sorted(settings))]
        if isinstance(result, Exception):
            raise result
        gain, losses = result
        return Compared(gain, [gain - 0.05, gain + 0.05], 1.0, trials._differs([1.0, 2.0], losses))

    monkeypatch.setattr(Trials, "compare", compare)
    Trials(Program(Path("a.py")), ScriptOutcome(), Path("."), 60.0, False).try_each(advice, lambda text: None)


def test_what_gains_is_tried_together_and_the_rest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("zero_grad", "optimizer", "pinned", "sparse", "tf32")
    advice = [Advice(name, "", f"{name}!", settings={name: 1}) for name in names] + [Advice("batch", "", "batch!")]
    advice[3].change = "torch.optim.SparseAdam([weight])"
    results = {
        "zero_grad": (1.2, [1.0, 2.0]), "optimizer": (1.4, [1.0, 2.00001]), "pinned": (1.02, [1.0, 2.0]),
        "sparse": (1.3, [1.0, 2.1]), "tf32": NotTried("RuntimeError: no such device"),
        "optimizer sparse zero_grad": (2.0, [1.0, 2.1]),
    }  # fmt: skip
    tried(monkeypatch, results, advice)
    by_name = {one.name: one for one in advice}
    assert [one.name for one in advice if one.status == "tried"] == [ALL, "optimizer", "sparse", "zero_grad"]
    assert by_name["pinned"].status == "no gain"
    assert (by_name["tf32"].status, by_name["tf32"].note) == ("not tried", "RuntimeError: no such device")
    assert (by_name["batch"].status, by_name["batch"].note) == ("not tried", "only its author can make this change")
    assert by_name["zero_grad"].note == "losses are equal; measured in one run"
    assert by_name["optimizer"].note == "losses are within tolerance (5e-06); measured in one run"
    assert str(by_name["sparse"].note).startswith("losses are different (0.05); it changes the results: SparseAdam")


def test_experiments_of_a_program_are_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits for its input for 60 of 100 ms, on 4 threads."""
    operator = Operator("aten::mm", None, "product", 1, 1, ms=40.0)
    waits = {"input": 60.0, "python": 0.0, "blocked": 0.0, "communication": 0.0}
    seen = Observed("cpu", 4, Percentiles(99, 100, 101), waits, [operator])
    report: Any = SimpleNamespace(program_facts=ProgramFacts(loader=LoaderFacts(0, False)), places=[])
    for gain, outcome in ((2.5, "agrees"), (1.0, "disagrees"), (NotTried("why"), "not run")):

        def compare(self: Trials, settings: dict[str, Any], deadline: float, most: int, gain: Any = gain) -> Compared:
            assert settings == {"replay": True}
            if isinstance(gain, Exception):
                raise gain
            return Compared(gain, [gain - 0.01, gain + 0.01], 1.0, None)

        monkeypatch.setattr(Trials, "compare", compare)
        report.verdict = None
        ran = ScriptOutcome(evidence=Evidence(seen, None, None))
        trials_of = Trials(Program(Path("a.py")), ran, Path("."), math.inf, False)
        ran.report = report
        confirm(trials_of, ran, lambda text: None)
        (row,) = report.experiments
        assert row.outcome == outcome
        assert (report.verdict is None) == (outcome == "not run")
        if outcome == "disagrees":
            assert any("disagrees" in doubt for doubt in report.verdict.doubts)


def test_the_interval_covers_what_separates_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of a run agree within a thousandth; runs differ by a fifth."""
    levels = {"zero_grad": [2.0, 1.6, 2.1, 1.7], "pinned": [1.2], "optimizer": [2.9]}

    def run(self: Trials, settings: dict[str, Any], deadline: float, most: int) -> Run:
        gains = levels[next(name for name in levels if name in settings)]
        asked.append(settings)
        gain = gains[len(asked) % len(gains)]
        return Run([math.log(gain * (1 + turn / 4000)) for turn in range(4)], 1.0, None)

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(Trials, "_run", run)
    advice = [Advice(name, "", "", settings={name: True}) for name in ("zero_grad", "pinned")]
    Trials(Program(Path("a.py")), ScriptOutcome(), Path("."), math.inf, False).try_each(advice, lambda text: None)
    first = advice[0]
    assert first.measured_range is not None
    assert first.measured_range[0] < 1.6 < 2.1 < first.measured_range[1]
    # One run of 1.2 is within what separates runs.
    (single,) = (one for one in advice if one.name == "pinned")
    assert single.status == "no gain"
    late = Trials(Program(Path("a.py")), ScriptOutcome(), Path("."), math.inf, False)
    few = late.compare({"optimizer": 1}, monotonic())
    assert (few.between, few.range[1] < 2.91) == (None, True)


def test_a_change_that_should_keep_the_losses_and_does_not_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected, unknown = (Advice("fused", "", "", settings={"optimizer": "fused"}) for _ in range(2))
    tried(monkeypatch, {"optimizer": (1.5, [1.0, 2.1])}, [rejected])
    assert rejected.status == "rejected"
    tried(monkeypatch, {"optimizer": (1.5, [1.0, 2.1])}, [unknown], repeats=0.1)
    assert (unknown.status, unknown.same_losses) == ("tried", None)
    assert "cannot be compared" in str(unknown.note)
    narrow = Advice("float64", "", "", settings={"optimizer": "fused"}, changes="the results")
    tried(monkeypatch, {"optimizer": (1.5, [1.0, math.nan])}, [narrow])
    assert narrow.status == "rejected"
    assert str(narrow.note).startswith("losses become NaN or infinite; it changes the results")


@pytest.mark.parametrize(
    ("outcome", "variable", "free", "problem"),
    [
        ({}, "", 1 << 60, None),
        ({}, "SLURM_JOB_ID", 1 << 60, "no program runs again under SLURM or torchrun"),
        ({"code": 3}, "", 1 << 60, "the program ended with exit code 3"),
        ({}, "", 1 << 20, "the memory does not hold 3 more of the program"),
    ],
)
def test_why_a_program_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any], variable: str, free: int, problem: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(trials, "available_bytes", lambda: free)
    assert trials.why_not(ScriptOutcome(**outcome), anywhere=False) == problem
    written = ScriptOutcome(**outcome, effects=["writes a (b.py:1)"])
    assert trials.why_not(written, anywhere=True) == problem


def test_the_time_for_trials_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Trials(Program(Path("a.py")), ScriptOutcome(), Path("."), 60.0, False)
    late.began -= 61
    one = Advice("threads", "", "", settings={"threads": 1})
    assert not late.try_one(one, lambda text: None)
    assert (one.status, one.note) == ("not tried", "the time for trials, 60 s, was over")


APPENDS = "with open('log.txt', 'a') as log: log.write('step\\n')"
OVERWRITES = "torch.save(model.state_dict(), 'ckpt.pt')"
DELETES = "if step == 3:\n    import shutil\n    shutil.rmtree('cache', ignore_errors=True)"
WORKER = "loader = DataLoader(Rows(), 4, num_workers=1)"


@pytest.mark.parametrize(
    ("inside", "effect"),
    [
        (APPENDS, "writes log.txt (train.py:"),
        (OVERWRITES, "writes ckpt.pt (train.py:"),
        (DELETES, "removes cache (train.py:"),
        ("Path('one').rename('two') if step == 2 else None", "renames one (train.py:"),
        ("if step == 2: import subprocess; subprocess.run(['true'])", "starts true (train.py:"),
        ("step == 2 and sys.stdin.read()", "the program read its standard input"),
        ("if step == 2: next(iter(DataLoader(Writing(), 4, num_workers=1)))", "writes seen.txt (train.py:"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("advised")
def test_a_program_that_changes_something_does_not_run_again(
    tmp_path: Path, inside: str, effect: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("one").touch()
    Path("cache").mkdir()
    Path("cache", "rows").touch()
    writing = """
    class Writing(Rows):
        def __getitem__(self, row):
            Path('seen.txt').write_text('x')
            return super().__getitem__(row)
    """
    program(tmp_path, inside, writing)
    assert main(["profile", "--script", "train.py", "--no-peaks", "--run-dir", "profile", "--no-report"]) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert f"1.50x predicted; not tried: {effect if 'input' in effect else 'the program ' + effect}" in printed
    assert ("--try-fixes runs it again" in printed) == ("input" not in effect)
    (one,) = recperf.load("profile/profile.json").advice
    assert one.status == "not tried"


@pytest.mark.usefixtures("advised")
def test_a_program_that_posts_to_a_local_server_does_not_run_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        posts = "if step == 2:\n    import socket\n    socket.create_connection(('127.0.0.1', {})).close()"
        program(tmp_path, posts.format(server.getsockname()[1]))
        assert main(["profile", "--script", "train.py", "--no-peaks", "--quiet", "--run-dir", "p", "--no-report"]) == 0
        server.settimeout(0)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()
    (one,) = recperf.load("p/profile.json").advice
    assert str(one.note).startswith("the program connects to 127.0.0.1:")


HARMLESS = """
import tempfile
if step == 2:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, f'{folder}/model.pt')
        Path(folder, 'a').write_text('x')
        Path(folder, 'a').rename(f'{folder}/b')
    with tempfile.TemporaryFile() as one, open('train.py') as two, open('/dev/null', 'w') as three:
        one.write(b'x')
    next(iter(DataLoader(Rows(), 4, num_workers=1)))
"""


@pytest.mark.usefixtures("advised")
def test_temporary_files_and_workers_are_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, HARMLESS)
    asked: list[ScriptOutcome] = []

    def try_each(self: Trials, advice: list[Advice], say: Any) -> None:
        asked.append(self.outcome)

    monkeypatch.setattr(Trials, "try_each", try_each)
    assert main(["profile", "--script", "train.py", "--no-peaks", "--quiet", "--run-dir", "p", "--no-report"]) == 0
    assert [outcome.effects for outcome in asked] == [[]], recperf.load("p/profile.json").advice
    for option in ("--no-try", "--try-for=3"):
        assert main(["profile", "--script", "train.py", "--no-peaks", "--quiet", "--run-dir", option[2:], option]) == 0
    assert len(asked) == 2


def compared(program: Program, folder: Path, steps: int) -> Compared:
    outcome = ScriptOutcome(steps=steps, wall_s=1.0)
    with Trials(program, outcome, folder, math.inf, False) as unlimited:
        return unlimited.compare({"threads": 1}, monotonic() + 300, most=5)


@pytest.mark.slow
def test_a_trial_measures_a_gain_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that sleeps five times as long with two threads; C++ that writes a file is stopped by the kernel."""
    monkeypatch.setattr(trials, "TURN_NS", 0.1e9)
    inside = f"""
    time.sleep(0.05 if torch.get_num_threads() > 1 else 0.01)
    if step == 2:
        try:
            torch._C.PyTorchFileWriter({str(tmp_path / "ckpt.pt")!r})
        except Exception:
            pass
    if step == 60:
        open({str(tmp_path / "log.txt")!r}, "a")
    """
    (tmp_path / "trials").mkdir()
    made = program(tmp_path, inside, "torch.set_num_threads(2)")
    result = compared(made, tmp_path / "trials", 200)
    assert result.range[0] > 1
    assert result.gain > 1.5
    assert result.differs == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "trials"]


@pytest.mark.long
def test_a_patch_holds_what_gains_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = program(tmp_path, "time.sleep(0.03 if torch.get_num_threads() > 1 else 0.01)", "torch.set_num_threads(2)")
    monkeypatch.chdir(tmp_path)
    outcome = ScriptOutcome(steps=200, wall_s=1.0, files=[made.script])
    one = Advice("threads", "", "", settings={"threads": 1, "keep_memory": {}}, status="tried")
    said: list[str] = []
    advice = [one]
    with Trials(made, outcome, tmp_path, math.inf, False) as unlimited:
        unlimited.write_patch(tmp_path / "a.patch", advice, said.append)
    assert said[0].endswith("no place for it: keep_memory")
    assert "-torch.set_num_threads(2)\n+torch.set_num_threads(1)\n" in Path("a.patch").read_text()
    assert (advice[-1].name, advice[-1].status, advice[-1].same_losses) == ("patch", "tried", True)
    assert "set_num_threads(2)" in made.script.read_text()


@pytest.mark.long
def test_programs_on_a_gpu_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "cuda_used", lambda: True)
    forked = "import os\nif os.getpgid(0) != os.getsid(0): raise SystemExit(3)"
    assert compared(program(tmp_path, forked), tmp_path, 200).differs == 0


@pytest.mark.long
def test_a_trial_that_would_write_or_fails_says_so(tmp_path: Path) -> None:
    for inside, problem in (
        ("if step == 2: open('log.txt', 'a')", "writes log.txt"),
        ("if step == 3: raise ValueError('planned')", "ValueError: planned"),
        ("if step == 11: break", "ends after 12 steps"),
    ):
        with pytest.raises(NotTried, match=problem):
            compared(program(tmp_path, inside), tmp_path, 200)
    assert not Path("log.txt").exists()


CEILINGS = Ceilings(
    device="cpu", threads=2, flops={"float32": 1e11}, stream=20e9, first_touch=2e9, cached=60e9,
    cache_bytes=8_000_000, stream_cache_bytes=8_000_000, largest_cache=8_000_000,
    rows_memory=((64, 100.0), (1024, 300.0)), rows_cache=((64, 5.0), (1024, 20.0)),
    calls={"elementwise": 1000.0, "index": 2000.0},
)  # fmt: skip
FACTORS = """
import torch
from torch import nn
torch.manual_seed(0)

class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(100_000, 32), nn.Embedding(100_000, 32)

    def forward(self, users, items):
        return (self.user(users) * self.item(items)).sum(1)

model = Factors()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(400):
    users, items = torch.randint(100_000, (2, 64))
    loss = (model(users, items) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_program_with_a_dense_optimizer_over_its_tables_is_told_so_and_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_profile.machine_peaks, "require", lambda *_: None)
    monkeypatch.setattr(step_profile, "ceilings_of", lambda *_, **__: CEILINGS)
    monkeypatch.setattr(advice_rules, "RULES", (advice_rules.dense_table,))
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(FACTORS)
    assert main(["profile", "--script", str(script), "--try-for", "300", "--verbose", "--run-dir", str(folder)]) == 0
    (advice,) = recperf.load(folder / "profile.json").advice
    assert "of 2 tables, but Adam" in advice.seen
    assert "rows = torch.optim.SparseAdam([user.weight, item.weight], lr=0.01)" in advice.change
    assert (advice.predicted_gain or 0) > 1
    assert (advice.measured_gain or 0) > 1
    assert advice.same_losses is not None
    printed = capfd.readouterr().out
    assert "What to change" in printed
    assert "sparse=True" in printed


@pytest.mark.usefixtures("advised")
def test_where_a_patch_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program(tmp_path)
    Path("mine.diff").write_text("mine")
    for options, problem in (
        (["--patch", "a.patch", "--no-try"], "a patch holds changes that were tried"),
        (["--patch", "a.txt"], "does not end in .patch or .diff"),
        (["--patch", "mine.diff"], "mine.diff"),
    ):
        assert main(["profile", "--script", "train.py", *options]) in (2, 3)
        assert problem in capfd.readouterr().err


@pytest.mark.parametrize(
    ("now", "gains", "expected"),
    [
        # By workers and threads: it gets better up to 2, and with one thread. No workers are the unchanged program.
        (0, {(1, 0): 1.3, (2, 0): 1.5, (4, 0): 1.4, (2, 1): 1.9}, {"workers": 2, "threads": 1}),
        # No number upwards is better, but none at all is, and the threads stay.
        (4, {(1, 0): 1.3, (2, 0): 1.2, (0, 0): 1.6, (0, 1): 1.5}, {"workers": 0}),
        # Nothing gains.
        (8, {(1, 0): 0.9, (2, 0): 0.8, (0, 0): 0.7, (1, 1): 0.9}, {"workers": 1}),
    ],
)
def test_numbers_are_searched(
    monkeypatch: pytest.MonkeyPatch, now: int, gains: dict[tuple[int, int], float], expected: dict[str, int]
) -> None:
    asked: list[dict[str, Any]] = []

    def compare(self: Trials, settings: dict[str, Any], deadline: float, most: int) -> Compared:
        asked.append(settings)
        gain = gains[settings["workers"], settings.get("threads", 0)]
        return Compared(gain, [gain - 0.01, gain + 0.01], 1.0, None)

    monkeypatch.setattr(Trials, "compare", compare)
    monkeypatch.setattr(trial_search, "usable_cores", lambda: 8)
    monkeypatch.setattr(trial_search.torch, "get_num_threads", lambda: 8)
    one = Advice("workers", "", "DataLoader(..., num_workers=1)", settings={"workers": 1})
    searched = Trials(Program(Path("a.py")), ScriptOutcome(workers=now), Path("."), math.inf, False)
    searched.try_each([one], lambda text: None)
    assert one.settings == expected
    gained = max(gains.values()) > 1
    assert one.status == ("tried" if gained else "no gain")
    # The best one again, at more length.
    assert len(asked) == len(gains) + gained
    assert not gained or asked[-1] == expected
    assert ("torch.set_num_threads(1)" in one.change) == ("threads" in expected)


def test_larger_batches_are_searched_by_samples_and_stay_out_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compare(self: Trials, settings: dict[str, Any], deadline: float, most: int) -> Compared:
        asked.append(settings)
        gain = {8: 0.9, 16: 0.8, 32: 0.3}.get(settings.get("batch_size", 0), 1.1)
        return Compared(gain, [gain - 0.01, gain + 0.01], 1.0, 0.5)

    monkeypatch.setattr(Trials, "compare", compare)
    batch = Advice("batch", "", "DataLoader(..., batch_size=8)", settings={"batch_size": 8})
    others = [Advice(name, "", "", settings={name: True}, changes="x") for name in ("zero_grad", "pinned")]
    searched = Trials(Program(Path("a.py")), ScriptOutcome(), Path("."), math.inf, False)
    searched.batch_size = 4
    advice = [batch, *others]
    searched.try_each(advice, lambda text: None)
    # 8 are 1.8 times as many samples in the same time, 16 are 3.2 times as many, 32 are 2.4 times as many.
    assert (batch.settings, batch.measured_gain) == ({"batch_size": 16}, pytest.approx(3.2))
    assert (batch.status, "learning rate may need tuning" in str(batch.note)) == ("tried", True)
    assert [one.settings for one in advice if one.name == ALL] == [{"zero_grad": True, "pinned": True}]


def test_what_cannot_run_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Advice("threads", "", "", settings={"threads": 4})
    tried(monkeypatch, {"threads": NotTried("it took too long")}, [one])
    assert (one.status, one.note) == ("not tried", "it took too long")
