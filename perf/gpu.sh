#!/usr/bin/env bash
# One part of the measurements on a GPU machine, each inside nine minutes, with nothing to install:
#   perf/gpu.sh correctness   the tests that run kernels, on the device
#   perf/gpu.sh opinfo        torch's op database, on the device
#   perf/gpu.sh blocks        every block: eager, captured, fused, a copy
#   perf/gpu.sh kernels [SELECTOR]   reductions at every size: eager, torch.compile, fusejit, a copy; the most telling cases first
#   perf/gpu.sh peer          every block with torch.compile
#   perf/gpu.sh models        blocks of transformers, eager and fused
#   perf/gpu.sh compile       capture, codegen, kernels
#   perf/gpu.sh launch [SELECTOR]   host time of a call: one kernel, modules, with and without gradients
#   perf/gpu.sh seeds         the seeds' figures: select, vmap, lazy inline, HyperMap AdamW with torch's own fused step; a table at the end
#   perf/gpu.sh bench         the table of `fusejit bench`
# Needs Python 3.11+, torch, triton, numpy, jinja2, pytest, pytest-benchmark, and transformers for models and compile. Writes one JSON a part to
# $OUT (perf/results unless set); set FUSEJIT_COMMIT where the tree has no git.
# kernels starts no case after $BUDGET seconds (430), says the number of the next one, and goes on there with FROM=number; SELECTOR is what
# pytest's -k takes ("softmax and bfloat16"). Rows are written to the JSON's .jsonl sibling as they come: perf/scripts/report.py reads both.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?usage: perf/gpu.sh correctness|opinfo|blocks|kernels|peer|models|compile|launch|seeds|bench}
out=${OUT:-perf/results}
mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}
# Read the device by its own name, so that results of two kinds of machine never share a file.
device=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace("nvidia ", "").split()[0] if torch.cuda.is_available() else "cpu")')
json="$out/$device-$part.json"
limit() { timeout --kill-after=10 530 "$@"; }
benchmarks() { limit "$python" -m pytest -q -p no:cacheprovider --override-ini addopts= --benchmark-json="$json" --benchmark-columns=median,min,rounds "$@"; }

case $part in
  correctness) limit "$python" -m pytest -q -n 0 -m gpu tests --ignore=tests/laws/test_opinfo.py --junitxml="$out/$device-$part.xml" ;;
  opinfo) limit "$python" -m pytest -q -n 0 -m gpu tests/laws/test_opinfo.py --junitxml="$out/$device-$part.xml" ;;
  blocks) benchmarks perf/bench/test_blocks.py::test_block -k "not torch.compile" ;;
  kernels)
    json="$out/$device-$part${FROM:+-from-$FROM}.json"
    export PERF_BUDGET=${BUDGET:-430} PERF_FROM=${FROM:-0} PERF_JOURNAL="${json}l"
    rm -f "$PERF_JOURNAL"
    benchmarks perf/bench/test_kernels.py --tb=line --show-capture=no --benchmark-quiet -rs -k "${2:-test_kernel}" ;;
  peer) benchmarks perf/bench/test_blocks.py::test_block -k torch.compile ;;
  models) benchmarks perf/bench/test_blocks.py::test_model ;;
  compile) benchmarks perf/bench/test_compile.py ;;
  launch) benchmarks perf/bench/test_launch.py -k "${2:-test_call}" ;;
  seeds) benchmarks perf/bench/test_seeds.py --benchmark-quiet ;;
  bench) limit "$python" -m fusejit bench --json "$json" ;;
  *) echo "no part $part" >&2; exit 2 ;;
esac
