#!/bin/sh
# usage: benchmarks/compare.sh PYTHON ENVIRONMENTS RESULTS
# Measure recur beside other libraries with PYTHON: an environment for each below the folder
# ENVIRONMENTS, made once; JSON and tables.md into the folder RESULTS.  Nothing else should run on
# the machine meanwhile.
set -eu

python=$1
envs=$2
results=$3
here=$(dirname "$0")
peers=${PEERS:-recur,torch,onnxruntime,jax,numpy,onednn,cfloor}

environment() {
    name=$1
    shift
    [ -e "$envs/$name.complete" ] && return
    echo "recur: installing $name into $envs/$name" >&2
    "$python" -m venv "$envs/$name"
    "$envs/$name/bin/python" -m pip --disable-pip-version-check install -qq "$@"
    touch "$envs/$name.complete"
}

mkdir -p "$envs" "$results"
environment numpy numpy scipy
environment torch torch==2.13.0 numpy scipy
environment onnxruntime onnxruntime onnx numpy
environment jax jax jaxlib equinox numpy scipy
environment onednn onednn-cpu-gomp onednn-devel-cpu-gomp numpy scipy
environment recur numpy scipy
[ -e "$envs/cfloor" ] || ln -s numpy "$envs/cfloor"
"$envs/recur/bin/python" -m pip --disable-pip-version-check install -qq --no-deps --force-reinstall .

recur=$envs/recur/bin/python
"$recur" "$here/peers/run.py" --envs "$envs" --peers "$peers" --json "$results/peers.json"
"$recur" "$here/peers/run.py" --envs "$envs" --peers "$peers" --workloads train --fresh \
    --limits-from "$results/peers.json" --json "$results/train-fresh.json"
"$recur" "$here/versus_torch/run.py" --envs "$envs" --json "$results/tasks.json"
"$recur" "$here/float64.py" "$results/float64.json" --limits-from "$results/peers.json"
"$recur" "$here/run.py" --json "$results/suite.json"
"$recur" "$here/page.py" "$results"
echo "recur: $results/tables.md"
