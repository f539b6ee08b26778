#!/bin/sh
# Installs the programs that tests use and that PyPI does not have, where this user may.
# The tests that need one say so by name when it is missing.
set -eu
missing=""
command -v gmx >/dev/null 2>&1 || missing="$missing gromacs gromacs-data"
command -v redis-server >/dev/null 2>&1 || missing="$missing redis-server"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
else
    echo "Please install:$missing (Debian names); tests that need them will fail without." >&2
fi
