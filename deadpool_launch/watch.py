"""What the site says of the nodes and of the time limit, asked rarely; and the launcher's signals.

Turns both into events and decides nothing. An error is no news: what was known stays known, and the
next question comes later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from deadpool_launch.backends.base import Backend, Sighting, SiteError
from deadpool_launch.controller import events
from deadpool_launch.controller.wording import seconds

#: What the launcher itself needs at the end: to have every node tidied up.
END_S = 10.0
#: A SIGTERM this shortly before the limit comes from the limit.
AT_LIMIT_S = 60.0
#: Slurm kills so long after it terminates (KillWait); what is left of it for the ranks.
KILL_WAIT_LEFT_S = 15.0
#: Time for an end that somebody asks for when nobody knows the limit, and the most there is.
UNKNOWN_LEFT_S, MOST_LEFT_S = 60.0, 600.0
#: So many times the usual pause, at most, after errors.
_LONGEST_PAUSE = 16
#: From so many errors in a row on, people are told.
_TOLD_AFTER = 2
#: The clock is looked at this often, as it may be set.
_CLOCK_S = 5.0


def left_s(ends_at: float | None, now: float) -> float:
    """How long an end that is asked for now may take."""
    if ends_at is None:
        return UNKNOWN_LEFT_S
    return min(MOST_LEFT_S, max(1.0, ends_at - now - END_S))


def is_at_limit(ends_at: float | None, now: float) -> bool:
    """Whether a SIGTERM now is that of the time limit."""
    return ends_at is not None and now >= ends_at - AT_LIMIT_S


def pause_s(poll_s: float, errors: int) -> float:
    """Until the next question, after so many errors in a row."""
    return poll_s * min(_LONGEST_PAUSE, 1 << min(errors, 10))


def news(
    before: Mapping[str, Sighting], now: Mapping[str, Sighting], at: float
) -> list[events.NodeStateSeen]:
    """The nodes whose health or reason is another one; one that was always well is no news.

    That a healthy node is IDLE, MIXED or ALLOCATED says nothing.
    """
    found = []
    for name, seen in now.items():
        old = before.get(name)
        known = ("ok", "") if old is None else (old.health, old.reason)
        if known != (seen.health, seen.reason) and not known[0] == seen.health == "ok":
            found.append(events.NodeStateSeen(at, name, seen.state, seen.health, seen.reason))
    return found


class Watch:
    """Asks the site every ``poll_s`` (0: never) and watches the clock.

    ``reserve_s``: how long before the limit the job is to begin its end; 0: not by itself.
    ``ends_at``: the limit, in seconds since 1970, if it is known.
    """

    def __init__(
        self,
        backend: Backend,
        nodes: Sequence[str],
        poll_s: float,
        reserve_s: float,
        ends_at: float | None,
        emit: Callable[[events.Event], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._nodes = nodes
        self._poll_s = poll_s
        self._reserve_s = reserve_s
        self._ends_at = ends_at
        self._emit = emit
        self._say = say
        #: Of the events; the pauses go by this machine's.
        self._clock = clock
        self._seen: Mapping[str, Sighting] = {}
        self._errors = 0
        self._terminated = False
        self._reserve_begun = False

    def was_told(self, states: Mapping[str, str]) -> None:
        """What a launcher before this one was told of nodes that were not well: how they are now is
        news, and that they are well again too.
        """
        self._seen = {name: Sighting(state, "", "") for name, state in states.items()}

    async def run(self) -> None:
        """Until cancelled, or until there is nobody to ask and no limit to keep."""
        asks = self._poll_s > 0 or (self._reserve_s > 0 and self._ends_at is None)
        while not asks or await self._look():
            until = time.monotonic() + pause_s(self._poll_s, self._errors)
            while (left := until - time.monotonic()) > 0 or not self._poll_s:
                to_reserve_s = self._to_reserve_s()
                if to_reserve_s is None and not self._poll_s:
                    return
                waits = [_CLOCK_S, *([left] if self._poll_s else [])]
                if to_reserve_s is not None:
                    waits.append(max(0.05, to_reserve_s))
                await asyncio.sleep(min(waits))
                self._keep_reserve()

    async def _look(self) -> bool:
        """Ask once; whether it is worth to go on."""
        try:
            sight = await asyncio.to_thread(self._backend.look, self._nodes)
        except SiteError as error:
            self._errors += 1
            if self._errors == _TOLD_AFTER:
                self._say(
                    f"Slurm does not answer ({error}); of its nodes' states only what it said "
                    f"before is known, and it is asked again every "
                    f"{seconds(pause_s(self._poll_s, self._errors))} or less often"
                )
            return True
        if sight is None:
            return self._ends_at is not None
        if self._errors >= _TOLD_AFTER:
            self._say("Slurm answers again")
        self._errors = 0
        self._ends_at = sight.ends_at
        for event in news(self._seen, sight.nodes, self._clock()):
            self._emit(event)
        self._seen = {**self._seen, **sight.nodes}
        self._keep_reserve()
        return True

    def _to_reserve_s(self) -> float | None:
        if self._ends_at is None or not self._reserve_s or self._reserve_begun:
            return None
        return self._ends_at - self._reserve_s - time.time()

    def _keep_reserve(self) -> None:
        to_reserve_s = self._to_reserve_s()
        if to_reserve_s is None or to_reserve_s > 0:
            return
        self._reserve_begun = True
        why = f"{seconds(self._reserve_s)} before the time limit"
        self._near(why, left_s(self._ends_at, time.time()))

    # ------------------------------------------------------------ the launcher's signals

    def asked_to_end(self) -> None:
        """SIGUSR1, as sent by ``sbatch --signal=B:USR1@120``."""
        self._near("SIGUSR1", left_s(self._ends_at, time.time()))

    def terminated(self) -> bool:
        """SIGTERM: whether it is the time limit's, by the clock; a second one is not."""
        if self._terminated or not is_at_limit(self._ends_at, time.time()):
            return False
        self._terminated = True
        self._near("SIGTERM at the time limit", KILL_WAIT_LEFT_S, ending=True)
        return True

    def _near(self, why: str, within_s: float, *, ending: bool = False) -> None:
        self._emit(events.LimitNear(self._clock(), why, within_s, ending))
