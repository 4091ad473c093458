#!/usr/bin/env bash
# Starts the ranks of one host. Run it on every host, each with its own number, within ten minutes of each other:
#
#   FIRST=10.0.0.1 HOSTS=2 examples/hosts/start.sh 0 /shared/runs/mine --preset gpu
#   FIRST=10.0.0.1 HOSTS=2 examples/hosts/start.sh 1 /shared/runs/mine --preset gpu
#
# The same commands resume the run if it has begun. docs/launching.md explains the rest.
#
# FIRST      address of host 0, at which the others reach it
# HOSTS      number of hosts; 1:4 lets the run go on with any number from 1 to 4 when hosts are lost or come back
# PORT       a free port of host 0 (29400)
# RESTARTS   how many times to restart ranks after a failure (0; of 1:4 hosts 20)
# RANKS      ranks of this host: a number, or gpu, cpu, auto (one per GPU, without GPUs one per core)
# INTERFACE  network interface with the address that the other hosts know, such as eth0; unset: gloo and NCCL choose
# ADDRESS    address of this host, if the other hosts do not know its name
# WORKLOAD   what to train (dlrm-v4)
set -euo pipefail

number=${1:?the number of this host, from 0}
run=${2:?the folder of the run, which all hosts see under this name}
shift 2
: "${FIRST:?address of host 0}" "${HOSTS:?number of hosts}"
port=${PORT:-29400}

if [ -n "${INTERFACE:-}" ]; then
  export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi

# No host can see it half made: it is made when all ranks have met, after every host has looked.
if [ -e "$run/config.json" ]; then
  arguments=(--resume "$run")
else
  arguments=("${WORKLOAD:-dlrm-v4}" --run-dir "$run" --train.checkpoint-minutes 10 "$@")
fi

if [[ $HOSTS == *:* ]]; then
  # Host 0 keeps the list of hosts. torchrun would give ranks the address of a lost host if it shared its store.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  meeting=(--rdzv-backend c10d --rdzv-endpoint "$FIRST:$port" --rdzv-id "$(basename "$run")"
    --rdzv-conf "is_host=$((number == 0)),last_call_timeout=30" --max-restarts "${RESTARTS:-20}")
  if [ -n "${ADDRESS:-}" ]; then
    meeting+=(--local-addr "$ADDRESS")
  fi
else
  meeting=(--node-rank "$number" --master-addr "$FIRST" --master-port "$port" --max-restarts "${RESTARTS:-0}")
fi

# A signal gives ranks as long to save as recperf's own launcher does (torch 2.11 has no such setting: 30 s).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
exec torchrun --nnodes "$HOSTS" --nproc-per-node "${RANKS:-auto}" "${meeting[@]}" -m recperf run "${arguments[@]}"
