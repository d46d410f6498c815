#!/usr/bin/env bash
# Measures throughput on one GPU without a network: our step at three sizes beside PyTorch's and plain JAX's.
#
#   bench/h200.sh --fetch   on a machine with a network: downloads wheels for Python 3.12 into .wheels
#   bench/h200.sh           on the machine with the GPU, with the folder .wheels
#
# The machine has Python 3.12, jax with CUDA, torch and transformers. The other packages are installed from .wheels into
# a temporary folder. Figures are written to $OUT/throughput.txt as they come. OUT is runs/h200 by default. What follows
# is passed on to bench.throughput, such as --sizes 1b.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/h200} PYTHON=${PYTHON:-python3} WHEELS=.wheels
packages="hydra-core omegaconf PyYAML packaging rich markdown-it-py mdurl Pygments tensorstore jaxtyping wadler_lindig
  typing_extensions einops google-crc32c plotly zarr donfig msgspec numcodecs datasets dill multiprocess"

if [ "${1:-}" = --fetch ]; then
  platforms=()
  for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  rm -rf "$WHEELS" && mkdir "$WHEELS"
  # shellcheck disable=SC2086
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -c constraints/py3.12.txt \
    -d "$WHEELS" $packages
  # It has no wheel. The one that is built here is for any Python.
  "$PYTHON" -m pip wheel --quiet --no-deps -w "$WHEELS" "$(grep -i '^antlr4-python3-runtime==' constraints/py3.12.txt)"
  exit
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl
mkdir -p "$OUT"
PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 "$PYTHON" -m bench.throughput --platform gpu --rounds 3 \
  "$@" | tee "$OUT/throughput.txt"
