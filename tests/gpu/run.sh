#!/usr/bin/env bash
# Checks pycomm on a machine with one NVIDIA GPU: two ranks share it, without MPI. Fetches nothing.
#   tests/gpu/run.sh                         all steps, within 8 minutes; gpu.json in $OUT or build/
#   tests/gpu/run.sh --only kernels,graph    some of them
#   tests/gpu/run.sh --doubles               all of it on any machine, over the doubles
# PYTHON chooses the interpreter; by default that of .venv, or else python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    if .venv/bin/python -c 'import sys' 2>/dev/null; then
        python=.venv/bin/python
    fi
fi
exec "$python" tests/gpu/check.py "$@"
