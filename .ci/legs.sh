#!/usr/bin/env bash
# Run the tests, on more than one server: what `make test` and `make test-all` do after `make check`.
#
#     .ci/legs.sh test    the quick suite on the server that tests find (PGWORKER_TEST_DSN, a Docker engine, the embedded
#                         wheel); then those that talk to it in a container, on PostgreSQL 14, and on a hostile database
#     .ci/legs.sh all     the same with slow tests, on PostgreSQL 14 to 18, and the quick suite on Python 3.11 to 3.13
#
# A leg that cannot run here says so in one line; with PGWORKER_REQUIRE_ENGINE=1 that is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
workers=${WORKERS:-$(nproc)}
out=tests/out
mkdir -p "$out"

leg() { # NAME [ENV-ARGUMENT...] -- [PYTEST-ARGUMENT...]
    local name=$1 surroundings=()
    shift
    while [[ $1 != -- ]]; do surroundings+=("$1"); shift; done
    shift
    echo "== $name"
    env "${surroundings[@]}" "$venv/bin/python" -m pytest -q -n "$workers" --junitxml="$out/$name.xml" "$@"
}

cannot() { # NAME REASON
    echo "leg $1 cannot run here: $2"
    [[ ${PGWORKER_REQUIRE_ENGINE:-0} != 1 ]] || exit 1
}

# Each integration test that passed in the suite must have passed in the leg: a leg that skips its tests is no leg.
compare() { # LEG
    "$venv/bin/python" - "$out/suite.xml" "$out/$1.xml" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree

def passed(path):
    cases = tree.parse(path).iter("testcase")
    names = {f"{case.get('classname')}::{case.get('name')}" for case in cases if len(case) == 0 or case[0].tag.startswith("system")}
    return {name for name in names if name.startswith("tests.integration.")}

suite, leg = map(passed, sys.argv[1:])
print(f"integration tests passed: {len(suite)} in the suite, {len(leg)} in this leg")
if lost := sorted(suite - leg):
    sys.exit("passed in the suite only: " + " ".join(lost))
PYTHON
}

container() { # MAJOR
    local name=container-$1 image=postgres:$1
    if [[ -z ${PGWORKER_TEST_DSN:-}${PGWORKER_TEST_SERVER:-} ]] && docker info >/dev/null 2>&1; then
        echo "leg $name: nobody chose a server, so the suite has just run on this engine"
        return
    fi
    docker info >/dev/null 2>&1 || { cannot "$name" "no Docker engine answers"; return; }
    docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" >/dev/null 2>&1 ||
        { cannot "$name" "no image $image, and it cannot be pulled"; return; }
    leg "$name" -u PGWORKER_TEST_DSN PGWORKER_TEST_SERVER=container PGWORKER_TEST_PG="$1" -- tests/integration
    compare "$name"
}

binaries() { # MAJOR PYTEST-ARGUMENT...
    local name=postgres-$1 bin
    bin=$(PYTHON=$venv/bin/python .ci/postgres-binaries.sh "$1" 2>&1 | tail -n 1) || { cannot "$name" "$bin"; return; }
    shift
    leg "$name" -u PGWORKER_TEST_DSN PGWORKER_TEST_SERVER=embedded PGWORKER_TEST_BIN_DIR="$bin" -- "$@"
}

python_of() { # X.Y: an interpreter of that version, from PATH or pyenv
    local candidate
    for candidate in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
        "$candidate" -c 'import sys' >/dev/null 2>&1 && { echo "$candidate"; return; }
    done
    return 1
}

on_python() { # X.Y
    local name=python-$1 found
    found=$(python_of "$1") || { cannot "$name" "no Python $1 on PATH"; return; }
    make --no-print-directory venv VENV=".venv-$1" PYTHON="$found"
    venv=.venv-$1 leg "$name" --
}

case ${1:-} in
    test)
        leg suite --
        container 18
        binaries 14 tests/integration tests/plans
        leg hostile PGWORKER_TEST_HOSTILE=1 -- tests/integration
        ;;
    all)
        leg suite -- -m 'not soak'
        container 18
        for major in 14 15 16 17 18; do binaries "$major" -m 'not soak' tests; done
        leg hostile PGWORKER_TEST_HOSTILE=1 -- -m 'not soak' tests/integration
        for version in 3.11 3.12 3.13; do on_python "$version"; done
        ;;
    *) sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | grep '^#' | cut -c3-; exit 2 ;;
esac
