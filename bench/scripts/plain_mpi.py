"""Plain MPI, as fast as it goes: rank 0 sends a file's ranges, rank 1 receives them into another.

``mpiexec -n 2 python plain_mpi.py SOURCE TARGET NBYTES CHUNK_NBYTES WINDOW REPETITIONS PAUSE_S``.
Both have ``WINDOW`` requests under way. With a pause of 0 they wait inside MPI, which keeps a
processor busy each; else they look and sleep. Rank 1 prints bytes a second, a line for each
repetition.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

from mpi4py import MPI


def move(memory: memoryview, nbytes: int, chunk_nbytes: int, window: int, pause_s: float) -> None:
    comm = MPI.COMM_WORLD
    requests: list[MPI.Request] = []
    at = 0
    while at < nbytes or requests:
        while at < nbytes and len(requests) < window:
            part, tag = memory[at : at + chunk_nbytes], at // chunk_nbytes
            requests.append(comm.Irecv(part, 0, tag) if comm.rank else comm.Isend(part, 1, tag))
            at += chunk_nbytes
        complete = set((MPI.Request.Testsome if pause_s else MPI.Request.Waitsome)(requests) or [])
        if not complete:
            time.sleep(pause_s)
        requests = [each for index, each in enumerate(requests) if index not in complete]


def main() -> None:
    comm = MPI.COMM_WORLD
    nbytes, chunk_nbytes, window, repetitions = (int(text) for text in sys.argv[3:7])
    pause_s = float(sys.argv[7])
    with open(sys.argv[1 + comm.rank], "r+b") as file:
        memory = memoryview(mmap.mmap(file.fileno(), nbytes))
        for repetition in range(repetitions + 1):
            comm.Barrier()
            started = time.perf_counter()
            move(memory, nbytes, chunk_nbytes, window, pause_s)
            comm.Barrier()
            # The first one makes the connection.
            if comm.rank and repetition:
                print(nbytes / (time.perf_counter() - started), flush=True)
        sys.stdout.flush()
        MPI.Finalize()
        os._exit(0)


if __name__ == "__main__":
    main()
