#!/usr/bin/env bash
# What only a GPU can show, in under eight minutes: a line per check with PASS, FAIL or SKIP; exit code 1 when one fails.
#   benchmarks/gpu_check.sh                       on the first CUDA device; without one it says so and exits 0
#   benchmarks/gpu_check.sh --device cpu --small  the same code on the CPU
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH=$PWD exec timeout 470 "${PYTHON:-python}" benchmarks/gpu_check.py "$@"
