#!/usr/bin/env bash
# Sets up .venv (once), then lints, type checks and tests. `--full` adds the full matrices.
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
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind "$bin/python" -m pytest "${selection[@]}" "$@"
