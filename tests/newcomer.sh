#!/usr/bin/env bash
# A newcomer's time, by the clock: from an empty folder to an RMSNorm of one's own that is built for two AMD archs,
# checked and fuzzed on the CPU. The kernel is the one of tests/outside, as if it had just been written.
#
#   tests/newcomer.sh [PYTHON]
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HIPFIRE_CACHE_DIR=$folder/cache

took() {
    local began=$EPOCHREALTIME what=$1
    shift
    "$@" > "$folder/said" 2>&1 || { cat "$folder/said"; echo "$what failed"; exit 1; }
    awk -v a="$began" -v b="$EPOCHREALTIME" -v what="$what" 'BEGIN { printf "%7.1f s  %s\n", b - a, what }'
}

start=$EPOCHREALTIME
took "a virtual environment" "$python" -m venv .venv
git clone -q "$here" source  # pip builds in the tree that it is given
took "pip install hipfire-kernels[toolchain]" .venv/bin/pip install -q "./source[toolchain]"
cp -r "$here/tests/outside/rowkernels" mine
hfk() { .venv/bin/hfk --families mine/kernels.py "$@"; }
took "hfk lint rms_norm" hfk lint rms_norm
took "hfk build rms_norm --arch gfx1100,gfx1201" hfk build rms_norm --arch gfx1100,gfx1201
took "hfk parity rms_norm" hfk parity rms_norm
took "hfk fuzz rms_norm --count 500" hfk fuzz rms_norm --count 500
awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%7.1f s  in all\n", b - a }'
