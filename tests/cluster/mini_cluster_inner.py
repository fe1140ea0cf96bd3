"""The two programs that run inside a mini cluster: its guardian and the first process of each node.

Both are started by :mod:`mini_cluster_nodes` as separate processes and use the standard library
only, so that they start in a few milliseconds.

*Guardian.*  Creates the cluster's directory and one process-id namespace that all nodes live in.
It waits until its owner closes the pipe or dies, however it dies. Then it kills the first process
of that namespace, whereupon the kernel kills every process of every node, and removes the
directory. Network, mount and other namespaces are anonymous: they end with their last process.

*Node.*  Moves into namespaces of its own, gives itself a private /proc, /sys, /tmp, /run, /dev/shm
and /etc/hosts, waits until its network cable is plugged in, starts munged and slurmd (slurmctld on
the head), and from then on only collects the exit codes of orphans, as every first process must.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
PR_SET_PDEATHSIG = 1

#: Directories that every node has for itself; whatever else must be seen is bound back into them.
PRIVATE_DIRECTORIES = ("/tmp", "/run", "/dev/shm")

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(_libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[4]), f"mount on {target}")


def _collect_orphans_for_ever() -> None:
    """Reap every child that ends; never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        signal.sigwait({signal.SIGCHLD})


# --- guardian -----------------------------------------------------------------------------------


def guardian(owner_pid: int, parent_directory: str, extra_file: str) -> None:
    """Hold the cluster until the owner closes our standard input or dies, then clear it away."""
    owner = os.pidfd_open(owner_pid)
    if os.getppid() != owner_pid:
        return  # The owner died before the line above could watch it.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told_to_end, wake = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.close(wake))

    root = tempfile.mkdtemp(prefix="deadpool-mini-", dir=parent_directory)
    try:
        os.chmod(root, 0o755)
        _unshare(CLONE_NEWPID)
        first = os.fork()
        if first == 0:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.closerange(3, 64)
            _collect_orphans_for_ever()
        try:
            print(json.dumps({"root": root, "pid": first}), flush=True)
            poller = select.poll()
            for descriptor in (owner, told_to_end, 0):
                poller.register(descriptor, select.POLLIN | select.POLLHUP)
            poller.poll()
        finally:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if extra_file:
            Path(extra_file).unlink(missing_ok=True)


# --- node ---------------------------------------------------------------------------------------


def _inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _make_own_file_system(settings: str, visible: list[str]) -> None:
    """Give this node its private directories, and bind the shared ones back into them."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    shared = {
        path: os.open(path, os.O_PATH)
        for path in visible
        if any(_inside(path, directory) for directory in PRIVATE_DIRECTORIES)
    }
    sources = {name: os.open(f"{settings}/{name}", os.O_PATH) for name in os.listdir(settings)}
    for directory in PRIVATE_DIRECTORIES:
        mode = "0755" if directory == "/run" else "1777"
        _mount("tmpfs", directory, "tmpfs", options=f"mode={mode}")
    os.mkdir("/run/lock")
    os.chmod("/run/lock", 0o1777)
    for path, descriptor in shared.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
        os.close(descriptor)
    for name, descriptor in sources.items():
        if os.path.exists(f"/etc/{name}"):
            _mount(f"/proc/self/fd/{descriptor}", f"/etc/{name}", flags=MS_BIND)
        os.close(descriptor)
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")
    # slurmd refuses to start without a directory of this name; nothing is confined by it.
    _mount("tmpfs", "/sys/fs/cgroup", "tmpfs", options="mode=0755")


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _start_munged() -> None:
    account = pwd.getpwnam("munge")
    os.mkdir("/run/munge", 0o755)
    os.chown("/run/munge", account.pw_uid, account.pw_gid)
    subprocess.Popen(
        ["munged", "--foreground", "--seed-file=/run/munge/munged.seed", "--num-threads=2"],
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not os.path.exists("/run/munge/munge.socket.2"):
        if time.monotonic() > deadline:
            raise TimeoutError("munged did not open its socket")
        time.sleep(0.02)


def _boot(
    name: str, address: str, hardware_address: str, settings: str, visible: list[str]
) -> None:
    """Become the node `name`: everything between power-on and a running slurmd."""
    socket.sethostname(name)
    _make_own_file_system(settings, visible)
    if name == "head":
        _ip(
            "link set lo up",
            # An address of its own: else it is that of a port, and changes when a node goes.
            f"link add br0 address {hardware_address} type bridge",
            "link set br0 addrgenmode none",
            f"addr add {address}/24 dev br0",
            "link set br0 up",
        )
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        raise SystemExit("the owner of this cluster is gone")
    if name != "head":
        _ip(
            "link set lo up",
            "link set eth0 addrgenmode none",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
        )
    _start_munged()
    daemon = ["slurmctld"] if name == "head" else ["slurmd", "-N", name]
    subprocess.run(daemon, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
    print("up", flush=True)


def node(name: str, address: str, hardware_address: str, settings: str, visible: list[str]) -> None:
    """Enter new namespaces and run the node's first process there; ends when that one ends."""
    _unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC)
    first = os.fork()
    null = os.open(os.devnull, os.O_RDWR)
    if first != 0:
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.waitpid(first, 0)
        return
    os.setsid()
    _boot(name, address, hardware_address, settings, visible)
    os.dup2(null, 0)
    os.dup2(null, 1)
    _collect_orphans_for_ever()


def main(arguments: list[str]) -> None:
    if arguments[0] == "guardian":
        guardian(int(arguments[1]), arguments[2], arguments[3])
    else:
        name, address, hardware_address, settings, *visible = arguments[1:]
        node(name, address, hardware_address, settings, visible)


if __name__ == "__main__":
    main(sys.argv[1:])
