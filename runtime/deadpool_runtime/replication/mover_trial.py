"""One process of an MPI world that is only tried: ``python -m
deadpool_runtime.replication.mover_trial``, started as the movers are.

The world comes up as theirs does, every node sends to the next one, and all leave together.
"""

from __future__ import annotations

import argparse
import json

from deadpool_runtime.replication import mover
from deadpool_runtime.replication.mover_messages import NO_MPI_EXIT, TRIAL_SAYS

_NBYTES = 1 << 20


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description="Tries an MPI world.")
    parser.add_argument("--start-timeout", type=float, default=60.0)
    options = parser.parse_args()
    node, _ = mover.begin(options.start_timeout)
    try:
        comm, hello = mover.start_world(node, 0)
        sent, received = bytearray([comm.rank % 251]) * _NBYTES, bytearray(_NBYTES)
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        comm.Sendrecv(sent, dest=after, recvbuf=received, source=before)
        if received != bytearray([before % 251]) * _NBYTES:
            mover.end(mover.MPI_FAILED, f"{node}: what arrived is not what was sent")
        comm.Barrier()
        if comm.rank == 0:
            told = {"nodes": comm.size, "library": hello.library}
            print(TRIAL_SAYS + json.dumps(told), flush=True)
        from mpi4py import MPI

        MPI.Finalize()
    except ImportError as error:
        mover.end(NO_MPI_EXIT, f"mpi4py cannot be used: {error}")
    except Exception as error:  # Whatever it is, this process ends and says why.
        mover.end(mover.NOT_STARTED, f"{node}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
