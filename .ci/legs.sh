#!/usr/bin/env bash
# Run the tests, on more than one server: what `make test` and `make test-all` do after `make check`.
#
#     .ci/legs.sh test            the quick suite on the server that tests find (PGWORKER_TEST_DSN, a Docker engine, the
#                                 embedded wheel); with PGWORKER_REQUIRE_ENGINE=1 then the legs `container` and
#                                 `compose`, and tests/integration on a hostile database on PostgreSQL 14
#     .ci/legs.sh all             every leg, with slow tests, PostgreSQL 14 to 18 and Python 3.11 to 3.13
#     .ci/legs.sh LEG [VERSION]   one of them: suite, hostile, container, compose, postgres 14, python 3.12
#
# A leg that cannot run here says so in one line; with PGWORKER_REQUIRE_ENGINE=1 that is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
workers=${WORKERS:-$(($(nproc) + 1))} # one more than cores: tests wait more than they compute, and some mind a crowd
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

required() { [[ ${PGWORKER_REQUIRE_ENGINE:-0} == 1 ]]; }

cannot() { # NAME REASON
    echo "leg $1 cannot run here: $2"
    ! required || exit 1
}

# Each integration test that passed in the suite must have passed in the leg: a leg that skips its tests is no leg.
# Excused is only what reads the server's own log, which a container keeps to itself.
compare() { # LEG
    "$venv/bin/python" - "$out/suite.xml" "$out/$1.xml" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree

def tests(path, wanted):
    names = {f"{case.get('classname')}::{case.get('name')}" for case in tree.parse(path).iter("testcase") if wanted(case)}
    return {name for name in names if name.startswith("tests.integration.") and ".test_embedded::" not in name
            and ".test_bench::" not in name}

def passed(case):
    return len(case) == 0 or case[0].tag.startswith("system")

def excused(case):
    return len(case) > 0 and case[0].tag == "skipped" and "the server's log cannot be read here" in case[0].get("message", "")

suite, leg, spared = tests(sys.argv[1], passed), tests(sys.argv[2], passed), tests(sys.argv[2], excused)
print(f"integration tests passed: {len(suite)} in the suite, {len(leg)} in this leg, {len(spared)} excused")
if lost := sorted(suite - leg - spared):
    sys.exit("passed in the suite only: " + " ".join(lost))
PYTHON
}

engine() { # NAME IMAGE...: whether a Docker engine answers that has these images, or can get them
    local name=$1 image
    shift
    docker info >/dev/null 2>&1 || { cannot "$name" "no Docker engine answers"; return 1; }
    for image; do
        docker image inspect "$image" >/dev/null 2>&1 || docker pull --quiet "$image" >/dev/null 2>&1 ||
            { cannot "$name" "no image $image, and it cannot be pulled"; return 1; }
    done
}

# What a leg on another server runs. (The embedded server's own tests would start the same wheel again; a benchmark does
# nothing on it that the rest does not.)
integration=(tests/integration --ignore=tests/integration/test_embedded.py --ignore=tests/integration/test_bench.py)

on_container() { # MAJOR
    local name=container-$1
    engine "$name" "postgres:$1" || return 0
    if [[ -z ${PGWORKER_TEST_DSN:-}${PGWORKER_TEST_SERVER:-} ]]; then
        echo "leg $name: nobody chose a server, so the suite has just run on this engine"
        return
    fi
    leg "$name" -u PGWORKER_TEST_DSN PGWORKER_TEST_SERVER=container PGWORKER_TEST_PG="$1" -- "${integration[@]}"
    [[ ! -e $out/suite.xml ]] || compare "$name"
}

binaries() { # MAJOR PYTEST-ARGUMENT...
    local name=postgres-$1 bin
    bin=$(PYTHON=$venv/bin/python .ci/postgres-binaries.sh "$1" 2>&1 | tail -n 1) || { cannot "$name" "$bin"; return; }
    shift
    leg "$name" -u PGWORKER_TEST_DSN PGWORKER_TEST_SERVER=embedded PGWORKER_TEST_BIN_DIR="$bin" \
        PGWORKER_TEST_HOSTILE="${hostile:-0}" -- "$@"
}

# docker-compose.yml as it is shipped: each service healthy, a job done by each worker, and a stop that is no failure.
compose() {
    engine compose postgres:18 python:3.12-slim || return 0
    docker compose version >/dev/null 2>&1 || { cannot compose "docker compose is not installed"; return; }
    echo "== compose"
    local dc=(docker compose --project-name "pgworker-test-$$" --progress quiet) done=0 codes
    # shellcheck disable=SC2064 # the command as it is now
    trap "${dc[*]} down --volumes --timeout 5 >/dev/null 2>&1" EXIT
    "${dc[@]}" up --detach --wait --wait-timeout 180 >"$out/compose.log" 2>&1 || { tail -n 40 "$out/compose.log"; return 1; }
    local run=("${dc[@]}" exec -T worker-embed python -m pgworker)
    "${run[@]}" enqueue --app examples.tour.jobs:app welcome_mail '{"name": "Ada", "email": "ada@example.org"}'
    "${run[@]}" enqueue --app examples.tour.jobs:app embed '{"text": "hello"}'
    for _ in {1..50}; do
        done=$("${dc[@]}" exec -T postgres psql -U pgworker -Atc "select count(*) from pgworker.jobs where state = 'succeeded'")
        [[ $done == 2 ]] && break
        sleep 0.2
    done
    "${dc[@]}" stop worker-embed worker-welcome-mail >/dev/null 2>&1
    codes=$("${dc[@]}" ps --all --format '{{.Service}} exit {{.ExitCode}}' | sort | xargs)
    "${dc[@]}" down --volumes --timeout 5 >/dev/null 2>&1
    echo "compose: $done of 2 jobs succeeded; $codes"
    [[ $done == 2 && $codes == "migrate exit 0 postgres exit 0 worker-embed exit 0 worker-welcome-mail exit 0" ]]
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

on_hostile() { # PYTEST-ARGUMENT...: a role that owns nothing, a search_path with look-alikes, serializable, partitions
    leg hostile PGWORKER_TEST_HOSTILE=1 -- "${integration[@]}" "$@"
}

rm -f "$out/suite.xml"
case ${1:-} in
    test)
        leg suite --
        if required; then
            on_container 18
            compose
            # the oldest server and the hostile database in one: what is refused by either is seen
            hostile=1 binaries 14 "${integration[@]}"
            binaries 14 tests/plans
        else
            echo "== legs on other servers and on a hostile database: make test-all, or PGWORKER_REQUIRE_ENGINE=1 make test"
        fi
        ;;
    all)
        slow=(-m 'not soak')
        leg suite -- "${slow[@]}"
        on_container 18
        compose
        for major in 14 15 16 17 18; do binaries "$major" "${slow[@]}"; done
        on_hostile "${slow[@]}"
        for version in 3.11 3.12 3.13; do on_python "$version"; done
        ;;
    suite) leg suite -- ;;
    hostile) on_hostile ;;
    container) on_container "${2:-18}" ;;
    compose) compose ;;
    postgres) binaries "${2:-14}" "${integration[@]}" tests/plans ;;
    python) on_python "${2:?which version?}" ;;
    *) sed -n '2,/^set /p' "${BASH_SOURCE[0]}" | grep '^#' | cut -c3-; exit 2 ;;
esac
