"""A policy's admission checks and spares on real Slurm."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap

import pytest
from mini_cluster import MiniCluster

pytestmark = pytest.mark.cluster

YEAR = ["--time=365-00:00:00"]

#: Runs inside the job: finds the number of spares, checks the nodes, tells the plan as JSON.
PREPARE = textwrap.dedent("""\
    import asyncio, json, sys
    from deadpool_launch.options import LaunchOptions
    from deadpool_launch.prepare import make_backend, prepare, settle_spares
    from deadpool_runtime.protocol import AdmissionCheck

    check = AdmissionCheck("echo so $DEADPOOL_NODE; test $DEADPOOL_NODE != n3", 30.0)
    options = LaunchOptions(
        script="/t.py", site="slurm", run_dir=sys.argv[1], node_mtbf_hours=25000.0,
        spare_probability=0.9, admission=(check,), batch_host="active",
    )
    backend = make_backend(options)
    options = settle_spares(backend, options)
    plan = asyncio.run(prepare(backend, options)).plan
    print("told", json.dumps([plan.active, plan.spares, plan.remarks]))
    """)


def test_admission_and_spares_follow_the_policy(slurm: MiniCluster) -> None:
    """The job's time limit, a year, stands for the hours; n3 fails its check."""
    (slurm.base / "prepare.py").write_text(PREPARE)
    run_dir = slurm.base / "run"
    command = shlex.join([sys.executable, str(slurm.base / "prepare.py"), str(run_dir)])
    job = slurm.submit(f"#!/bin/bash\n#SBATCH --no-kill\n{command}\n", nodes=4, extra_args=YEAR)
    record = slurm.wait_job(job, 90.0, accept_completing=True)
    output = (slurm.base / f"slurm-{job}.out").read_text()
    assert record.exit_code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("told ")]
    active, spares, remarks = json.loads(line.removeprefix("told "))
    assert (active, spares) == (["n1"], ["n2", "n4"])
    assert "4 nodes with an MTBF of 25000 h lose at most 3 within 8760 h" in remarks[0]
    assert "only 2 of 3 spares can be used" in remarks
    assert (run_dir / "logs" / "admission-n3.log").read_text() == "so n3\n"
