#!/usr/bin/env bash
# On a machine with GPUs, vLLM and megatron-core: the tests of engine, trainer and lanes, and a streamed run.
# usage: bash tools/gpu_check.sh FOLDER       results and logs go to FOLDER; a failed part does not stop the others
set -u
out=${1:?a folder for results}
mkdir -p "$out"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_HOST_IP=127.0.0.1 PYTHONUNBUFFERED=1

part() { # name, seconds, command...
    local name=$1 limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    echo "$name ended with $?" | tee -a "$out/$name.log"
}

tests=(python3 -m pytest -q -p no:cacheprovider)
one_rank="no_token or records or first_update or last_request or read_back or there_and_back"
if [ "$gpus" -ge 2 ]; then
    config=configs/gpu2.yaml chosen="test"
else
    config=configs/gpu1.yaml chosen=$one_rank
fi
# Two at a time: each engine start is half a minute of compiling on one core.
part lanes 300 "${tests[@]}" tests/contract/test_lanes.py tests/contract/test_lane_*.py -k "ipc or nccl or auto" &
part trainer 600 "${tests[@]}" tests/gpu &
part fence 400 "${tests[@]}" tests/engine/test_fence.py -k "$chosen" &
wait
part live 300 "${tests[@]}" tests/engine/test_live.py -k "read_back or there_and_back" &
part stream 300 python3 -m megastream.cli.main quickstart "$config" --out "$out/run" &
wait
tail -n 25 "$out"/{trainer,lanes,fence,live,stream}.log
! grep -hE '^(trainer|lanes|fence|live|stream) ended with [^0]' "$out"/*.log
