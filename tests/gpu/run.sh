#!/usr/bin/env bash
# What only a CUDA device can show: equality, memory refusals, bf16. At most 5 minutes; where there is no device each
# test is skipped with a word and the exit code is 0.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
[ -x "$PYTHON" ] || PYTHON=python3
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # deterministic matrix products, as executors have them
exec timeout -k 10 300 "$PYTHON" -m pytest tests/gpu -m gpu -rs --timeout 150 "$@"
