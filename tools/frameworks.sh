#!/usr/bin/env bash
# The tests of the adapters, with the frameworks that they are for: in .venv-frameworks, which lies on top of
# .venv and takes its torch from there. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(cd "${VENV:-.venv}" && pwd)
venv=.venv-frameworks
if [ ! -e $venv/.ready ] || [ setup.cfg -nt $venv/.ready ] || [ constraints.txt -nt $venv/.ready ]; then
    test -x $venv/bin/python || "$base/bin/python" -m venv --without-pip $venv
    for packages in $venv/lib/python3*/site-packages; do
        "$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/base.pth"
    done
    # Where mpi4py looks for the library of the package mpich.
    ln -sf "$base"/lib/libmpi*.so* $venv/lib/
    "$base/bin/pip" --python $venv/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt \
        --no-build-isolation --editable '.[transformers,lightning]'
    touch $venv/.ready
fi
$venv/bin/python -m pytest tests/integrations "$@"
