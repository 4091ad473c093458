"""Commands as a user runs them: each in a process of its own, judged by its exit code and its stderr.

    python3 tests/gpu/gpu_commands.py [PART ...] [--device cuda|cpu] [--jobs N] [--table FILE]

Needs only the Python that is there, with torch; src/ is on the path of the commands. Every lane has a folder and caches
of its own, so that its first command compiles what it needs and later ones find it; ceilings are measured once, before
the lanes share the cores. A lane whose packages are missing is left out, and says so. Exits with 1 if a command ended
otherwise than documented.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMES = 5
"""Runs of each workload."""
LIMIT_S = 300
FIRST = "machine"
"""The part that runs before the others, alone."""
DAMAGE = re.compile(
    r"Traceback|internal error|double free|corrupt|invalid pointer|munmap_chunk|Aborted|terminate called|core dumped|"
    r"Segmentation|device-side assert|CUDA error|Exception ignored|resource_tracker|ResourceWarning"
)
"""What no command may print to stderr, whatever its exit code is."""
SCRIPT = """
import torch
from torch import nn

DEVICE = "{device}"
tables = nn.ModuleList(nn.Embedding(rows, 16) for rows in (50, 3000, 40000)).to(DEVICE)
top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
optimizer = torch.optim.Adam([*tables.parameters(), *top.parameters()], foreach=False)
torch.manual_seed(1)
for step in range(300):
    ids = [torch.randint(table.num_embeddings, (512,), device=DEVICE) for table in tables]
    logits = top(torch.cat([table(one) for table, one in zip(tables, ids)], 1))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, (logits.detach() > 0).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
"""
API = """
import recperf, torch
from torch import nn

model = nn.ModuleList([nn.Embedding(3, 8), nn.Embedding(100000, 8)]).to("{device}")
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step(ids):
    optimizer.zero_grad()
    (model[0](ids % 3) * model[1](ids)).sigmoid().mean().backward()
    optimizer.step()

report = recperf.profile(step, batches=[torch.randint(100000, (4096,), device="{device}") for _ in range(60)])
print(report)
assert all(bool(table.weight.isfinite().all()) for table in model)
"""
STOPPED = {75}
DONE = {0}


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    codes: set[int] = field(default_factory=lambda: DONE)
    stop_when: str = ""
    """SIGTERM is sent as soon as a file of this pattern exists in the lane's folder."""
    python: bool = False
    """Whether the arguments are a Python program of their own and not a command of recperf."""
    ranks: int = 1
    """Processes, each of which says that it is alone on its host."""


