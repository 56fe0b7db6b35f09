#!/bin/sh
# usage: tools/venv.sh PYTHON VENV NEEDED_MB
# Make the virtual environment VENV with PYTHON, unless that is what it is.  VENV/made-by holds what
# made it and is written last, so an interrupted, moved or foreign environment is made anew.
set -eu

python=$1
venv=$2

# Inside an activated environment "python3" is the environment's own: what counts is its base.
base=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))' 2>/dev/null) ||
    base=$python
maker="$base $("$base" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || true) in $(pwd)"
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/made-by" 2>/dev/null)" = "$maker" ]; then
    exit 0
fi

sh "$(dirname "$0")/check.sh" "$base" "$3"
echo "recur: making $venv with $base"
"$base" -m venv --clear "$venv"
"$venv/bin/python" -m pip install -qq --upgrade pip
echo "$maker" >"$venv/made-by"
