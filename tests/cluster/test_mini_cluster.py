"""The mini cluster is what it claims to be: real Slurm, real faults, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import ProcessMark, wait_until

pytestmark = pytest.mark.cluster

#: Far more than anything here takes, as the machine may be busy.
PATIENCE_S = 90.0

#: Keeps one step on each node of the job; the step ends when the job is cancelled.
STEP_ON_EVERY_NODE = textwrap.dedent("""\
    #!/bin/bash
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        srun --overlap --no-kill -N1 -n1 -w "$node" sleep 100000 &
    done
    while true; do sleep 1; done
    """)


def run_step_everywhere(slurm: MiniCluster) -> int:
    """A job over all nodes, with a task running on each; returns when all tasks run."""
    job = slurm.submit(STEP_ON_EVERY_NODE, nodes=len(slurm.node_names))
    for node in slurm.node_names:
        wait_for_sleep(slurm, node)
    return job


def wait_for_sleep(slurm: MiniCluster, node: str) -> int:
    """Wait until a job's task runs on the node; its process id on the host."""

    def sleeping() -> list[int]:
        return [p.pid for p in slurm.find_processes(node, "sleep 100000") if p.name == "sleep"]

    return wait_until(sleeping, bool, what=f"sleep runs on {node}", timeout_s=PATIENCE_S)[0]


def start_step(slurm: MiniCluster, job: int, node: str) -> subprocess.CompletedProcess[str]:
    """Start one more step of the job on `node`, as a launcher on n1 does it."""
    step = ["srun", f"--jobid={job}", "--overlap", "--no-kill", "-N1", "-n1", "-w", node]
    return slurm.run_on("n1", [*step, "hostname"])


def test_all_nodes_are_idle(slurm: MiniCluster) -> None:
    assert slurm.node_states() == dict.fromkeys(("n1", "n2", "n3", "n4", "n5"), "IDLE")


def test_a_job_runs_on_every_node(slurm: MiniCluster) -> None:
    script = "#!/bin/bash\nsrun -N4 -n4 hostname\nexit 3\n"
    job = slurm.submit(script, nodes=4, job_name="names")
    record = slurm.wait_job(job, PATIENCE_S)
    assert (record.name, record.state, record.exit_code) == ("names", "FAILED", 3)
    assert record.nodes == ("n1", "n2", "n3", "n4")
    output = (slurm.base / f"slurm-{job}.out").read_text()
    assert sorted(output.split()) == ["n1", "n2", "n3", "n4"]


def test_nodes_share_the_base_directory_and_nothing_else(slurm: MiniCluster) -> None:
    look = "cat seen; ls /dev/shm /tmp; ls -d /proc/[0-9]* | wc -l; ls /sys/class/net; hostname -i"
    (slurm.base / "seen").write_text("shared\n")
    slurm.run_on("n1", ["touch", "/dev/shm/of-n1", "/tmp/of-n1"])
    assert slurm.run_on("n1", ["ls", "/dev/shm"]).stdout.split() == ["of-n1"]
    lines = slurm.run_on("n2", ["bash", "-c", look]).stdout
    assert lines.startswith("shared\n")
    assert "of-n1" not in lines
    assert "eth0\nlo\n198.18.0.12" in lines
    assert len(slurm.leftovers()) == 2
    slurm.sweep()
    assert slurm.leftovers() == []


def test_what_a_job_leaves_behind_is_named(slurm: MiniCluster) -> None:
    files = "mkdir /tmp/torchinductor_x\ntouch /tmp/file-of-job\n"
    leave = f"#!/bin/bash\n{files}env -u SLURM_JOB_ID setsid sleep 4444 &\n"
    slurm.wait_job(slurm.submit(leave, nodes=1), PATIENCE_S)
    process, file = sorted(slurm.leftovers(), key=lambda text: "file" in text)
    assert process.endswith("sleep 4444")
    assert file.endswith("/tmp/file-of-job is still there")  # And torch's empty folder is not.
    slurm.run_on("n1", ["touch", "/tmp/torchinductor_x/used"])
    used = "/tmp/torchinductor_x is still there, in it: used"
    assert any(text.endswith(used) for text in slurm.leftovers())
    slurm.sweep()
    wait_until(slurm.leftovers, lambda left: not left, what="clean", timeout_s=PATIENCE_S)


