#!/usr/bin/env bash
# The tests of the adapters, with the frameworks that they are for. Installs 3 GB into .venv-frameworks the
# first time.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-frameworks
if [ ! -e $venv/.ready ] || [ setup.cfg -nt $venv/.ready ] || [ constraints.txt -nt $venv/.ready ]; then
    test -x $venv/bin/python || "${PYTHON:-python3}" -m venv $venv
    $venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt 'setuptools>=70.1'
    $venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --no-build-isolation --editable '.[dev,transformers,lightning]'
    touch $venv/.ready
fi
$venv/bin/pytest tests/integrations
