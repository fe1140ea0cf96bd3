"""What the training thread of a simulated rank can be doing."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What the training thread is doing."""

    NEW = "new"
    #: The script builds its objects together with its peers, or, a replacement's, alone.
    SCRIPT = "script"
    BUILDING = "building"
    #: At the first step, which the launcher has to allow.
    ATTACHED = "attached"
    COMPUTE = "compute"
    COLLECTIVE = "collective"
    #: Before the optimizer's step, until the copy of the step before is confirmed.
    CONFIRM = "confirm"
    #: An exception left the body; the launcher's word is awaited.
    RAISED = "raised"
    #: At the end of a step, held back by the launcher.
    HELD = "held"
    #: The last step is complete.
    WAITING = "waiting"
    PARKING = "parking"
    PARKED = "parked"
    REBUILD = "rebuild"
    FETCH = "fetch"
    #: What optimizers share out is shared out anew.
    SHARE = "share"
    #: The state is there, or could not be had; the next word is awaited.
    RESTORED = "restored"
    REFUSED = "refused"
    OVER = "over"
    GONE = "gone"


#: In these a Revoke unwinds the training thread at once.
UNWINDS = frozenset(
    {
        Mode.ATTACHED,
        Mode.COMPUTE,
        Mode.COLLECTIVE,
        Mode.CONFIRM,
        Mode.RAISED,
        Mode.HELD,
        Mode.WAITING,
        Mode.PARKED,
        Mode.REBUILD,
        Mode.FETCH,
        Mode.SHARE,
        Mode.RESTORED,
        Mode.REFUSED,
    }
)


#: The body of a step is being run.
IN_STEP = frozenset({Mode.COMPUTE, Mode.COLLECTIVE, Mode.CONFIRM})
