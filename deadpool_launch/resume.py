"""``python -m deadpool_launch.resume``: the launcher of a job whose launcher has ended.

Only ``supervisor.py`` starts it. It knows the job from the run directory, has the socket to which
the agents come back, and goes on; or, told to give up, it ends the job in order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import click
import msgspec

from deadpool_launch import channel, statelog, supervisor
from deadpool_launch.controller import takeover
from deadpool_launch.controller.events import Finish
from deadpool_launch.driver import Given, job_driver, requeue, to_the_end
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_launch.prepare import make_backend
from deadpool_launch.succession import result

PROGRAM = "deadpool-launch"


async def _resume(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.run_dir)
    # What cannot be understood must not be touched either.
    read = statelog.read(run_dir / statelog.STATE_NAME)
    given = msgspec.msgpack.decode(read.job, type=Given)
    kept = takeover.replayed(read.kept, read.entries, tolerant=arguments.give_up > 0)
    listening = socket.socket(fileno=arguments.listening)
    listening.set_inheritable(False)
    journal = Journal(run_dir, click.echo)
    backend = make_backend(given.options)
    backend.restore(given.allocation, kept.term + 1)
    secret = channel.read_secret(run_dir)
    driver = job_driver(given, kept.state.config, backend, journal, secret, listening)
    driver.take_over(kept)
    journal.write("launcher", term=kept.term + 1, pid=os.getpid(), ended=arguments.ended)
    if journal.torn_nbytes or read.torn_nbytes:
        journal.say(
            f"the launcher ended while it wrote: {journal.torn_nbytes} bytes of the journal's last "
            f"line and {read.torn_nbytes} of the last event were cut off"
        )
    if node := result.successor(run_dir, 0):
        running = driver.stand_by(node)
    elif arguments.give_up:
        running = driver.end(_verdict(arguments))
    else:
        running = driver.go_on(arguments.ended, arguments.ended_at)
    code = await to_the_end(driver, running, journal, given, backend)
    await requeue(given.options, driver, backend, journal)
    await backend.close()
    journal.close()
    channel.forget(run_dir)
    return code


def _verdict(arguments: argparse.Namespace) -> Finish:
    """Why the job is not gone on with."""
    if arguments.stopped_by:
        name = signal.Signals(arguments.stopped_by).name
        interrupted = arguments.stopped_by == signal.SIGINT
        code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
        reason = f"stopped by {name} ({arguments.stopped_by}); its launcher ended meanwhile"
        return Finish(code.name.lower(), code, f"{reason} ({arguments.ended})", "")
    reason = (
        f"the launcher ended {arguments.give_up} times within {supervisor.WINDOW_S:g} s, last by "
        f"{arguments.ended}"
    )
    return Finish("internal error", ExitCode.INTERNAL, reason, "")


def main() -> None:
    """``--ended``: how the launcher before ended; ``--ended-at``: when, on the monotonic clock.

    ``--listening``: a descriptor. ``--give-up N``: end the job, N launchers of it ended.
    ``--stopped-by``: the signal that asked for the end, 0 if none did.
    """
    supervisor.attach()
    parser = argparse.ArgumentParser(prog="deadpool_launch.resume")
    parser.add_argument("run_dir")
    parser.add_argument("--ended", required=True)
    parser.add_argument("--ended-at", type=float, required=True)
    parser.add_argument("--listening", type=int, required=True)
    parser.add_argument("--give-up", type=int, default=0)
    parser.add_argument("--stopped-by", type=int, default=0)
    arguments = parser.parse_args()
    run_dir = Path(arguments.run_dir)
    if (over := result.recorded(run_dir)) is not None:
        # It ended behind the job's end, as by the signal with which Slurm requeues the job.
        (run_dir / statelog.STATE_NAME).unlink(missing_ok=True)
        channel.forget(run_dir)
        sys.exit(over.exit_code)
    try:
        sys.exit(asyncio.run(_resume(arguments)))
    except (statelog.NoStateLog, OSError, msgspec.MsgspecError) as error:
        print(f"{PROGRAM}: the launcher cannot be started again: {error}", file=sys.stderr)
        sys.exit(ExitCode.INTERNAL)


if __name__ == "__main__":
    main()
