#!/usr/bin/env bash
# Every kernel under compute-sanitizer's memcheck, racecheck, initcheck and synccheck, side by side. Exit status 0: all clean.
#
#     bash tests/gpu/sanitize.sh [SECONDS, default 90]
#
# A first run without a tool compiles the kernels into CuPy's disk cache, so that the tools do not time NVRTC.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

limit=${1:-90}
python=${PYTHON:-python}
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
[ -n "$sanitizer" ] || { echo "compute-sanitizer is not there (it comes with the CUDA toolkit)" >&2; exit 2; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" tests/gpu/small_run.py --list || { echo "the run without a tool fails" >&2; exit 1; }

declare -A process
for tool in memcheck racecheck initcheck synccheck; do
  timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 5 --launch-timeout 0 \
    "$python" tests/gpu/small_run.py >"$folder/$tool" 2>&1 &
  process[$tool]=$!
done
status=0
for tool in memcheck racecheck initcheck synccheck; do
  wait "${process[$tool]}"
  code=$?
  [ $code -eq 0 ] || status=1
  echo "=== $tool: exit status $code; $(grep -c '^========= ' "$folder/$tool") lines; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$folder/$tool" | tail -1)"
  if [ $code -ne 0 ]; then head -60 "$folder/$tool"; fi
done
exit $status
