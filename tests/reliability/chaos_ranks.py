"""Trouble on two ranks: signals to one of them or to their launcher, a killed rank, a damaged shard.

Between CPUs by gloo, as forks; where there is a GPU also by NCCL, as real processes that share it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import tiny_v4
from chaos_foreign import require_none_alive
from chaos_kinds import KINDS, REFUSED, damaged, kind
from chaos_process import SOFT, Failure, Process, exit_code_of, judge
from chaos_runs import WORKLOADS, Lab, Subject, Try, outcome, require_equal
from killable import Trouble
from mutations import files_in
from rank_hosts import LOOPBACK, free_port

from recperf import stop as points

GLOO, NCCL = "dlrm-v4 on 2 ranks", "dlrm-v4 on 2 ranks by NCCL"
NAMES = (GLOO, NCCL)
LAUNCHER_SECONDS = 120.0
"""How long a launcher and its ranks may take to start and to end, on top of a run."""
WORKLOADS[GLOO] = [
    "dlrm-v4", "--data.holdout-windows", "1", *tiny_v4.STREAM, *tiny_v4.MODEL, "--model.table-dim", "16",
    "--train.threads", "1", "--train.max-steps", "11", "--evaluate.every-windows", "2", "--train.checkpoint-windows",
    "1", "--train.checkpoint-steps", "3", "--train.keep-last", "2", "--mlperf.log", "--distributed.sharding",
    "item_id=row,album_id=column,artist_id=data-parallel,uid=table", "--distributed.timeout-s", "20",
]  # fmt: skip
"""A rank whose peer is gone before they met waits for the whole timeout: no launcher is there to end it."""
WORKLOADS[NCCL] = [
    *WORKLOADS[GLOO], "--train.device", "cuda", "--train.deterministic", "--distributed.timeout-s", "60",
]  # fmt: skip


def add_kinds(gpus: str | None) -> None:
    """Ranks need TorchRec, and NCCL a GPU."""
    if importlib.util.find_spec("torchrec") is None or importlib.util.find_spec("fbgemm_gpu") is None:
        print("ranks are left out: TorchRec is not installed (make setup-distributed)")
        return
    import rank_warm  # noqa: F401

    kind("ranks: signals", 3)(lambda one: signals(one, GLOO))
    kind("ranks: damage", 2)(lambda one: damage(one, GLOO))
    kind("ranks: launcher", 1)(launcher)
    if gpus is not None:
        kind("ranks by NCCL: signals", 3)(lambda one: signals(one, NCCL))
        kind("ranks by NCCL: damage", 1)(lambda one: damage(one, NCCL))


def prepare(lab: Lab) -> None:
    """A run of two ranks that nothing troubles, and an interrupted one, for each way in which they talk."""
    for name, prefix in ((GLOO, "ranks: "), (NCCL, "ranks by NCCL: ")):
        if not any(one.startswith(prefix) for one in KINDS):
            continue
        place = lab.root / name.replace(" ", "-")
        subject = Subject(name, lab.root / "events", place / "straight", place / "interrupted")
        attempt = Try(lab, "prepare", 0, place)
        for folder in ("measured", "straight"):
            attempt.run = place / folder
            tiny_v4.own(attempt.run)
            if folder == "straight":
                shutil.copyfile(place / "measured" / "profile.json", attempt.run / "profile.json")
            began = time.monotonic()
            ranks = start(attempt, subject, subject.begin(attempt.run))
            assert [rank.wait(600) for rank in ranks] == [0, 0], attempt.printed
            subject.seconds = time.monotonic() - began
        subject.outcome = outcome(subject.straight)
        subject.exact = subject.outcome == outcome(place / "measured")
        assert subject.exact or name == NCCL, "two uninterrupted runs of ranks differ"
        subject.failed_claims = lab.failed_claims(subject.straight, subject.limit)
        subject.lay_profile(subject.interrupted)
        ranks = start(attempt, subject, subject.begin(subject.interrupted))
        steps = subject.interrupted / "checkpoints" / "seed-42"
        while len(list(steps.glob("step-*"))) < 2 and not ranks[1].ended(0.005):
            pass
        ranks[1].send(signal.SIGKILL)
        for rank in ranks:
            rank.wait(subject.limit)
        lab.ranks[name] = subject


def start(one: Try, subject: Subject, arguments: list[str], **troubled: Trouble) -> list[Process]:
    """Start the two ranks of a command, each with a log of its own; `rank0` and `rank1` arm a fault in one of them."""
    one.attempts += 1
    if "--resume" in arguments:
        one.plant(one.run)
    job = one.folder / f"job-{one.attempts}"
    by_nccl, port = subject.name == NCCL, str(free_port())
    ranks = []
    for rank in (0, 1):
        log = one.folder / f"rank-{rank}.log"
        here = {"RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        if by_nccl:
            here |= {**LOOPBACK, "NCCL_HOSTID": f"host{rank}", "MASTER_PORT": port}
            here["CUDA_VISIBLE_DEVICES"] = one.lab.gpus or ""
            ranks.append(Process.start(arguments, log, home=one.home, **here))
            continue
        folder = job / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        here |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "recperf-ranks-chaos"}
        here["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
        troubles = [("meet_in", {"file": str(job / "meeting")})]
        troubles += [trouble for name, trouble in troubled.items() if name == f"rank{rank}"]
        ranks.append(Process.fork(arguments, log, home=one.home, environment=here, troubles=troubles))
    return ranks


def ended(one: Try, subject: Subject, ranks: list[Process], *more: int) -> list[int]:
    """The exit codes of the ranks; a signal to one of them stops all."""
    try:
        for rank in ranks:
            rank.wait(subject.limit)
    finally:
        for rank in ranks:
            rank.kill()
    sent = [number for rank in ranks for number, _ in rank.sent]
    asked = {0, *more, *(exit_code_of(number) for number in sent if number in SOFT)}
    # Before they train, one rank ends by itself and the other one misses it; the launcher's code is that of the first.
    lost = {4} if sent else set()
    killed = [[-signal.SIGKILL] * any(number == signal.SIGKILL for number, _ in rank.sent) for rank in ranks]
    codes = [judge(rank, allowed=[*asked, *lost, *own], printed=False) for rank, own in zip(ranks, killed)]
    if sent and signal.SIGKILL not in sent and not asked & set(codes):
        raise Failure("wrong exit code", f"exit codes {codes}, none of them that of the signal")
    return codes


def finish(one: Try, subject: Subject) -> None:
    """Let the ranks end without further trouble; the run must be as one that nothing troubled."""
    codes = ended(one, subject, start(one, subject, subject.go_on(one.run)))
    assert codes == [0, 0]
    compare(one, subject)


def compare(one: Try, subject: Subject) -> None:
    if subject.exact:
        one.require_equal(subject)
        return
    # Two runs that nothing troubled differ in their last bits on this GPU.
    pairs = zip(losses(one.run), losses(subject.straight), strict=True)
    if not all(math.isclose(ours, theirs, rel_tol=1e-4) for ours, theirs in pairs):
        raise Failure("mismatch", "the losses differ")


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]


def signals(one: Try, name: str) -> str:
    """Signals to one rank or to both, at any moment, and again to the ranks that resume."""
    subject = one.lab.ranks[name]
    subject.lay_profile(one.run)
    for _ in range(one.draw.choice([1, 1, 2, 3])):
        if name == GLOO and one.draw.random() < 0.4:
            kill_at_a_moment(one, subject)
            continue
        ranks = start(one, subject, subject.go_on(one.run))
        delay = one.draw.uniform(0, subject.seconds)
        number = one.draw.choice([*SOFT, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL])
        targets = one.draw.choice([[0], [1], [0, 1]])
        one.done.append(f"{signal.Signals(number).name} to {targets} after {delay:.2f} s")
        if not ranks[targets[0]].ended(delay):
            # A rank that has no handlers yet dies as if it was killed.
            number = number if all(ranks[rank].listening for rank in targets) else signal.SIGKILL
            for rank in targets:
                ranks[rank].send(number)
        ended(one, subject, ranks)
        if (one.run / "seal.json").exists():
            break
    finish(one, subject)
    return "resumed"


def kill_at_a_moment(one: Try, subject: Subject) -> None:
    """Kill one rank while it saves or evaluates: at a named moment, or inside a system call."""
    rank = one.draw.choice([0, 1])
    place = {"point": one.draw.choice(list(points.POINTS))}
    trouble: Trouble = ("signal_at", {**place, "nth": one.draw.choice([1, 2]), "number": signal.SIGKILL})
    if one.draw.random() < 0.5:
        place = {"function": one.draw.choice(["fsync", "replace", "write", "mkdir"])}
        trouble = ("kill_in", {**place, "nth": one.draw.randrange(1, 12)})
    one.done.append(f"rank {rank}: {trouble}")
    ranks = start(one, subject, subject.go_on(one.run), **{f"rank{rank}": trouble})
    ranks[rank].sent.append((signal.SIGKILL, True))
    ended(one, subject, ranks)


def damage(one: Try, name: str) -> str:
    """A damaged file of an interrupted run: all ranks use an older checkpoint, or all refuse."""
    subject = one.lab.ranks[name]
    shutil.copytree(subject.interrupted, one.run)
    shards = files_in(one.run / "checkpoints")
    files = one.draw.choice([shards, shards, [path for path in one.run.iterdir() if path.is_file()]])
    damaged(one, files)
    codes = ended(one, subject, start(one, subject, subject.resume(one.run)), *REFUSED)
    if any(codes):
        lines = [line for rank in (0, 1) for line in (one.folder / f"rank-{rank}.log").read_text().splitlines()]
        # Ranks on hosts of their own do not see what the other host prints: they say that they lost it.
        reasons = [line for line in lines if line.startswith("error:") and "another rank" not in line]
        if len(reasons) != 1:
            raise Failure("wrong exit code", f"exit codes {codes}, and not one line that says why")
        return "refused"
    require_equal(outcome(one.run), subject.outcome) if subject.exact else compare(one, subject)
    return "completed"


def launcher(one: Try) -> str:
    """`recperf run --ranks 2`, a real start, with a signal to the launcher, or a kill of one of its ranks."""
    subject = one.lab.ranks[GLOO]
    subject.lay_profile(one.run)
    limit = subject.limit + LAUNCHER_SECONDS
    process = Process.start([*subject.begin(one.run), "--ranks", "2"], one.log, home=one.home, OMP_NUM_THREADS="1")
    number = one.draw.choice([*SOFT, signal.SIGKILL])
    if one.draw.random() < 0.5:
        # Ranks need most of the time to start; then any moment of the training is as likely.
        while not (one.run / "events.jsonl").exists() and not process.ended(0.05):
            pass
    if not process.ended(one.draw.uniform(0.5, 6.0)):
        # A killed launcher takes its ranks with it.
        to_a_rank = number == signal.SIGKILL and one.draw.random() < 0.5
        ranks = children(process.pid) if to_a_rank else []
        one.done.append(f"{signal.Signals(number).name} to {'a rank' if ranks else 'the launcher'}")
        process.send(number, pid=one.draw.choice(ranks) if ranks else None)
    try:
        process.wait(limit)
    finally:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
    require_none_alive(one.folder)
    sent = [number for number, _ in process.sent]
    allowed = [0, *(exit_code_of(number) for number in sent if number != signal.SIGKILL)]
    allowed += [4, -signal.SIGKILL] if signal.SIGKILL in sent else []
    judge(process, allowed=allowed)
    finish(one, subject)
    return "resumed" if process.code else "completed"


def children(pid: int) -> list[int]:
    """The ranks that a launcher has started."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    words: Any = listed.read_text().split() if listed.exists() else []
    pids = [int(word) for word in words]
    return [one for one in pids if b"recperf" in Path(f"/proc/{one}/cmdline").read_bytes()]
