#!/usr/bin/env bash
# Every kernel under compute-sanitizer's memcheck, racecheck, initcheck and synccheck, side by side. Exit status 0: all clean.
#
#     bash tests/gpu/sanitize.sh [SECONDS, default 240]
#
# Before the tools, kernels are compiled into CuPy's disk cache, and runs without a tool show that results are right and
# that every kernel runs. Each tool then has a process for each slice.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

limit=${1:-240}
python=${PYTHON:-python}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
[ -n "$sanitizer" ] || { echo "compute-sanitizer is not there (it comes with the CUDA toolkit)" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Many processes at a time, each with small arrays: threads of their own would only be in each other's way.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
slices="sinkhorn sparse_indices sparse_attention indexer"
declare -A process

"$python" tests/gpu/warm.py
"$python" tests/gpu/warm.py --racecheck
for slice in $slices; do
  timeout "$limit" "$python" tests/gpu/small_run.py --slice $slice --list >"$folder/plain.$slice" 2>&1 &
  process[$slice]=$!
done
status=0
for slice in $slices; do
  wait "${process[$slice]}" || { status=1; echo "the run of $slice without a tool fails" >&2; }
  cat "$folder/plain.$slice"
done
[ $status = 0 ] || exit 1

tools="memcheck racecheck initcheck synccheck"
for slice in sparse_attention indexer sparse_indices sinkhorn; do
  for tool in $tools; do
    options=(--tool "$tool" --error-exitcode 9 --print-limit 5)
    # Numba asks the driver for functions that it may lack, which is no error; the package raises at every other.
    [ $tool = memcheck ] && options+=(--report-api-errors no)
    run=("$python" tests/gpu/small_run.py --slice $slice)
    [ $tool = racecheck ] && run+=(--racecheck)
    timeout "$limit" "$sanitizer" "${options[@]}" "${run[@]}" >"$folder/$tool.$slice" 2>&1 &
    process[$tool.$slice]=$!
  done
done
for tool in $tools; do
  for slice in $slices; do
    log=$folder/$tool.$slice
    wait "${process[$tool.$slice]}"
    code=$?
    [ $code -eq 0 ] || status=1
    calls=$(grep -E '^[0-9]+ calls' "$log")
    echo "$tool, $slice: exit status $code; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -1); ${calls:-no end}"
    if [ $code -ne 0 ]; then head -60 "$log"; fi
  done
done
exit $status
