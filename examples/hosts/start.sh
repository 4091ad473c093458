#!/usr/bin/env bash
# The ranks of one host. Run it on every host, each with its own number, within some minutes of each other:
#
#   FIRST=10.0.0.1 HOSTS=2 examples/hosts/start.sh 0 /shared/runs/mine --preset gpu
#   FIRST=10.0.0.1 HOSTS=2 examples/hosts/start.sh 1 /shared/runs/mine --preset gpu
#
# The same commands again go on with the run, if it has begun. docs/launching.md has the rest.
#
# FIRST      address of host 0, at which the others reach it
# HOSTS      how many hosts there are
# PORT       a free port of host 0 (29400)
# RANKS      ranks of this host: a number, or gpu, cpu, auto (one a GPU, and without GPUs one a core)
# INTERFACE  the network device that has the address the other hosts know, as eth0; unset: gloo and NCCL choose
# WORKLOAD   what to train (dlrm-v4)
set -euo pipefail

number=${1:?the number of this host, from 0}
run=${2:?the folder of the run, which all hosts see under this name}
shift 2

if [ -n "${INTERFACE:-}" ]; then
  export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# No host can find it half made: it is made when all ranks have met, after every host has looked.
if [ -e "$run/config.json" ]; then
  what=(--resume "$run")
else
  what=("${WORKLOAD:-dlrm-v4}" --run-dir "$run" --train.checkpoint-minutes 10 "$@")
fi

# A signal gives ranks as long to save as recperf's own launcher does (torch 2.11 has no such setting: 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
exec torchrun --nnodes "${HOSTS:?how many hosts}" --node-rank "$number" --nproc-per-node "${RANKS:-auto}" \
  --master-addr "${FIRST:?address of host 0}" --master-port "${PORT:-29400}" \
  -m recperf run "${what[@]}"
