"""Which sockets a running job listens on, and what strangers at each of them can do: nothing."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from pathlib import Path

import local_run
import psutil
import pytest
from local_run import family, final_state, records, wait

STEPS = 20
SIZE = ("--nodes", 2, "--nproc-per-node", 1, "--agent-start-timeout", 300)
#: By what the process is: TCP ports that it listens on, at most. A rank has its store server, and
#: Gloo one for each connection pool that a group makes.
PORTS = {"launcher": 1, "agent": 0, "replicator": 1, "rank": 1 + 16}


def kind_of(process: psutil.Process) -> str:
    """What a process of the job is; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())
        for word, kind in (
            ("deadpool_runtime.replication.replicator", "replicator"),
            ("deadpool_runtime.zygote", "rank"),
            ("deadpool_launch.agent", "agent"),
            ("deadpool", "launcher"),
        ):
            if word in line:
                return kind
        return line
    return ""


def listening(pid: int) -> list[tuple[str, int, str, int]]:
    """Every TCP socket that the job listens on: kind and id of the process, address and port."""
    found = []
    for process in (psutil.Process(pid), *family(pid)):
        kind = kind_of(process)
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append((kind, process.pid, each.laddr.ip, each.laddr.port))
    return found


def annoy(host: str, port: int) -> list[socket.socket]:
    """Say what is no message of anybody's, and nothing at all; returns what is still open."""
    host = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(host, host)
    left = []
    for said in (b"", b"", bytes(64), b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n"):
        with contextlib.suppress(OSError):
            sock = socket.create_connection((host, port), timeout=5)
            left.append(sock)
            sock.sendall(said)
    return left


@pytest.mark.matrix
def test_no_port_that_nobody_thought_of_and_none_that_harms_the_job(tmp_path: Path) -> None:
    plain = local_run.run(tmp_path / "plain", *SIZE, "--", "--steps", STEPS)
    assert plain.returncode == 0, plain.stderr
    run_dir = tmp_path / "run"
    script = ("--", "--steps", STEPS, "--step-s", 0.3)
    left: list[socket.socket] = []
    with local_run.started(run_dir, *SIZE, *script) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        ports = listening(process.pid)
        for kind, _, host, port in ports:
            # The store and Gloo are torch's, which knows no secret: see docs/assumptions.md.
            if kind != "rank":
                left += annoy(host, port)
        out, _ = process.communicate(timeout=local_run.LONG_S)
    for sock in left:
        sock.close()
    assert process.returncode == 0, out
    assert not records(run_dir, "incident"), out
    assert final_state(run_dir) == final_state(tmp_path / "plain")
    assert {kind for kind, *_ in ports} == {"launcher", "replicator", "rank"}
    # Torch's store would listen on every interface.
    assert {host for _, _, host, _ in ports} == {"127.0.0.1"}
    # The launcher's socket is its supervisor's too.
    for (kind, pid), count in Counter((kind, pid) for kind, pid, *_ in ports).items():
        assert count <= PORTS[kind], (pid, ports)
    assert out.count(" refused: ") <= 6
