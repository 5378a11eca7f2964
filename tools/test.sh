#!/usr/bin/env bash
# Sets up .venv (once), then lints, type checks and tests. `--full` adds the full matrices. Whatever follows is pytest's.
# Without anything, tests that time hardly matters to are run beside the others, whose cores idle for a third of the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
selection=(-m "not full")
if [ "${1:-}" = --full ]; then
    selection=()
    shift
fi
bash tools/setup.sh
bin=${VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" megastream
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# torch's own rendezvous asks the name server who 127.0.0.1 is; a silent one costs every process 1 s with this, else 10 s.
export RES_OPTIONS="timeout:1 attempts:1"
if [ $# -gt 0 ]; then
    exec "$bin/python" -m pytest "${selection[@]}" "$@"
fi

apart=(tests/engine/test_{family_loads,fp8,hot_cold,refused,sharded_state}.py) # engines of their own
apart+=(tests/distributed/test_{matrix,mtp,router_bias}.py)                    # training alone
beside=$(mktemp)
set -m # a job in the background would otherwise begin with SIGINT ignored, and so would all that its tests start
nice -n 10 "$bin/python" -m pytest "${selection[@]}" tests/unit tests/contract "${apart[@]}" >"$beside" 2>&1 &
trap 'kill -INT $! 2>/dev/null || true; rm -f "$beside"' EXIT
set +m
failed=0
"$bin/python" -m pytest "${selection[@]}" tests/distributed tests/engine "${apart[@]/#/--ignore=}" || failed=1
wait $! || failed=1
cat "$beside"
exit "$failed"
