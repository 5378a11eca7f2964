#!/usr/bin/env bash
# Sets up .venv (once) and runs the quickstart; results lie in runs/quickstart/. Further arguments go to the command,
# e.g. --engine-layout tp2ep.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh
exec "${VENV:-.venv}/bin/megastream" quickstart configs/quickstart.yaml "$@"
