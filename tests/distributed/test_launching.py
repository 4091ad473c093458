"""The scripts and commands of docs/launching.md, as far as they can be tried without a cluster: every word of them is
understood by torchrun and by recperf, and a job is queued again only where that helps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from recperf.cli.options import choose, read_options
from recperf.cli.run import DESCRIPTION, Options
from recperf.runs.record import Run

ROOT = Path(__file__).parents[2]
HOSTS, SLURM = ROOT / "examples" / "hosts" / "start.sh", ROOT / "examples" / "slurm" / "dlrm_v4.sbatch"
KUBERNETES = ROOT / "examples" / "kubernetes" / "dlrm_v4.yaml"
STUBS = {
    # Notes what it was called with, and what ranks leave behind.
    "torchrun": """
        printf '%s\\n' "$(printf '%s\\037' "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@")" >> "$CALLS"
        [ -n "${SAVES:-}" ] && mkdir -p "$SAVES" && touch -d '+1 minute' "$SAVES/manifest.json"
        exit "${CODE:-0}"
    """,
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        for node in 0 1; do SLURM_NODEID=$node "$@" || code=$?; done
        exit "${code:-0}"
    """,
    "scontrol": """
        if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$@" >> "$CALLS.scontrol"; fi
    """,
}


class Cluster:
    """Commands of a cluster that only note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name, text in STUBS.items():
            path = folder / name
            path.write_text(f"#!/usr/bin/env bash\n{text}")
            path.chmod(0o755)

    def start(self, script: Path, *words: str, **variables: str) -> int:
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
        environment = {"PATH": path, "CALLS": str(self.calls), "SLURM_SUBMIT_DIR": str(self.folder), **job, **variables}
        return subprocess.run(["bash", str(script), *words], env=environment, cwd=self.folder).returncode

    def torchruns(self) -> list[tuple[Any, Any]]:
        """What each meant: torchrun's own options, and recperf's."""
        return [understood(line.split("\x1f")[1:-1]) for line in self.calls.read_text().splitlines()]

    def patience(self) -> set[str]:
        """Seconds that each torchrun gives ranks after a signal."""
        return {line.split("\x1f")[0] for line in self.calls.read_text().splitlines()}

    def requeued(self) -> bool:
        path = self.calls.with_suffix(".scontrol")
        return path.exists() and path.read_text() == "requeue 12345\n"


def understood(words: list[str]) -> tuple[Any, Any]:
    """A command line of torchrun as it and recperf read it; both end the process where they do not understand."""
    from torch.distributed.run import get_args_parser

    agent = get_args_parser().parse_args(words)
    assert (agent.module, agent.training_script) == (True, "recperf")
    command, *rest = agent.training_script_args
    assert command == "run"
    choice = choose(rest)
    return agent, replace(read_options(Options, choice, verb="run", description=DESCRIPTION), resume=choice.resume)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_hosts_start_their_ranks(cluster: Cluster, tmp_path: Path) -> None:
    where = {"FIRST": "10.0.0.1", "HOSTS": "2", "RANKS": "4", "INTERFACE": "eth0"}
    run = tmp_path / "run"
    for number in ("0", "1"):
        assert cluster.start(HOSTS, number, str(run), "--train.batch-size", "64", **where) == 0
    agents, options = zip(*cluster.torchruns())
    assert [(agent.nnodes, agent.node_rank, agent.nproc_per_node) for agent in agents] == [("2", 0, "4"), ("2", 1, "4")]
    assert {(agent.master_addr, agent.master_port) for agent in agents} == {("10.0.0.1", 29400)}
    assert cluster.patience() == {"600"}
    assert options[0] == options[1]
    assert (options[0].run_dir, options[0].values.train.batch_size) == (run, 64)


def test_a_job_starts_a_torchrun_a_node(cluster: Cluster, tmp_path: Path) -> None:
    assert cluster.start(SLURM, DATA="/shared/yambda") == 0
    agents, options = zip(*cluster.torchruns())
    assert [agent.node_rank for agent in agents] == [0, 1]
    assert {(agent.master_addr, agent.master_port, agent.nproc_per_node) for agent in agents} == {
        ("node7", 22345, "gpu")
    }
    assert options[0].run_dir == tmp_path / "runs" / "dlrm-v4-12345"
    assert options[0].values.data.path == Path("/shared/yambda")
    assert not cluster.requeued()


@pytest.mark.parametrize("saved", [True, False])
def test_a_job_that_saved_is_queued_again(cluster: Cluster, tmp_path: Path, saved: bool) -> None:
    """One that failed without is not: it would fail again."""
    run = tmp_path / "run"
    saves = {"SAVES": str(run / "checkpoints" / "seed-42" / "step-00000001")} if saved else {}
    assert cluster.start(SLURM, DATA="/shared/yambda", RUN=str(run), CODE="1", **saves) == 1
    assert cluster.requeued() is saved


def test_torchrun_and_recperf_understand_the_manifest() -> None:
    manifest = yaml.safe_load(KUBERNETES.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = manifest["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the operator looks for this one"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert container["command"] == ["torchrun"]
    # What the operator puts into PET_* variables.
    conf = ",".join(f"{entry['key']}={entry['value']}" for entry in elastic["rdzvConf"])
    agent, options = understood(
        ["--nnodes", f"{elastic['minReplicas']}:{elastic['maxReplicas']}", "--nproc-per-node", spec["nprocPerNode"],
         "--max-restarts", str(elastic["maxRestarts"]), "--rdzv-backend", elastic["rdzvBackend"],
         "--rdzv-id", elastic["rdzvId"], "--rdzv-conf", conf, *container["args"]]
    )  # fmt: skip
    require_known_conf(agent.rdzv_conf)
    assert str(options.run_dir).startswith("/shared/")


def require_known_conf(text: str) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    known = {"is_host", "join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt"}
    assert _parse_rendezvous_config(text).keys() <= known


def commands() -> list[str]:
    """Those of the page that start ranks, as one types them."""
    text = (ROOT / "docs" / "launching.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0] for line in lines if line.startswith("torchrun ")]


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_page_is_understood(line: str, tmp_path: Path) -> None:
    from recperf.config import to_json

    words = shlex.split(line)[1:]
    if "--resume" in words:
        Run.create("dlrm-v4", to_json(choose(["dlrm-v4"]).config), folder=tmp_path / "run").close()
        words[words.index("--resume") + 1] = str(tmp_path / "run")
    agent, _ = understood(words)
    assert agent.nnodes in ("2", "1:4")
    require_known_conf(agent.rdzv_conf)
