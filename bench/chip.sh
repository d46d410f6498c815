#!/usr/bin/env bash
# What an accelerator that nobody has tried can do, in about fifteen minutes: sets up Python and runs `python -m tools.chip`.
#
#   bench/chip.sh                      from a clone, with PyPI
#   bench/chip.sh minutes=9            settings of tools.chip; by default minutes=12
#   bench/chip.sh --fetch [3.12]       on a machine with PyPI: downloads wheels for that Python into .wheels
#   bench/chip.sh                      on a machine without it, with the folder .wheels
#
# Where the Python at hand has a JAX that finds an accelerator, that JAX is used, and its torch; otherwise a new
# environment gets one. The machine without PyPI needs such a JAX. Results are in runs/chip, and are copied to the folder
# OUT if that is set. Called again, it measures what is missing or failed.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=.venv-chip WHEELS=.wheels
# What pyproject.toml needs beside JAX and what JAX needs.
packages="hydra-core omegaconf PyYAML packaging rich markdown-it-py mdurl Pygments tensorstore jaxtyping wadler_lindig
  typing_extensions einops google-crc32c plotly narwhals zarr donfig numcodecs jinja2 markupsafe"

if [ "${1:-}" = --fetch ]; then
  version=${2:-3.12} platforms=()
  for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  rm -rf "$WHEELS" && mkdir "$WHEELS"
  # shellcheck disable=SC2086
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -c "constraints/py$version.txt" \
    -d "$WHEELS" $packages
  # It has no wheel. The one that is built here is for any Python.
  "$PYTHON" -m pip wheel --quiet --no-deps -w "$WHEELS" "$(grep -i '^antlr4-python3-runtime==' "constraints/py$version.txt")"
  exit
fi
if [ -d "$WHEELS" ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$VENV/wheels" "$WHEELS"/*.whl
  export PYTHONPATH=$PWD/$VENV/wheels${PYTHONPATH:+:$PYTHONPATH}
elif [ -e "$VENV/.installed" ]; then
  PYTHON=$VENV/bin/python
else
  constraints=constraints/py$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
  [ -e "$constraints" ] || constraints=/dev/null # newest packages, untested together
  options=() extras=tools other='^$'
  if "$PYTHON" -c 'import jax, sys; sys.exit(jax.default_backend() == "cpu")' 2>/dev/null; then
    options=(--system-site-packages) other='^(jax|jaxlib|numpy|scipy|ml_dtypes|torch|transformers)=='
  elif command -v nvidia-smi >/dev/null; then
    extras=tools,cuda
  elif ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1; then
    extras=tools,tpu
  fi
  echo "setting up $VENV with the extras $extras: some minutes"
  rm -rf "$VENV" && "$PYTHON" -m venv "${options[@]}" "$VENV"
  # The versions of a JAX that stays, and of what it needs, are those that it has.
  grep -vE "$other" "$constraints" >"$VENV/constraints.txt" || true
  PYTHON=$VENV/bin/python
  "$PYTHON" -m pip install --quiet -e ".[$extras]" -c "$VENV/constraints.txt"
  touch "$VENV/.installed"
fi
[ -z "${OUT:-}" ] || trap 'cp runs/chip/*.* "$OUT" 2>/dev/null || true' EXIT
PYTHONUNBUFFERED=1 "$PYTHON" -m tools.chip minutes=12 "$@"
