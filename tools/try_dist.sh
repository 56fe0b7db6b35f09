#!/bin/sh
# usage: tools/try_dist.sh PYTHON DIST
# Install the wheel of folder DIST in a fresh environment and run the sdist's tests on it, in a
# folder that holds no source of recur.
set -eu

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

tar -xzf "$2"/recur-*.tar.gz -C "$scratch"
sdist=$(echo "$scratch"/recur-*)
rm -r "$sdist/recur"

"$1" -m venv "$scratch/env"
python=$scratch/env/bin/python
"$python" -m pip install -qq --upgrade pip
"$python" -m pip install -qq "$2"/recur-*.whl --group "$sdist/pyproject.toml:test"
cd "$sdist"
"$python" -m pytest -q
