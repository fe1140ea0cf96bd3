#!/bin/bash
# Installs the Debian packages that the project needs; does nothing when all are there.
#
# Slurm, munge and the network tools are for the mini cluster of the tests (they are only files:
# without a configuration in /etc/slurm no Slurm service of the host starts). The compiler and
# Python's headers build the project's one C++ file.
set -euo pipefail

wanted=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge iproute2 libpmix2 util-linux)

is_installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

has_python_headers() {
    python3 -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

if ! command -v dpkg-query >/dev/null; then
    echo "This is not a Debian system; install the equivalents of: ${wanted[*]} g++ python3-dev" \
        "python3-venv." >&2
    exit 1
fi

missing=()
for package in "${wanted[@]}"; do
    is_installed "$package" || missing+=("$package")
done
command -v g++ >/dev/null || missing+=(g++)
has_python_headers || missing+=(python3-dev)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)

if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "These Debian packages are missing and only root can install them:" \
        "sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
