#!/usr/bin/env bash
# Build a local stand-in for `python:3.12-slim`, the base of our Dockerfile, where no registry can be reached: this machine's
# CPython (a 3.12 if there is one, else the one that runs CI) with pip, glibc and a static busybox. An image of that name
# that was not built by this script is the real one, and stays.
set -euo pipefail
shopt -s nullglob

image=python:3.12-slim
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

pick() {
    local candidate
    for candidate in python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python3 python3; do
        "$candidate" -c 'import ensurepip' >/dev/null 2>&1 && { echo "$candidate"; return; }
    done
    echo "python-image: no Python with ensurepip on this machine" >&2
    return 1
}

python=$(pick)
read -r version program stdlib < <("$python" - <<'PYTHON'
import os, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
print(version, os.path.join(sys.base_prefix, "bin", "python" + version), sysconfig.get_path("stdlib"))
PYTHON
)
recipe=$({ cat "$here"/{image,python-image}.sh; "$program" -VV; } | sha256sum | cut -c1-12)

# shellcheck source=.ci/image.sh
. "$here/image.sh"
skip_if_present "$image" "$recipe"

copy_base
mkdir -p "$root"/{etc/ssl/certs,usr/bin,usr/local/bin,usr/local/lib}
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp "$program" "$root/usr/local/bin/python$version"
ln -s "python$version" "$root/usr/local/bin/python3"
ln -s python3 "$root/usr/local/bin/python"
tar -C "$(dirname "$stdlib")" -c --exclude=__pycache__ --exclude='*.a' --exclude=test --exclude=tests --exclude=idlelib \
    --exclude=tkinter --exclude='_tkinter*' --exclude=turtledemo --exclude='site-packages/*' --exclude='dist-packages/*' \
    "$(basename "$stdlib")" | tar -C "$root/usr/local/lib" -x
mkdir -p "$root/usr/local/lib/python$version/site-packages"

# Wheels count on glibc and the compiler's run time as a whole; the rest is what the interpreter itself is linked with.
dpkg-query --listfiles libc6 libgcc-s1 libstdc++6 zlib1g | awk '/\/lib.*\.so/ && !/gconv|audit/' | copy_files
copy_libraries "$program" "$stdlib"/lib-dynload/*.so
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"

build "$image" "$recipe" <<DOCKERFILE
ENV PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PIP_CERT=/etc/ssl/certs/ca-certificates.crt
RUN ["/bin/busybox", "sh", "-c", "busybox --install -s /bin && chmod 1777 /tmp && python -m ensurepip --default-pip >/dev/null"]
CMD ["python3"]
DOCKERFILE
