#!/usr/bin/env bash
# The tests of process groups and of recoveries on the second supported torch, with each of its two ways
# to rebuild a group. Installs 5.5 GB into .venv-torch-2.14 the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-torch-2.14
torch=2.14.1
if [ ! -e $venv/.ready ]; then
    "${PYTHON:-python3}" -m venv $venv
    grep -v '^torch==' constraints.txt >$venv/constraints.txt
    echo "torch==$torch" >>$venv/constraints.txt
    $venv/bin/pip install --quiet --disable-pip-version-check --constraint $venv/constraints.txt 'setuptools>=70.1'
    $venv/bin/pip install --quiet --disable-pip-version-check --constraint $venv/constraints.txt \
        --no-build-isolation --editable '.[dev,plot]'
    touch $venv/.ready
fi
for mechanism in swap reconfigure; do
    echo "torch $torch, $mechanism"
    DEADPOOL_GROUP_MECHANISM=$mechanism $venv/bin/pytest -m "not matrix" tests/runtime/groups \
        tests/runtime/test_session_recovery.py tests/runtime/test_session_layouts.py
done
$venv/bin/pytest -m "not matrix" tests/runtime/test_durable.py tests/runtime/replication
