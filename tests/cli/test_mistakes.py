"""Mistakes of users: each is answered by one line and its documented exit code, and leaves nothing behind."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import example_profiles as profiles
import example_runs as examples
import pytest

from recperf.jsonfile import sealed

Call = Callable[..., tuple[int, str, str]]
MISTAKES = [
    ("rum", 2, "did you mean 'run'?"),
    ("diff a b", 2, "did you mean 'compare'?"),
    ("--versoin", 2, "unknown option '--versoin'"),
    ("run micro-drlm", 2, "did you mean 'micro-dlrm'?"),
    ("run --train.batchsize 3", 2, "did you mean '--train.batch-size'?"),
    ("run --batch_size=3", 2, "did you mean '--train.batch-size'?"),
    ("run --train.batch-size x", 2, "--train.batch-size: 'x' is not a whole number"),
    ("run --train.learning-rate 1,0", 2, "--train.learning-rate: '1,0' is not a number"),
    ("score", 2, "missing: RUN, --output"),
    ("run --data.split newest", 2, "invalid choice 'newest' for argument '--data.split'"),
    ("run --preset defualt", 2, "did you mean 'default'?"),
    ("run --preset", 2, "--preset needs a value"),
    ("run --quiet dlrm", 2, "the workload comes before all options"),
    ("run --resume a --config b", 2, "exclude each other"),
    ("run --train.batch-size 0", 3, "train.batch_size is 0; allowed: 1 to 16,777,216"),
    ("run --model.dim 9 --model.interaction dot", 3, "a last width equal to model.dim"),
    ("run --resume nowhere", 3, "there is no such run"),
    ("run --config nowhere.json", 3, "no config there"),
    ("run --data.path nowhere", 3, "nowhere"),
    ("run --data.path nowhere --json", 3, "nowhere"),
    ("run dlrm --model.dim 5", 3, "with dot a last width equal to model.dim (5)"),
    ("run dlrm --model.rows", 3, "at least one number"),
    ("run dlrm --model.interaction cross", 2, "'dot', 'concat', 'dcn'"),
    ("run dlrm --data.source clicks", 3, "the folder of imported rows with data.source clicks"),
    ("run dlrm --data.ids-per-bag 9 --model.rows 20 20", 3, "at most 8 can be compared"),
    ("run dlrm --data.ids-per-feature 1 2", 3, "features"),
    ("run dlrm --train.stop-at-target", 3, "the target has no bound"),
    ("run dlrm --model.rows 1000000000000 --data.ids-per-bag 1", 4, "GiB"),
    ("data gte x", 2, "did you mean 'get'?"),
    ("data make yambda-like", 2, "--path"),
    ("data get yambda-like", 2, "nothing to download"),
    ("data make yambda-50m --path x", 2, "cannot be generated"),
    ("data make yambda-like --path x --events 3", 3, "events is 3"),
    ("data prepare yambda-50m", 3, "is not on this machine"),
    ("data prepare yambda-like", 2, "is generated as a store"),
    ("data prepare movielens-100k --path .", 2, "only those are prepared"),
    ("data info mine", 2, "unknown dataset 'mine'"),
    ("data check yambda-50m --path nowhere", 3, "the folder does not exist"),
    ("data import --events nowhere.csv --label y", 3, "nowhere.csv"),
    ("data import x.csv --label y --rating r", 2, "rating and label are given"),
    ("compare old new old", 2, "compare takes two runs, profiles or traces; got 3"),
    ("compare old", 2, "got 1"),
    ("compare old new --gate lots", 2, "--gate takes a percentage such as 5%, not 'lots'"),
    ("compare old missing", 3, "there is nothing at this path"),
    ("compare old .", 3, "profile.json is missing"),
    ("compare one unfinished", 3, "recperf run --resume unfinished"),
    ("compare torn.json new --json", 3, "torn.json is not JSON"),
    ("check --all empty", 2, "no runs in this folder"),
    ("check --all nowhere", 3, "no folder there"),
    ("check nowhere", 3, "there is no such run"),
    ("check one/config.json", 3, "there is no such run"),
    ("report", 2, "report needs a run, a profile or a trace"),
    ("report --out", 2, "error: "),
    ("report one --out .", 2, "--out is a folder"),
    ("report nowhere", 3, "there is nothing at this path"),
    ("report unfinished", 3, "recperf run --resume unfinished"),
    ("plan micro-dlrm --distributed.all-to-all fp16 --ranks 2", 3, "no rows are sent"),
    ("plan micro-dlrm --distributed.sharding row --ranks 2", 3, "AdamW changes every row"),
    ("plan micro-dlrm-dram --ranks 2", 2, "runs in a single process"),
    ("plan dlrm-v4 --ranks eight", 2, "not a list of numbers"),
    ("plan dlrm-v4 --ranks 0", 2, "not a list of numbers from 1"),
    ("plan dlrm-v4 --rank-batch 0", 3, "rank batch is 0"),
    ("plan dlrm-v4 --gpu b20", 2, "did you mean 'b200'"),
    ("plan dlrm-v4 --distributed.sharding album=row", 3, "did you mean 'album_id'"),
    ("plan dlrm-v4 --distributed.sharding album_id", 3, "must be table=value"),
    ("plan dlrm-v4 --rank-batch 8 --global-batch 64", 2, "exclude each other"),
    ("plan dlrm-v4 --price cheap", 2, "is not a price"),
    ("plan dlrm-v4 --out plan.png", 2, "does not end in .html"),
    ("plan dlrm-v4 --skew nowhere", 2, "--skew even"),
    ("plan dlrm-v4 --skew zipf05", 2, "neither even nor a power law"),
    ("plan dlrm-v4 --global-batch 0", 3, "global batch is 0"),
    ("mlperf check", 2, "needs a log"),
    ("mlperf chek x", 2, "did you mean 'check'"),
    ("mlperf check notes.txt", 3, "not an MLPerf log"),
    ("mlperf check missing.log", 3, "cannot read missing.log"),
    ("mlperf check empty", 3, "no MLPerf log in this folder"),
    ("mlperf package out", 2, "unknown action"),
]
"""What a user types, the exit code, and what the error says."""


@pytest.fixture
def files(call: Call) -> set[Path]:
    """What the commands name: runs, profiles and files that are not what they should be."""
    examples.make_run(Path("one"), measured=())
    (examples.make_run(Path("unfinished"), measured=()) / "result.json").unlink()
    for name in ("old", "new"):
        Path(name).mkdir()
        Path(name, "profile.json").write_text(json.dumps(sealed(profiles.eager())))
    Path("torn.json").write_text(json.dumps(profiles.eager())[:500])
    Path("notes.txt").write_text("hello\n")
    Path("empty").mkdir()
    return {path for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(("typed", "code", "message"), MISTAKES)
def test_a_mistake_is_answered_and_leaves_nothing(
    call: Call, files: set[Path], typed: str, code: int, message: str
) -> None:
    if typed.startswith("mlperf"):
        pytest.importorskip("mlperf_logging", reason="mlperf-logging is not installed: pip install 'recperf[mlperf]'")
    exit_code, out, err = call(*shlex.split(typed))
    assert exit_code == code, err
    assert message in err
    assert [line.startswith("error: ") for line in err.splitlines()].count(True) == 1
    assert "measuring" not in err, "ceilings take seconds: errors come first"
    assert "--json" not in typed or json.loads(out)["error"]["exit_code"] == code
    assert {path for path in Path().rglob("*") if path.is_file()} == files
