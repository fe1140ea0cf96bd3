"""Exit codes of ``deadpool-launch``: one number per verdict, as docs/failures.md lists them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why ``deadpool-launch`` ended. Each member's comment says when."""

    #: The script ended well on every rank.
    OK = 0
    #: A command line, file or value is wrong; nothing was started.
    USAGE = 2
    #: The allocation or site cannot keep the job alive through a fault; nothing was started.
    UNSUITABLE = 10
    #: An agent or a rank did not come up.
    START_FAILED = 11
    #: A node has too little memory for the copies of the state; no step was run.
    LITTLE_MEMORY = 12
    #: The user's script failed (exception or non-zero exit of its own).
    SCRIPT_FAILED = 20
    #: A fault of the whole job (full disk, quota, the same error on every rank): no spare helps.
    JOB_FAULT = 21
    #: A node was lost and no spare is left.
    NO_SPARE = 30
    #: No step's state is whole on the ranks that are left.
    STATE_LOST = 31
    #: Recovery did not succeed within its deadlines and attempts, or the same fault came back.
    RECOVERY_FAILED = 32
    #: Stopped at the end of a step before the time limit: the same job can go on later.
    STOPPED_IN_TIME = 75
    #: A defect of DEADPOOL itself.
    INTERNAL = 70
    #: Ctrl-C (SIGINT).
    INTERRUPTED = 130
    #: SIGTERM, as sent by ``scancel`` or at the time limit.
    TERMINATED = 143


class PreflightCode(IntEnum):
    """What ``deadpool preflight`` ends with besides ``ExitCode``'s 0, 2 and 10."""

    #: Nothing speaks against hot swap, but what decides it could not all be looked at.
    NOT_KNOWN = 50
    #: Every check passed, but the job of the self-test did not go on after its fault.
    SELF_TEST_FAILED = 51
