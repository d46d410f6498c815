#!/usr/bin/env bash
# Measures throughput on one H200 in ten minutes: our step at three sizes, with and without the mask of documents, beside
# PyTorch's; the time of each kind of kernel beside the least by the compiled program; other settings; the peers in JAX.
#
#   bench/h200.sh --fetch            on a machine with a network: downloads wheels for Python 3.12 into .wheels
#   bench/h200.sh                    on the machine with the GPU, with the folder .wheels; needs no network
#   bench/h200.sh --tries            measures the other settings alone, at TRY_SIZES, in another ten minutes
#   bench/h200.sh --cpu              the same at tiny shapes on a CPU; the default where there is no GPU
#   … --extra-settings key=value,…        another setting to measure; may be given several times
#
# The machine has Python 3.12, jax with CUDA, torch and transformers. Other packages that are missing are installed from
# .wheels into a temporary folder. Figures are written to $OUT/throughput.json as they come, and the output to
# $OUT/throughput.txt. OUT is runs/h200 by default. BUDGET is in seconds, PYTHON the interpreter. Each part of the
# measurement ends by a share of BUDGET, whatever is not done; what it leaves is the next one's.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/h200} PYTHON=${PYTHON:-python3} BUDGET=${BUDGET:-570} WHEELS=.wheels

# The most important first. For what no time is left, a line is printed.
SIZES=${SIZES:-124m,2b,1b}
TRY_SIZES=${TRY_SIZES:-124m}
masks=(
  training.document_mask=true
)
tries=(
  hardware.compiler_options.xla_gpu_exclude_nondeterministic_ops=false
  training.fp8=true
  training.unroll=1
  training.loss_chunk=128
  training.save=dots
  training.save=everything
  sequences=128
  training.attention=blockwise
  training.attention=einsum
  training.loss_chunk=128,sequences=128
  training.save=nothing
)

# Module and package of each import of our trainer, without jax, torch and transformers.
packages="
hydra        hydra-core
omegaconf    omegaconf
antlr4       antlr4-python3-runtime
yaml         PyYAML
packaging    packaging
rich         rich
markdown_it  markdown-it-py
mdurl        mdurl
pygments     Pygments
tensorstore  tensorstore
jaxtyping    jaxtyping
wadler_lindig wadler_lindig
typing_extensions typing_extensions
"

fetch() {
  local constraints=constraints/py3.12.txt names wanted
  names=$(awk 'NF { print $2 }' <<<"$packages" | grep -v antlr4)
  local platforms=()
  for glibc in 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  rm -rf "$WHEELS" && mkdir "$WHEELS"
  # shellcheck disable=SC2086
  "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -c "$constraints" -d "$WHEELS" $names
  # It has no wheel. The one that is built here is for any Python.
  wanted=$(grep -i '^antlr4-python3-runtime==' "$constraints")
  "$PYTHON" -m pip wheel --quiet --no-deps -w "$WHEELS" "$wanted"
  du -sh "$WHEELS"
  [ "$(du -sm "$WHEELS" | cut -f1)" -lt 60 ] || { echo "$WHEELS is too large to copy"; exit 1; }
}

# Prints the wheels of missing packages. Exits with 1, and says what to do, if there is no wheel for one.
missing_wheels() {
  "$PYTHON" - "$WHEELS" <<PYTHON
import importlib.util, pathlib, re, sys
table = [line.split() for line in """$packages""".splitlines() if line.strip()]
plain = lambda name: re.sub(r"[-_.]+", "_", name).lower()
wheels = {plain(path.name.split("-")[0]): path for path in pathlib.Path(sys.argv[1]).glob("*.whl")}
lacking = [package for module, package in table if importlib.util.find_spec(module) is None]
absent = [package for package in lacking if plain(package) not in wheels]
print(*(wheels[plain(package)] for package in lacking if plain(package) in wheels), sep="\n")
if absent:
    sys.exit(
        f"This Python has no {', '.join(absent)}, nor are there wheels of them in {sys.argv[1]}. On a machine with a network:\n"
        f"    bench/h200.sh --fetch\nand copy {sys.argv[1]} to this one; or here:\n    pip install {' '.join(absent)}"
    )
PYTHON
}

mode=all platform=auto extra=()
while [ $# -gt 0 ]; do
  case "$1" in
    --fetch) fetch; exit ;;
    --tries) mode=tries ;;
    --cpu) platform=cpu ;;
    --extra-settings) extra+=("$2"); shift ;;
    *) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit 2 ;;
  esac
  shift
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
wheels=$(missing_wheels)
if [ -n "$wheels" ]; then
  # shellcheck disable=SC2086
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
    --target "$scratch/site" $wheels
  export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
nvidia-smi -L 2>/dev/null || platform=cpu
common=(--platform gpu --rounds 3 --seconds 1.5 --limit 150)
if [ "$platform" = cpu ]; then
  SIZES=tiny TRY_SIZES=tiny
  common=(--platform cpu --one-at-a-time --dtype bf16 --rounds 2 --seconds 0.2 --limit 100)
fi
IFS=, read -ra sizes <<<"$SIZES"
mkdir -p "$OUT"
rm -f "$OUT/throughput.json" "$OUT/throughput.txt"

measure() { # <share of BUDGET, in percent, by which it ends> <arguments>
  local left=$((BUDGET * $1 / 100 - SECONDS))
  shift
  PYTHONUNBUFFERED=1 "$PYTHON" -m bench.throughput "${common[@]}" --json "$OUT/throughput.json" --deadline "$left" "$@" \
    2>&1 | tee -a "$OUT/throughput.txt" || echo "this part failed; continuing with the next"
}

settings() { # <setting>…: the arguments that measure each
  for setting in "$@"; do arguments+=(--extra-settings "$setting"); done
}

if [ "$mode" = all ]; then
  arguments=() && settings "${masks[@]}"
  measure 35 --sizes "${sizes[0]}" --only ours --parts "${arguments[@]}"
  for i in "${!sizes[@]}"; do
    measure $((35 + 40 * (i + 1) / ${#sizes[@]})) --sizes "${sizes[i]}" --only ours,torch --parts
  done
  measure 87 --sizes "${sizes[0]}" --only torch-max-autotune
fi
arguments=() && settings "${extra[@]}" "${tries[@]}"
if [ "$mode" = all ]; then until=95; else until=100; fi
measure "$until" --sizes "$TRY_SIZES" --only ours --parts "${arguments[@]}"
if [ "$mode" = all ]; then
  measure 100 --sizes "${sizes[0]}" --only cookbook
fi
echo "$SECONDS s. Send back the folder $OUT: throughput.json has all figures, throughput.txt the tables."
