#!/bin/sh
# usage: tools/check.sh PYTHON NEEDED_MB
# Say in one sentence what is missing on this machine to build recur with PYTHON in NEEDED_MB of disk
# space, and fail; or say nothing.
set -eu

python=$1
needed_mb=$2

refuse() {
    echo "recur: $1" >&2
    exit 1
}

"$python" -c pass >/dev/null 2>&1 || refuse "\"$python\" does not run; install Python 3.10 or later \
(Debian: apt install python3 python3-venv python3-dev) or name another one: make PYTHON=/path/to/python3"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || refuse "\"$python\" is Python \
$version, too old; install Python 3.10 or later and name it: make PYTHON=/path/to/python3"

"$python" -c 'import venv, ensurepip' 2>/dev/null || refuse "\"$python\" has no venv module; \
install it (Debian: apt install python3-venv)"

for folder in . "${TMPDIR:-/tmp}"; do
    free_mb=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024) }')
    [ "$free_mb" -ge "$needed_mb" ] || refuse "only $free_mb MB are free in \"$(cd "$folder" && pwd)\", \
$needed_mb MB are needed; free some space there"
done

compiler=${CC:-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo '#include <stdlib.h>' >"$scratch/libc.c"
echo '#include <Python.h>' >"$scratch/python.c"

# $compiler is a command line ("gcc -pthread"), so it is split on purpose.
$compiler -c "$scratch/libc.c" -o "$scratch/libc.o" >/dev/null 2>&1 || refuse "the C compiler \
\"$compiler\" does not work; install one (Debian: apt install gcc libc6-dev)"

$compiler -I"$headers" -c "$scratch/python.c" -o "$scratch/python.o" >/dev/null 2>&1 || refuse \
"Python.h, the C header of \"$python\", is missing; install it (Debian: apt install python3-dev)"
