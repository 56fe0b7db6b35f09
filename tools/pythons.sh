#!/bin/sh
# usage: tools/pythons.sh [VERSION...]
# Print "VERSION PATH" for a CPython of each VERSION (3.10 to 3.14 unless given) that can build recur.
# Each candidate is run, not only looked up: a name on PATH may be a shim that starts nothing.
set -u

[ $# -gt 0 ] || set -- 3.10 3.11 3.12 3.13 3.14

candidates() {
    echo "$PATH" | tr ':' '\n' | sed "s|\$|/python$1|"
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.local/share/uv/python" /opt/python; do
        ls -d "$folder"/*/bin/"python$1" 2>/dev/null
    done
    command -v python3
}

works() {
    "$2" - "$1" >/dev/null 2>&1 <<'EOF'
import ensurepip, os, sys, sysconfig, venv
assert sys.implementation.name == "cpython"
assert "%d.%d" % sys.version_info[:2] == sys.argv[1]
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
EOF
}

found=1
for version in "$@"; do
    path=$(candidates "$version" | while read -r candidate; do
        if [ -x "$candidate" ] && works "$version" "$candidate" </dev/null; then
            echo "$candidate"
            break
        fi
    done)
    if [ -n "$path" ]; then
        echo "$version $path"
        found=0
    fi
done
[ $found -eq 0 ] || echo "recur: no CPython among $* runs here with venv and Python.h; install one" >&2
exit $found
