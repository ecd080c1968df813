#!/usr/bin/env bash
# Everything there is to learn from a few minutes on a Hopper GPU: correctness of every variant, the benchmark, the page
# relayout, and a short table last. Needs python3 with jax >= 0.11.2 for CUDA 13, flax, jaxtyping, numpy, psutil and rich;
# nothing is installed.
#
#   benchmarks/on_card.sh                      on the card, within 8 minutes
#   benchmarks/on_card.sh --dry-run            the same steps with the XLA implementation on small shapes, on any device
#
# Files go to $OUT (default: on-card/): check.json, bench.json and a log of each step. The exit code is 0 when every
# variant agrees and every goal is met, else 1.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-on-card}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export NPROC=${NPROC:-64}
# torch shares the card with JAX in the benchmark.
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}
# Mosaic GPU needs an assembler; where NVIDIA's wheels do not bring one, the toolkit does.
if [ -x /usr/local/cuda/bin/ptxas ]; then
  export PATH="/usr/local/cuda/bin:$PATH" CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} CUDA_ROOT=${CUDA_ROOT:-/usr/local/cuda}
fi

if [ "${1:-}" = --dry-run ]; then
  check=(--implementation xla --batch 16 --pages 160 --threads 1 --only '*-h64-s1-w513*' --deadline 900)
  bench=(--implementation xla --quick --shapes h8-s1-b1 --time-limit 900)
  relayout=(--dry-run)
  implementation=xla
  patience=6 # a dry run is about the logic, and runs on slow machines
else
  check=(--implementation kernel)
  bench=(--implementation mosaic_gpu)
  relayout=()
  implementation=mosaic_gpu
  patience=1
fi

worst=0
# step SECONDS LOG COMMAND...: runs a command under a time limit and remembers a failure.
step() {
  local limit=$1 log=$2 started=$SECONDS code=0
  shift 2
  echo "== $*"
  timeout --signal=INT --kill-after=10 $((limit * patience)) "$@" > >(tee "$OUT/$log") 2>&1 || code=$?
  wait
  echo "== exit code $code, $((SECONDS - started)) s"
  [ "$code" -eq 0 ] || worst=1
}

# The limits add up to 450 s, so that the whole stays within 8 minutes whatever hangs once.
step 30 versions.txt "$PYTHON" benchmarks/on_card_versions.py
step 160 check.txt "$PYTHON" benchmarks/on_card_check.py --deadline 130 --json "$OUT/check.json" "${check[@]}"
step 210 bench.txt "$PYTHON" -m dots_jax bench --brief --time-limit 175 --save "$OUT/bench.json" "${bench[@]}"
step 45 relayout.txt "$PYTHON" benchmarks/on_card_relayout.py ${relayout[@]+"${relayout[@]}"}
step 5 verdict.txt "$PYTHON" benchmarks/on_card_verdict.py "$OUT/bench.json" "$implementation"

echo
grep -h 'variants agree' "$OUT/check.txt" || echo "the variants were not checked to the end: $OUT/check.txt"
echo "whole run $SECONDS s, worst exit code $worst, files in $OUT"
exit "$worst"
