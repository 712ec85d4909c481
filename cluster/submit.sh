#!/usr/bin/env bash
# Submit a training run to a Ray cluster and follow its log; the exit status is the run's.
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: cluster/submit.sh [--address URL] [--id NAME] [--no-wait] FILE [-- TRIAL_RAY_TRAIN_ARGUMENTS...]

  FILE         an experiment inside this checkout, such as tuned_examples/alfworld_qwen3_1.7b.py
  --address    the dashboard, such as http://127.0.0.1:8265 (else RAY_API_SERVER_ADDRESS, else RAY_ADDRESS)
  --id         name of the job (else Ray chooses one)
  --no-wait    return as soon as the job is accepted

Clusters with token authentication: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH).
USAGE
  exit 2
}

options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --address) [[ $# -ge 2 ]] || usage; options+=(--address "$2"); shift 2 ;;
    --id) [[ $# -ge 2 ]] || usage; options+=(--submission-id "$2"); shift 2 ;;
    --no-wait) options+=(--no-wait); shift ;;
    -*) usage ;;
    *) break ;;
  esac
done
[[ $# -ge 1 ]] || usage
file=$1
shift
if [[ $# -gt 0 ]]; then
  [[ $1 == -- ]] || usage
  shift
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! -f $file ]]; then
  echo "cluster/submit.sh: no such file in $PWD: $file" >&2
  exit 2
fi
exec ray job submit "${options[@]}" --runtime-env cluster/runtime_env.yaml -- \
  trial-ray train "$file" "$@"
