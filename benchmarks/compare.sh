#!/bin/sh
# usage: benchmarks/compare.sh PYTHON ENVIRONMENTS RESULTS [PART...]
# Measure recur beside other libraries with PYTHON: an environment for each below the folder
# ENVIRONMENTS, made once; JSON into the folder RESULTS, and the tables of docs/benchmarks.md from
# it.  Nothing else should run on the machine meanwhile.
#
# PART is any of
#   environments  install the other libraries, and this source
#   limits        what the machine can do                          RESULTS/limits.json
#   steps         one step of one stream and of 64                 steps.json
#   sequences     whole sequences forward                          sequences.json
#   training      forward, backward, all gradients                 training.json
#   loops         steps in a loop through the tape; growth with T  loops.json, growth.json
#   import        import and installed size                        import.json
#   models        whole models, heads, an optimiser, WeightDrop    tasks.json
#   float64       recur in float64                                 float64.json
#   alone         a Chain's step beside its kernels, subnormals    alone.json
#   drift         weights in fewer bits over 10,000 steps          drift.json
#   page          the tables, from the JSON that is there
# without one all, in this order.  A part takes the limits that are there.
#
# PEERS chooses libraries; OPTIONS is given to peers/run.py, as "--filter T1000".  QUICK=1 measures
# each case once, to see whether everything runs.
set -eu

python=$1
envs=$2
results=$3
shift 3
all="environments limits steps sequences training loops import models float64 alone drift page"
parts=${*:-$all}
here=$(dirname "$0")
peers=${PEERS:-recur,torch,onnxruntime,jax,numpy,onednn,cfloor}
recur=$envs/recur/bin/python
options=${OPTIONS:-}
once=
short=
small=
if [ -n "${QUICK:-}" ]; then
    options="--rounds 1 --budget 0.001 --warm 0 $options"
    once=--once
    short="--rounds 1 --seconds 0.001"
    small="--steps 100"
fi

for part in $parts; do
    case " $all " in
    *" $part "*) ;;
    *)
        echo "recur: no part is called $part; there are: $all" >&2
        exit 2
        ;;
    esac
done

environment() {
    name=$1
    shift
    [ -e "$envs/$name.complete" ] && return
    echo "recur: installing $name into $envs/$name" >&2
    "$python" -m venv "$envs/$name"
    "$envs/$name/bin/python" -m pip --disable-pip-version-check install -qq "$@"
    touch "$envs/$name.complete"
}

environments() {
    mkdir -p "$envs"
    environment numpy numpy scipy
    environment torch torch==2.13.0 numpy scipy
    environment onnxruntime onnxruntime onnx numpy
    environment jax jax jaxlib equinox numpy scipy
    environment onednn onednn-cpu-gomp onednn-devel-cpu-gomp numpy scipy
    environment recur numpy scipy
    [ -e "$envs/cfloor" ] || ln -s numpy "$envs/cfloor"
    "$recur" -m pip --disable-pip-version-check install -qq --no-deps --force-reinstall .
}

# compared NAME WORKLOADS OPTIONS...
compared() {
    name=$1
    workloads=$2
    shift 2
    # $options is split on purpose, as are those below; it comes last, so that it wins.
    "$recur" "$here/peers/run.py" --envs "$envs" --peers "$peers" --workloads "$workloads" \
        --limits-from "$results/limits.json" --json "$results/$name.json" "$@" $options
}

mkdir -p "$results"
for part in $parts; do
    begun=$(date +%s)
    case $part in
    environments) environments ;;
    limits)
        "$recur" "$here/peers/run.py" --envs "$envs" --peers numpy,torch --workloads limits \
            --json "$results/limits.json"
        ;;
    steps) compared steps step,mstep --rounds 4 --budget 0.08 --warm 0.02 ;;
    sequences) compared sequences seq --rounds 5 --budget 0.06 ;;
    training) compared training train --fresh --rounds 5 --budget 0.06 ;;
    loops)
        compared loops loop --rounds 5 --budget 0.1
        compared growth growth --threads 1 --budget 0.1
        ;;
    import) compared import import ;;
    models)
        "$recur" "$here/versus_torch/run.py" --envs "$envs" --json "$results/tasks.json" $short
        ;;
    float64)
        "$recur" "$here/float64.py" "$results/float64.json" --limits-from "$results/limits.json" \
            $short
        ;;
    alone)
        "$recur" "$here/run.py" --filter ChainStep --filter Decay --json "$results/alone.json" $once
        ;;
    drift) "$recur" "$here/drift.py" "$results/drift.json" $small ;;
    page) "$recur" "$here/page.py" "$results" "$here/../docs/benchmarks.md" ;;
    esac
    echo "recur: $part took $(($(date +%s) - begun)) s" >&2
done
