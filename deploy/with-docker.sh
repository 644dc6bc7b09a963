#!/bin/sh
# with-docker.sh COMMAND [ARGUMENT ...]
#
# Runs a command while a Docker engine answers. If none does and this is root, one is started, and ended afterwards.
set -eu

if docker version >/dev/null 2>&1; then
    exec "$@"
fi
if [ "$(id -u)" != 0 ] || ! command -v dockerd >/dev/null; then
    echo "note: no Docker engine answers, and none can be started here" >&2
    exec "$@"
fi

log=$(mktemp)
dockerd >"$log" 2>&1 &
engine=$!
end() {
    kill "$engine" 2>/dev/null || :
    wait "$engine" 2>/dev/null || :
    rm -f "$log"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

tries=0
until docker version >/dev/null 2>&1; do
    tries=$((tries + 1))
    if ! kill -0 "$engine" 2>/dev/null || [ "$tries" -gt 300 ]; then
        echo "error: dockerd does not answer; its last lines:" >&2
        tail -n 5 "$log" >&2
        exit 1
    fi
    sleep 0.2
done
"$@"
