#!/bin/sh
# Installs what the tests use beyond Python: Java and Maven for the broker, Docker's engine and Compose for containers,
# bubblewrap and what boxes hold for sandboxes.
#
# On Debian and its relatives, as root. Elsewhere it says what is missing and goes on: what needs it is skipped.
set -eu

missing=
want() {
    missing="$missing $1"
}

# The distribution's own Java and Python, because test images are packed from its packages.
ls /usr/lib/jvm/java-*-openjdk-*/bin/java >/dev/null 2>&1 || want default-jre-headless
/usr/bin/python3 -c 'import ensurepip' 2>/dev/null || want python3-venv
command -v mvn >/dev/null || want maven
docker version >/dev/null 2>&1 || command -v dockerd >/dev/null || want docker.io
docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null || want docker-compose
command -v bwrap >/dev/null || want bubblewrap
# What the image for sandboxes is packed from, and what boxes without an image run.
command -v git >/dev/null || want git
command -v patch >/dev/null || want patch
/usr/bin/python3 -c 'import pytest' 2>/dev/null || want python3-pytest
# Installs the agents' programs that tests play with.
command -v npm >/dev/null || want npm

[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "note: missing here, under the names of Debian's packages:$missing" >&2
    exit 0
fi
echo "installing$missing"
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
apt-get update -qq
# shellcheck disable=SC2086 # a list
apt-get install -y -qq --no-install-recommends $missing >/dev/null
