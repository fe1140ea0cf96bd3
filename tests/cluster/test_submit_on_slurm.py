"""Jobs submitted from the login node of a cluster that a user's file describes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from mini_cluster import MiniCluster
from mini_cluster_settings import HEAD

pytestmark = pytest.mark.cluster

LAUNCH = str(Path(sys.executable).parent / "deadpool-launch")
LONG_S = 300.0
SITE = """\
about: the mini cluster
match.clusters: [mini]
submit:
  exclusive: yes
  setup: [export SET_UP=so]
network.interfaces: ['none\\d', 'eth\\d+']
failure_domain.size: 2
env: {OF_THE_SITE: 'a b', OF_THE_USER: 'no'}
launch.srun_options: [--verbose]
"""
#: Says what a rank sees.
SCRIPT = """\
import os
for name in ("RANK", "SET_UP", "OF_THE_SITE", "OF_THE_USER", "GLOO_SOCKET_IFNAME"):
    print("sees", name, os.environ.get(name))
"""


def test_jobs_are_written_and_submitted_as_the_site_wants_them(slurm: MiniCluster) -> None:
    """The first job of a chain ends well, so the second is taken out of the queue."""
    sites = slurm.base / "config" / "deadpool" / "sites"
    sites.mkdir(parents=True)
    (sites / "mini.yaml").write_text(SITE)
    (slurm.base / "train.py").write_text(SCRIPT)
    variables = {
        "XDG_CONFIG_HOME": str(slurm.base / "config"),
        # What the cluster is has to be found out.
        "DEADPOOL_SITE": "",
        "OF_THE_USER": "yes",
    }
    command = [
        *(LAUNCH, "--nodes", "2", "--spares", "1", "-t", "30", "train.py"),
        *("--agent-start-timeout", "300", "--sbatch-arg=--comment=it's #1"),
        *("--checkpoint-dir", "ckpt", "--checkpoint-every", "5", "--chain", "2"),
    ]
    done = slurm.run_on(HEAD, command, env=variables)
    assert done.returncode == 0, done.stderr
    jobs = [int(word.rstrip(",")) for word in done.stdout.split()[1:3]]
    assert done.stdout.startswith(f"jobs {jobs[0]}, {jobs[1]}, one after the other: 2 active nodes")
    assert " on site mini; script deadpool-runs/train-" in done.stdout
    shown = slurm._scontrol("--oneliner", "show", "job", str(jobs[0]))
    assert "NumNodes=3" in shown
    assert "Comment=it's #1" in shown
    record = slurm.wait_job(jobs[0], LONG_S, accept_completing=True)
    output = (slurm.base / f"deadpool-{jobs[0]}.out").read_text()
    assert record.exit_code == 0, output
    logs = sorted((slurm.base / "deadpool-runs" / str(jobs[0]) / "logs").glob("rank-*.log"))
    seen = [re.findall("(?m)^sees (.*)$", path.read_text()) for path in logs]
    same = ["SET_UP so", "OF_THE_SITE a b", "OF_THE_USER yes", "GLOO_SOCKET_IFNAME eth0"]
    assert seen == [["RANK 0", *same], ["RANK 1", *same]]
    assert slurm.wait_job(jobs[1], LONG_S).state == "CANCELLED"
    assert not (slurm.base / f"deadpool-{jobs[1]}.out").exists()