def test_a_no_kill_job_goes_on_after_a_power_off_before_slurm_has_noticed(
    slurm: MiniCluster,
) -> None:
    job = run_step_everywhere(slurm)
    slurm.power_off("n3")
    assert slurm.find_processes("n3", "") == []
    done = start_step(slurm, job, "n4")
    assert (done.returncode, done.stdout) == (0, "n4\n"), done.stderr
    assert "DOWN" not in slurm.node_state("n3")
    assert slurm.job_state(job) == "RUNNING"
    assert slurm.find_processes("n2", "sleep 100000")


@pytest.mark.matrix
def test_a_silent_node_is_marked_down_and_leaves_the_job(slurm: MiniCluster) -> None:
    slurm.set_slurmd_timeout(4, message_timeout_s=5)
    job = run_step_everywhere(slurm)
    slurm.power_off("n4")
    slurm.wait_node_state("n4", lambda state: "DOWN" in state, PATIENCE_S)
    assert slurm.job_info(job).nodes == ("n1", "n2", "n3", "n5")
    assert slurm.job_state(job) == "RUNNING"


def test_a_node_comes_back_after_power_on(slurm: MiniCluster) -> None:
    slurm.power_off("n2")
    assert not slurm.is_on("n2")
    slurm.power_on("n2")
    slurm.wait_all_idle(PATIENCE_S)
    record = slurm.wait_job(slurm.submit("#!/bin/bash\nsrun true\n", nodes=4), PATIENCE_S)
    assert record.state == "COMPLETED"


LISTENER = """
import socket
server = socket.create_server(("", 5555))
print("listening", flush=True)
connection, _ = server.accept()
print("connected", flush=True)
connection.settimeout(4)
try:
    print("closed" if connection.recv(1) == b"" else "data", flush=True)
except TimeoutError:
    print("silent", flush=True)
except ConnectionResetError:
    print("closed", flush=True)
"""
CONNECTOR = """
import socket, time
connection = socket.create_connection(("n1", 5555))
time.sleep(100000)
"""


@contextmanager
def connection_from_n2_to_n1(slurm: MiniCluster) -> Iterator[subprocess.Popen[str]]:
    """An open TCP connection; the listener prints whether it gets closed or stays silent."""
    listener = slurm.popen_on("n1", ["python", "-c", LISTENER], stdout=subprocess.PIPE)
    assert listener.stdout is not None
    with listener:
        try:
            assert listener.stdout.readline() == "listening\n"
            with slurm.popen_on("n2", ["python", "-c", CONNECTOR]) as connector:
                try:
                    assert listener.stdout.readline() == "connected\n"
                    yield listener
                finally:
                    connector.kill()
        finally:
            listener.kill()


@pytest.mark.parametrize(
    ("fault", "seen"), [("power_off", "closed"), ("vanish", "silent"), ("freeze", "silent")]
)
def test_peers_see_a_closed_connection_only_after_a_power_off(
    slurm: MiniCluster, fault: str, seen: str
) -> None:
    with connection_from_n2_to_n1(slurm) as listener:
        getattr(slurm, fault)("n2")
        assert listener.stdout is not None
        assert listener.stdout.readline() == f"{seen}\n"


def test_a_frozen_node_stands_still_until_it_is_thawed(slurm: MiniCluster) -> None:
    job = run_step_everywhere(slurm)
    slurm.freeze("n2")
    states = {
        Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split()[0]
        for p in slurm.node_pids("n2")
    }
    assert states == {"T"}
    assert slurm.run_on("n1", ["bash", "-c", "echo > /dev/tcp/n2/6818"]).returncode == 0
    slurm.thaw("n2")
    assert start_step(slurm, job, "n2").stdout == "n2\n"


