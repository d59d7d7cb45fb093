#!/bin/sh
# Installs UCX's libraries from the distribution, where apt is there and this user may use it; elsewhere does nothing.
#
# The last line tells whether UCX is there: `install-ucx: found`, else `install-ucx: not found` with what happened.
set -u

found() {
    ldconfig -p 2>/dev/null | grep -q 'libucp\.so\.0'
}

problem=""
if ! found; then
    if ! command -v apt-get >/dev/null; then
        problem="no apt-get"
    elif [ "$(id -u)" -ne 0 ]; then
        problem="apt-get needs root"
    elif ! log=$(apt-get install -y --no-install-recommends libucx0 2>&1 ||
        { apt-get update && apt-get install -y --no-install-recommends libucx0; } 2>&1); then
        problem="apt-get: $(printf '%s\n' "$log" | tail -1)"
    fi
fi
if found; then
    echo "install-ucx: found"
else
    echo "install-ucx: not found (${problem:-libucp.so.0 is not on the linker's path})"
fi
