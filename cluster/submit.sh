#!/usr/bin/env bash
# Submit a command of trial-ray to a Ray cluster and follow its log; the exit status is the job's.
set -euo pipefail

usage() {
  cat >&2 <<'USAGE'
usage: cluster/submit.sh [--address URL] [--id NAME] [--no-wait] train|sweep FILE (--out|--resume) DIR [ARGUMENTS...]

  FILE         an experiment or sweep inside this checkout, such as tuned_examples/alfworld_qwen3_1.7b.py
  DIR          absolute path of a folder that every node sees, or a URI where `train` keeps the run
  ARGUMENTS    further ones of trial-ray train or trial-ray sweep
  --address    the dashboard, such as http://127.0.0.1:8265 (else RAY_API_SERVER_ADDRESS, else RAY_ADDRESS)
  --id         name of the job (else Ray chooses one)
  --no-wait    return as soon as the job is accepted; then `ray job logs --follow NAME`

Clusters with token authentication: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH).
Exit status: the job's (0 done, 1 failed); 2 if nothing was submitted.
USAGE
  exit 2
}

refuse() {
  echo "cluster/submit.sh: $1" >&2
  exit 2
}

address=${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-}}
options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --address) [[ $# -ge 2 ]] || usage; address=$2; shift 2 ;;
    --id) [[ $# -ge 2 ]] || usage; options+=(--submission-id "$2"); shift 2 ;;
    --no-wait) options+=(--no-wait); shift ;;
    train | sweep) break ;;
    *) usage ;;
  esac
done
[[ $# -ge 2 ]] || usage
command=$1
file=$2
shift 2

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -f $file ]] || refuse "no such file in $PWD: $file"
# The job runs in a copy of the checkout, which the cluster deletes.
folder=
previous=
for word in "$@"; do
  case $word in
    --out=* | --resume=*) folder=${word#*=} ;;
    *) [[ $previous != --out && $previous != --resume ]] || folder=$word ;;
  esac
  previous=$word
done
[[ $folder == /* || $folder == *://* ]] ||
  refuse "give --out (or --resume) the absolute path of a folder that every node sees, or a URI; found '$folder'"
[[ $address == http://* || $address == https://* ]] ||
  refuse "expected the dashboard's address, such as --address http://127.0.0.1:8265; found '$address'"
python3 cluster/check_dashboard.py "$address"
exec ray job submit --address "$address" "${options[@]}" --runtime-env cluster/runtime_env.yaml -- \
  trial-ray "$command" "$file" "$@"
