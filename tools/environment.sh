# Sourced by the other tools: an own virtual environment with what they need, made once.
#
#   source tools/environment.sh EXTRA      # "demo" or "test"; sets $PYTHON
#
# On a terminal pip shows its progress; PIP_PROGRESS=off keeps it quiet there too.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="$1"
stamp=".venv/.installed-$extra"
wanted="$(cat setup.cfg constraints.txt | cksum)"

if [ ! -x .venv/bin/python ]; then
    base=""
    for candidate in python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            base="$candidate"
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "fxamp needs Python 3.11 or 3.12, and none is on PATH" >&2
        exit 1
    fi
    echo "making .venv with $("$base" --version)"
    if ! "$base" -m venv .venv; then
        rm -rf .venv
        echo "$base cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
fi
PYTHON="$PWD/.venv/bin/python"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
    echo "installing fxamp[$extra] (torch is about 200 MB)"
    if [ -t 1 ] && [ "${PIP_PROGRESS:-on}" != off ]; then
        how=(--progress-bar on)
    else
        how=(--progress-bar off --quiet)
    fi
    "$PYTHON" -m pip install "${how[@]}" -c constraints.txt -e ".[$extra]"
    echo "$wanted" > "$stamp"
fi