def test_a_partitioned_node_is_out_of_reach_and_keeps_its_processes(slurm: MiniCluster) -> None:
    connect = ["bash", "-c", "echo > /dev/tcp/n2/6818"]
    job = run_step_everywhere(slurm)
    slurm.partition("n2")
    assert slurm.run_on("n1", ["timeout", "3", *connect]).returncode != 0
    assert slurm.find_processes("n2", "sleep 100000")
    slurm.heal("n2")
    assert slurm.run_on("n1", connect).returncode == 0
    assert start_step(slurm, job, "n2").stdout == "n2\n"


def test_a_node_that_is_parted_from_others_reaches_the_rest_until_the_reset(
    slurm: MiniCluster,
) -> None:
    def reaches(node: str) -> bool:
        connect = ["timeout", "3", "bash", "-c", f"echo > /dev/tcp/{node}/6818"]
        return slurm.run_on("n2", connect).returncode == 0

    slurm.part("n2", ["n1"])
    assert not reaches("n1")
    assert reaches("n3")
    slurm.reset()
    assert reaches("n1")


def test_drain_and_down_are_seen_in_the_state_and_undone_by_resume(slurm: MiniCluster) -> None:
    slurm.drain("n1", "broken fan")
    assert slurm.node_state("n1") == "IDLE+DRAIN"
    slurm.mark_down("n2")
    assert slurm.node_state("n2") == "DOWN"
    slurm.resume("n1")
    slurm.resume("n2")
    slurm.wait_all_idle(PATIENCE_S)


def test_one_process_of_a_job_can_be_killed_by_its_id(slurm: MiniCluster) -> None:
    script = "#!/bin/bash\nsrun -N1 -n1 sleep 100000\nexit $?\n"
    job = slurm.submit(script, nodes=1)
    os.kill(wait_for_sleep(slurm, "n1"), signal.SIGKILL)
    assert slurm.wait_job(job, PATIENCE_S).exit_code == 128 + signal.SIGKILL


@pytest.mark.matrix
def test_jobs_go_on_without_slurmctld(slurm: MiniCluster) -> None:
    job = run_step_everywhere(slurm)
    slurm.stop_controller()
    assert slurm.run_on("head", ["scontrol", "ping"]).returncode != 0
    assert slurm.find_processes("n3", "sleep 100000")
    slurm.start_controller()
    assert slurm.job_state(job) == "RUNNING"


OWNER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored in the parent
sys.path.insert(0, sys.argv[1])
from mini_cluster import MiniCluster
cluster = MiniCluster(nodes=2)
cluster.up()
cluster.popen_on("n1", ["sleep", "100000"])
pids = [p.pid for node in ("head", "n1", "n2") for p in cluster.node_pids(node)]
print(cluster.base.parent, *pids, flush=True)
time.sleep(100000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_nothing_is_left_when_the_owner_is_ended_by_a_signal(number: signal.Signals) -> None:
    here = str(Path(__file__).parent)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, here],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with owner:
        assert owner.stdout is not None
        root, *numbers = owner.stdout.readline().split()
        marks = [ProcessMark.of(int(text)) for text in numbers]
        assert len(marks) >= 7  # munged on three nodes, slurmd on two, slurmctld, the sleep
        os.killpg(owner.pid, number)
        assert owner.wait(PATIENCE_S) != 0

    def left() -> list[object]:
        return [mark for mark in marks if mark.is_alive()] + [
            p for p in [root] if os.path.exists(p)
        ]

    wait_until(left, lambda seen: not seen, what="nothing is left", timeout_s=PATIENCE_S)
    assert root not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.matrix
def test_two_clusters_live_side_by_side(slurm: MiniCluster) -> None:
    with MiniCluster(nodes=1) as other:
        (other.base / "mine").touch()
        record = other.wait_job(other.submit("#!/bin/bash\nsrun ls\n", nodes=1), PATIENCE_S)
        assert record.state == "COMPLETED"
        assert (other.base / f"slurm-{record.job_id}.out").read_text().split()[0] == "mine"
        assert slurm.squeue() == []
    assert not other.base.exists()
