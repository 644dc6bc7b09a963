#!/bin/sh
# Makes an installation ready for its workers: data directory, sealing key, topics. Can be run again at any time.
#
# Started as root, it hands the data directory to ROLLSTREAM_USER (UID:GID) if nobody has it yet, and goes on as that user.
set -eu
data_dir=${ROLLSTREAM_DATA_DIR:?}
user=${ROLLSTREAM_USER:-1000:1000}

if [ -d rollstream.toml ]; then
    echo "error: ROLLSTREAM_CONFIG names a settings file that does not exist on the host" >&2
    exit 1
fi
if [ -d "$data_dir/broker" ] || [ -d "$data_dir/broker-docker" ]; then
    echo "error: the data directory belongs to an embedded broker's log, and its store to that log;" \
        "name another one, such as ROLLSTREAM_DATA_DIR=./.rollstream-compose" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ] && [ "${user%:*}" != 0 ]; then
    # Docker makes a mounted directory that was missing, and makes it root's.
    if [ "$(stat -c %u "$data_dir")" = 0 ]; then
        chown "$user" "$data_dir"
    fi
    exec setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups "$0"
fi
if [ ! -w "$data_dir" ]; then
    echo "error: the data directory belongs to uid $(stat -c %u "$data_dir"), but ROLLSTREAM_USER is $user;" \
        "start again with ROLLSTREAM_USER=$(stat -c %u:%g "$data_dir")" >&2
    exit 1
fi

python3 -c 'from rollstream.sealing import load_sealer; from rollstream.settings import load_settings; load_sealer(load_settings())'
# A broker opens its port a moment before it can hold topics, so what is created is also looked at.
tries=0
until rollstream topics ensure && rollstream topics describe; do
    tries=$((tries + 1))
    [ "$tries" -lt 10 ] || exit 1
    sleep 1
done
