# Sourced by the scripts that build an image from nothing. Sets `root`, the folder that becomes the image's file system.
# shellcheck shell=bash

label=dev.pgworker.recipe
context=$(mktemp -d)
root=$context/root
trap 'rm -rf "$context"' EXIT
mkdir -p "$root"/{bin,etc,tmp,usr/lib/locale}

# End the script when IMAGE is built to this RECIPE already, or is the real one: built elsewhere, it has no label of ours.
skip_if_present() { # IMAGE RECIPE
    local labels
    labels=$(docker image inspect --format '{{json .Config.Labels}}' "$1" 2>/dev/null) || return 0
    case $labels in
        *"\"$label\":\"$2\""*) echo "$1: up to date"; exit 0 ;;
        *"\"$label\""*) ;;
        *) echo "$1: an image from elsewhere is here already, used as it is"; exit 0 ;;
    esac
}

# The libraries that these files are linked with, each at the path where the loader looks for it.
copy_libraries() { # FILE...
    { ldd "$@" 2>/dev/null || true; } | grep -o '/[^ ]*\.so[^ ]*' | sort -u | copy_files
}

copy_files() { # reads paths, copies them to the same place under the image's root
    local file
    while read -r file; do
        [[ ! -f $file ]] || cp -L --parents --target-directory="$root" "$file"
    done
}

# Every image has a userland, and the one locale that needs no others.
copy_base() {
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp -a /usr/lib/locale/C.utf8 "$root/usr/lib/locale/"
}

build() { # IMAGE RECIPE   (the Dockerfile's remaining lines on stdin)
    chmod -R a+rX "$root" # a file from a home folder brings that folder's mode along
    { printf 'FROM scratch\nCOPY root /\nLABEL %s=%s\n' "$label" "$2"; cat; } >"$context/Dockerfile"
    DOCKER_BUILDKIT=0 docker build --quiet --tag "$1" "$context" >"$context/log" 2>&1 || { cat "$context/log" >&2; return 1; }
    echo "$1: built, $(docker image inspect --format '{{.Size}}' "$1" | awk '{ printf "%.0f MB", $1 / 1e6 }')"
}
