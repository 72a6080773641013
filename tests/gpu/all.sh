#!/usr/bin/env bash
# Everything that needs a GPU, what finds defects soonest first. Logs and records go to FOLDER; exit status 0: all passed.
#
#     bash tests/gpu/all.sh [FOLDER, default gpu-run]
#
# Kernels are compiled first, in many processes: test processes then find them in CuPy's disk cache. A CUDA error that
# poisons a process fails every later test of that worker, so look at the first failure of each worker in failures.log.
set -uo pipefail
folder=$(realpath -m "${1:-gpu-run}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$folder"
python=${PYTHON:-python}
processes=${TEST_PROCESSES:-$(($(nproc) > 14 ? 14 : $(nproc)))}
failed=()

step() { # NAME COMMAND...: runs it into NAME.log
    local name=$1
    shift
    local start=$SECONDS
    "$@" > "$folder/$name.log" 2>&1 || failed+=("$name")
    echo "$name: $((SECONDS - start)) s, $(tail -n 1 "$folder/$name.log" | cut -c1-150)"
}

cudnn=tests/test_sparse_attention_cudnn_gpu.py
step warm "$python" tests/gpu/warm.py
# Without what has steps of its own below. With "=", or pytest takes the file's folder for the tests'.
step suite "$python" -m pytest -q -m gpu --require-gpu -n "$processes" --dist worksteal --tb=short --durations=15 \
    --failures="$folder/failures.log" --deselect $cudnn -k "not find_nothing"
step fuzz "$python" tests/fuzz.py --device cuda --jobs 8 --cases 10400 --seconds 150 --seed 1
step cudnn "$python" -m pytest -q --require-gpu -n 8 --dist load --tb=short --failures="$folder/failures_cudnn.log" $cudnn
step sanitize bash tests/gpu/sanitize.sh 240
step long "$python" tests/gpu/check_long.py
step repeats "$python" tests/gpu/check_repeats.py
step attention "$python" tests/gpu/check_attention_fwd.py # S65536 beside S4096, per query
step bench "$python" -m dsv4cp bench --peers --record "$folder/bench.json" --plot "$folder/bench.png"
echo "failed: ${failed[*]:-nothing}"
[ ${#failed[@]} = 0 ]
