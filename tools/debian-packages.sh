#!/bin/bash
# Installs the Debian packages that the project needs; does nothing when all are there.
#
#   tools/debian-packages.sh [build] [cluster]      without arguments: both
#
# build    a compiler and Python's headers and venv, for the project's one C++ file
# cluster  Slurm, munge and network tools, for the mini cluster of the tests; without a
#          configuration in /etc/slurm no Slurm service of this machine starts
set -euo pipefail

cluster_packages=(
    slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 libpmix2 util-linux
)

is_installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

has_python_headers() {
    python3 -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

missing=()

look_for_build() {
    command -v g++ >/dev/null || missing+=(g++)
    has_python_headers || missing+=(python3-dev)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
}

look_for_cluster() {
    local package
    if ! command -v dpkg-query >/dev/null; then
        echo "The mini cluster runs on Debian only; elsewhere install the equivalents of:" \
            "${cluster_packages[*]}." >&2
        exit 1
    fi
    for package in "${cluster_packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
}

[ $# -gt 0 ] || set -- build cluster
for group in "$@"; do
    case $group in
        build) look_for_build ;;
        cluster) look_for_cluster ;;
        *)
            echo "There is no group '$group'; there are: build, cluster." >&2
            exit 2
            ;;
    esac
done

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "These packages are missing and only root can install them:" \
        "sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
