#!/usr/bin/env bash
# What an accelerator that nobody has tried can do, in about fifteen minutes: sets up Python and runs `python -m bench.chip`.
#
#   bench/chip.sh                      from a clone, with PyPI
#   bench/chip.sh minutes=9            settings of bench.chip; by default minutes=12
#   bench/chip.sh --fetch [3.12]       on a machine with PyPI: downloads wheels for that Python into .wheels
#   bench/chip.sh                      on a machine without it, with the folder .wheels
#
# Where the Python at hand has a JAX that finds an accelerator, that JAX and its torch are used, with the other packages
# beside them; otherwise a new environment gets all. The machine without PyPI needs such a JAX. Results are in runs/chip,
# and are copied to the folder OUT if that is set. Called again, it measures what is missing or failed.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '/^# /s/^# //p;/^set/q' "$0" && exit ;; esac
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=.venv-chip WHEELS=.wheels
# What pyproject.toml needs beside JAX and what JAX needs.
packages="hydra-core omegaconf PyYAML packaging rich markdown-it-py mdurl Pygments tensorstore jaxtyping wadler_lindig
  typing_extensions einops google-crc32c zarr donfig numcodecs jinja2 markupsafe"

version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "$PYTHON is Python $version; give one with PYTHON=... (3.11 or newer), such as PYTHON=python3.12" >&2
  exit 1
fi
fetch() { # <version of Python>: downloads wheels for it
  local constraints=constraints/py$1.txt platforms=()
  [ -e "$constraints" ] || constraints=/dev/null # newest packages, untested together
  for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  rm -rf "$WHEELS" && mkdir "$WHEELS"
  # shellcheck disable=SC2086
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$1" --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -c "$constraints" -d "$WHEELS" $packages
  # It has no wheel. The one that is built here is for any Python.
  "$PYTHON" -m pip wheel --quiet --no-deps -w "$WHEELS" -c "$constraints" 'antlr4-python3-runtime==4.9.*'
}

if [ "${1:-}" = --fetch ]; then
  fetch "${2:-3.12}"
  exit
fi
if [ ! -d "$WHEELS" ] && "$PYTHON" -c 'import jax, sys; sys.exit(jax.default_backend() == "cpu")' 2>/dev/null; then
  fetch "$version"
fi
if [ -d "$WHEELS" ]; then
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$VENV/wheels" \
    "$WHEELS"/*.whl
  export PYTHONPATH=$PWD/$VENV/wheels${PYTHONPATH:+:$PYTHONPATH}
else
  if [ ! -e "$VENV/.installed" ]; then
    package=. constraints=constraints/py$version.txt
    [ -e "$constraints" ] || constraints=/dev/null
    if command -v nvidia-smi >/dev/null; then
      package='.[cuda]'
    elif ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1; then
      package='.[tpu]'
    fi
    echo "setting up $VENV: some minutes"
    rm -rf "$VENV" && "$PYTHON" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet -e "$package" -c "$constraints"
    touch "$VENV/.installed"
  fi
  PYTHON=$VENV/bin/python
fi
[ -z "${OUT:-}" ] || trap 'cp runs/chip/*.* "$OUT" 2>/dev/null || true' EXIT
PYTHONUNBUFFERED=1 "$PYTHON" -m bench.chip minutes=12 "$@"
