"""recperf run --resume: what a resumed run may change, and what it refuses by name."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from movielens_files import write_files

from recperf.cli import main
from recperf.runs.contract import check_run
from recperf.runs.evidence import seal
from recperf.runs.resume import FREE

QUIETLY = ["--no-peaks", "--no-report"]
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(call: Call) -> Callable[..., tuple[int, str]]:
    """`recperf run`; the output on both streams is one text."""

    def run(*arguments: str) -> tuple[int, str]:
        code, out, err = call("run", *arguments, *QUIETLY)
        return code, out + err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run of 30 steps that got to its checkpoint at step 20."""
    folder = tmp_path_factory.mktemp("trained")
    arguments = ["run", "micro-dlrm", "--data.path", "data", "--train.epochs", "3", "--train.batch-size", "400"]
    arguments += ["--target.beat", "none", "--train.device", "cpu", "--train.checkpoint-steps", "20", "--quiet"]
    arguments += ["--run-dir", "r", "--train.no-checkpoint-epochs", "--train.keep-last", "2", *QUIETLY]
    with contextlib.chdir(folder):
        write_files(Path("data"))
        assert main(arguments) == 0
        unfinish()
        forget_the_last_checkpoint()
    return folder


@pytest.fixture
def begun(call: Call, trained: Path) -> Path:
    """A copy of the run, and of its data, in the current folder."""
    shutil.copytree(trained, ".", dirs_exist_ok=True)
    config = Path("r/config.json")
    config.write_text(config.read_text().replace(str(trained), str(Path.cwd())))
    return Path("r")


def unfinish() -> None:
    for name in ("seal.json", "result.json", "trial-42.json", "profile.json"):
        Path("r", name).unlink()


def forget_the_last_checkpoint() -> None:
    shutil.rmtree("r/checkpoints/seed-42/step-00000030")
    Path("r/checkpoints/seed-42/index.json").write_text('{"last": "step-00000020"}')


def saved() -> dict[str, Any]:
    return dict(json.loads(Path("r/config.json").read_text()))


def changes() -> list[dict[str, Any]]:
    return list(json.loads(Path("r/result.json").read_text())["provenance"]["changes"])


def change_of(field: str, was: Any, now: Any, after_step: int | None = 20, seed: int | None = 42) -> dict[str, Any]:
    return {"field": field, "was": was, "now": now, "after_step": after_step, "seed": seed}


def agrees() -> bool:
    """Whether the run's files are as sealed and tell of one run."""
    return all(claim.holds for claim in check_run(Path("r"), ()))


def test_a_field_of_the_contract_is_refused_by_name(begun: Path, call: Call) -> None:
    before = Path("r/config.json").read_bytes()
    code, output = call("--resume", "r", "--train.batch-size", "128")
    assert code == 3
    assert "train.batch_size is 128; this run has 400" in output
    assert "--allow-change train.batch_size" in output
    code, output = call("--resume", "r", "--train.batch-size", "128", "--model.dim", "4", "--dry-run")
    assert code == 3
    assert "--allow-change model.dim --allow-change train.batch_size" in output
    assert Path("r/config.json").read_bytes() == before


def test_the_page_names_every_free_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    assert [field for field in FREE if f"`{field}`" not in page] == []


def test_an_allowed_change_is_made_and_remembered(begun: Path, call: Call) -> None:
    code, output = call("--resume", "r", "--train.learning-rate", "0.001", "--allow-change", "train.learning-rate")
    assert code == 0, output
    assert "seed 42 resumes at step 20 of 30" in output
    assert saved()["config"]["train"]["learning_rate"] == 0.001
    assert [entry["field"] for entry in saved()["changed"]] == ["train.learning_rate"]
    assert changes() == [change_of("train.learning_rate", 0.005, 0.001)]
    assert "train.learning_rate changes from 0.005 to 0.001" in output
    assert agrees()
    # Its checkpoint is still the one from before: what was allowed stays allowed.
    unfinish()
    code, output = call("--resume", "r")
    assert code == 0, output
    assert changes() == [change_of("train.learning_rate", 0.005, 0.001)]


def test_fields_outside_the_contract_are_free(begun: Path, call: Call) -> None:
    Path("data").rename("moved")
    code, output = call(
        "--resume", "r", "--data.path", "moved", "--train.checkpoint-steps", "5", "--train.keep-last", "2"
    )
    assert code == 0, output
    assert saved()["config"]["data"]["path"] == str(Path("moved").absolute())
    assert "changed" not in saved()
    kept = sorted(path.name for path in Path("r/checkpoints/seed-42").glob("step-*"))
    assert kept == ["step-00000025", "step-00000030"]
    assert agrees()


def test_an_edited_config_is_found_by_the_checkpoint(begun: Path, call: Call) -> None:
    edited = saved()
    edited["config"]["train"]["rise"] = 0.5
    Path("r/config.json").write_text(json.dumps(edited))
    code, output = call("--resume", "r")
    assert code == 3
    assert "train.rise is 0.5; this run has 0.3" in output
    assert "checkpoint: step 20" in output
    code, output = call("--resume", "r", "--allow-change", "train.rise")
    assert code == 0, output


def test_a_change_that_the_state_does_not_fit_is_refused_and_not_kept(begun: Path, call: Call) -> None:
    before = Path("r/config.json").read_bytes()
    code, output = call("--resume", "r", "--model.top", "8", "1", "--allow-change", "model.top")
    assert code == 3, output
    assert "the checkpoint does not fit this config: model.top is [8, 1]; this run has" in output
    assert Path("r/config.json").read_bytes() == before
    assert call("--resume", "r")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "r", "--allow-change", "train.batchsize"], "did you mean 'train.batch_size'?"),
        (["--resume", "r", "--allow-change", "seed", "--seed", "7"], "another seed is another run"),
        (["--allow-change", "train.batch_size"], "--allow-change needs --resume"),
        (["--resume", "r", "--run-dir", "q"], "--run-dir cannot be combined with --resume"),
    ],
)
def test_mistakes(begun: Path, call: Call, arguments: list[str], message: str) -> None:
    code, output = call(*arguments)
    assert code == 2
    assert message in output


def test_a_finished_run_with_a_damaged_result_says_how_to_get_it_back(begun: Path, call: Call) -> None:
    assert call("--resume", "r")[0] == 0
    path, before = Path("r/result.json"), json.loads(Path("r/result.json").read_text())
    for content in (b"{}", b"\0\xff", path.read_bytes()[:100], b""):
        path.write_bytes(content)
        code, output = call("--resume", "r")
        assert code == 3
        assert "this run is finished, but result.json has" in output
        assert "remove result.json and resume the run" in output
    path.write_text("{}")
    seal(Path("r"))
    code, output = call("--resume", "r")
    assert code == 3
    assert "result.json is not a file that recperf wrote" in output
    path.unlink()
    assert call("--resume", "r")[0] == 0
    assert json.loads(path.read_text())["quality"] == before["quality"]
    assert agrees()
    Path("r/checkpoints/seed-42/step-00000020/manifest.json").unlink()
    assert "checkpoint step-00000020 of seed 42 is damaged: manifest.json is missing" in call("--resume", "r")[1]
