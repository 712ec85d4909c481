#!/usr/bin/env bash
# A training run on whole Slurm nodes: Ray starts on each node, the run on the first, and Ray ends with the run.
#   sbatch cluster/slurm.sh train tuned_examples/alfworld_qwen3_1.7b.py --out /scratch/runs/alfworld
#SBATCH --job-name=trial-ray
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=trial-ray-%j.log
set -euo pipefail

if [[ $# -lt 2 || ($1 != train && $1 != sweep) ]]; then
  echo "usage: sbatch cluster/slurm.sh train|sweep FILE [ARGUMENTS...]" >&2
  exit 2
fi
# Read the whole output: closing the pipe after the first line would end scontrol, and this script, by a signal.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes[0]}
port=${TRIAL_RAY_PORT:-6379}
# This script runs on the first node. Ray's own command exits with 0 if the port is in use.
if (exec 3<>"/dev/tcp/$head_node/$port") 2>/dev/null; then
  echo "cluster/slurm.sh: port $port is in use on $head_node; set another: TRIAL_RAY_PORT=6380 sbatch cluster/slurm.sh ..." >&2
  exit 2
fi
# Other users share the network: only processes with this job's token can connect to its Ray.
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Nodes reach this point at different times. Without RAY_ADDRESS the run would start its own Ray on the first node.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
srun --kill-on-bad-exit=1 \
  ray symmetric-run --address "$head_node:$port" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  env RAY_ADDRESS="$head_node:$port" trial-ray "$@"