@dataclass(frozen=True)
class Lane:
    part: str
    name: str
    commands: list[Command]
    needs: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files that lie in its folder before."""


@dataclass(frozen=True)
class Row:
    lane: str
    number: int
    command: str
    code: int
    seconds: float
    problem: str


def lanes(device: str, times: int) -> list[Lane]:
    """Everything that is run, by part."""
    on = ["--train.device", device]
    workloads = {
        "micro-dlrm": ["micro-dlrm"],
        "micro-dlrm-dram": ["micro-dlrm-dram"],
        "dlrm experiment": ["dlrm", "--preset", "experiment"],
        "dlrm intended": ["dlrm", "--preset", "intended"],
        "dlrm-v4": ["dlrm-v4"],
        "next-item": ["next-item"],
        "hstu": ["hstu"],
    }
    made = [Lane(FIRST, "machine", [Command(["doctor"], {0, 4}), Command(["peaks"])])]
    made += [
        Lane("runs", name, [Command(["run", *words, *on]) for _ in range(times)]) for name, words in workloads.items()
    ]
    for name in ("micro-dlrm", "dlrm-v4", "next-item", "hstu"):
        begin = ["run", *workloads[name], *on, "--run-dir", "stopped", "--train.checkpoint-steps", "5"]
        made.append(
            Lane(
                "commands",
                f"resume of {name}",
                [
                    Command(begin, STOPPED, stop_when="stopped/checkpoints/seed-*/step-*"),
                    Command(["run", "--resume", "stopped"]),
                    Command(["check", "stopped"], {0, 5}),
                ],
            )
        )
    served = [Command(["run", "micro-dlrm", *on, "--run-dir", "first"])]
    served += [Command(words) for words in (
        ["score", "first", "--held-out", "--output", "held-out.parquet"],
        ["score", "first", "--input", "held-out.parquet", "--output", "scores.csv"],
        ["recommend", "first", "--users", "1", "2", "3", "--k", "5", "--exclude-seen"],
        ["export", "first", "--output", "exported"],
        ["run", "next-item", *on, "--run-dir", "next"],
        ["recommend", "next", "--history", "12,45,7"],
        ["export", "next", "--output", "exported-next"],
        ["compare", "first", "first"],
        ["report", "first"],
    )]  # fmt: skip
    made.append(Lane("commands", "serving", served, needs=("pyarrow", "safetensors", "jinja2")))
    script = ["profile", "--script", "train.py"]
    made.append(
        Lane(
            "commands",
            "a program",
            [
                Command(["train.py"], python=True),
                Command(script),
                Command([*script, "--try-fixes"]),
                Command(["api.py"], python=True),
                Command(["api.py"], python=True),
            ],
            files={"train.py": SCRIPT.format(device=device), "api.py": API.format(device=device)},
        )
    )
    profiled = ["profile", "dlrm", "--preset", "experiment", *on]
    made.append(
        Lane("commands", "profiles", [Command([*profiled, "--try-fixes"]), Command([*profiled, "--save-trace"])])
    )
    entry_points = "[recperf.workloads]\nwide-and-deep = wide_and_deep:WIDE_AND_DEEP\ngru4rec = gru4rec:GRU4REC\n"
    modules = {f"{name}.py": (ROOT / "examples" / f"{name}.py").read_text() for name in ("wide_and_deep", "gru4rec")}
    metadata = {"METADATA": "Metadata-Version: 2.1\nName: own\nVersion: 0.1\n", "entry_points.txt": entry_points}
    made.append(
        Lane(
            "commands",
            "torch modules",
            [Command(["run", name, *on]) for name in ("wide-and-deep", "gru4rec") for _ in range(2)],
            files={**modules, **{f"own-0.1.dist-info/{name}": text for name, text in metadata.items()}},
        )
    )
    pair = [["pair", "micro-dlrm-dram", *on], ["sweep", "micro-dlrm", *on, "--model.dim", "8,16,32"]]
    made.append(Lane("commands", "pair and sweep", [Command(words) for words in pair]))
    torchrec = ("torchrec", "fbgemm_gpu")
    for name, needs in {
        "micro-dlrm": torchrec,
        "dlrm experiment": torchrec,
        "dlrm-v4": torchrec,
        "next-item": (),
    }.items():
        words = ["run", *workloads[name], *on, "--train.max-steps", "40"]
        ranked = [Command([*words, "--run-dir", f"ranks-{turn}"], {0, 5}, ranks=2) for turn in range(2)]
        made.append(Lane("ranks", f"two ranks of {name}", ranked, needs=needs))
    return made


@contextlib.contextmanager
def folder_of(lane: Lane, ceilings: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A new folder with the lane's files, and the environment of its commands. Ceilings come from a folder, or go there
    if it does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="recperf-commands-") as name:
        folder = Path(name)
        machines = folder / ".caches" / "home" / "machines"
        if ceilings.exists():
            shutil.copytree(ceilings, machines)
        for file, text in lane.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text)
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        caches = {"RECPERF_HOME": "home", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
        own = {variable: str(folder / ".caches" / name) for variable, name in caches.items()}
        yield folder, {**os.environ, **own, "PYTHONPATH": path}
        if machines.exists() and lane.part == FIRST:
            shutil.copytree(machines, ceilings)


def processes(command: Command, folder: Path, environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """The started processes of a command, one per rank; their output goes into files of the folder."""
    words = [sys.executable, *([] if command.python else ["-m", "recperf"]), *command.arguments]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(command.ranks)}
    started = []
    for rank in range(command.ranks):
        own = {"RANK": str(rank), "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"host{rank}"}
        more = {**loopback, **meeting, **own} if command.ranks > 1 else {}
        with (folder / f".out{rank}").open("wb") as out, (folder / f".err{rank}").open("wb") as err:
            started.append(subprocess.Popen(words, cwd=folder, env={**environment, **more}, stdout=out, stderr=err))
    return started


def execute(command: Command, folder: Path, environment: dict[str, str]) -> tuple[int, float, str]:
    """The exit code of a command (of its ranks, the first that is not 0), its seconds, and what is wrong with it."""
    began = time.monotonic()
    started = processes(command, folder, environment)
    sent = not command.stop_when
    while any(process.poll() is None for process in started):
        if not sent and any(folder.glob(command.stop_when)):
            started[0].send_signal(signal.SIGTERM)
            sent = True
        if time.monotonic() - began > LIMIT_S:
            for process in started:
                process.kill()
        time.sleep(0.02)
    seconds = time.monotonic() - began
    code = next((process.returncode for process in started if process.returncode), 0)
    texts = [(folder / f".err{rank}").read_text(errors="replace") for rank in range(command.ranks)]
    damage = DAMAGE.search("\n".join(texts))
    if code in command.codes and damage is None:
        return code, seconds, ""
    why = f"exit {code}, expected {sorted(command.codes)}" if code not in command.codes else f"stderr: {damage[0]!r}"
    return code, seconds, f"{why}\n" + "\n".join(text[-1500:] for text in texts)


def run(lane: Lane, ceilings: Path) -> list[Row]:
    """The commands of a lane, one after the other; after one that failed the others are not tried."""
    missing = [name for name in lane.needs if importlib.util.find_spec(name) is None]
    if missing:
        print(f"left out: {lane.name} (not installed: {', '.join(missing)})", flush=True)
        return []
    rows = []
    with folder_of(lane, ceilings) as (folder, environment):
        for number, command in enumerate(lane.commands, 1):
            text = " ".join(command.arguments)
            row = Row(lane.name, number, text, *execute(command, folder, environment))
            rows.append(row)
            result = "ok" if not row.problem else "WRONG"
            print(f"{result:<5} {row.code:>4} {row.seconds:6.1f} s  {lane.name} {number}: {text}", flush=True)
            if row.problem:
                print(row.problem, flush=True)
                break
    return rows


def table(rows: list[Row]) -> str:
    """Commands by lane: how many, their exit codes, and the seconds of the first and of later starts."""
    lines = ["| what | commands | exit codes | first, s | later, s |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row.lane for row in rows):
        own = [row for row in rows if row.lane == name]
        later = [row.seconds for row in own[1:]]
        span = f"{min(later):.1f} to {max(later):.1f}" if later else ""
        codes = ", ".join(str(row.code) for row in own)
        lines.append(f"| {name} | {len(own)} | {codes} | {own[0].seconds:.1f} | {span} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="runs, commands or ranks; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", help="lanes whose name contains this")
    parser.add_argument("--times", type=int, default=TIMES, help="runs of each workload")
    parser.add_argument("--jobs", type=int, default=1, help="lanes at the same time")
    parser.add_argument("--ceilings", type=Path, help="folder of ceilings from another part, or for them")
    parser.add_argument("--table", type=Path, help="file for the table")
    wish = parser.parse_args()
    first, *others = lanes(wish.device, wish.times)
    chosen = [lane for lane in others if (not wish.parts or lane.part in wish.parts) and wish.only in lane.name]
    if not chosen:
        parser.error("no lane has this part and name")
    with tempfile.TemporaryDirectory() as shared, ThreadPoolExecutor(wish.jobs) as pool:
        ceilings = wish.ceilings or Path(shared, "machines")
        rows = [] if ceilings.exists() else run(first, ceilings)
        rows += [row for own in pool.map(lambda lane: run(lane, ceilings), chosen) for row in own]
    text = table(rows)
    print(text)
    if wish.table:
        wish.table.write_text(text + "\n")
    wrong = [row for row in rows if row.problem]
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
