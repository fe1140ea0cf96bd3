"""What operators ask of a running job, and who waits for which answer.

The controller answers in its turn, by an action. A launcher that leads no more, or whose job is
over, answers at once whoever waits and whoever comes later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deadpool_launch.controller import events
from deadpool_runtime import protocol


class Questions:
    """``emit``: puts an event before the controller. ``clock``: that of its events. ``standing``:
    how the job stands. ``host``: the launcher's own node, if it is one of the job's.
    """

    def __init__(
        self,
        emit: Callable[[events.Event], None],
        clock: Callable[[], float],
        standing: Callable[[], protocol.JobStanding],
        host: str | None,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._standing = standing
        self._host = host
        #: By the number of the request: who waits for its answer.
        self._waiting: dict[int, asyncio.Future[protocol.Answer]] = {}
        self._requests = 0
        self._refusal: protocol.Denied | None = None

    async def ask(self, question: protocol.Question) -> protocol.Answer:
        """Ask the controller, in its turn."""
        if self._refusal is not None:
            return self._refusal
        if isinstance(question, protocol.AskStanding):
            return self._standing()
        self._requests += 1
        number = self._requests
        self._waiting[number] = asyncio.get_running_loop().create_future()
        match question:
            case protocol.DrainNode(node=node, reason=reason):
                why = f"is drained ({reason or 'asked for'}, seen)"
                self._emit(events.DrainRequested(self._clock(), node, why, number))
        try:
            answer = await self._waiting[number]
        finally:
            del self._waiting[number]
        if isinstance(answer, protocol.Done) and question.node == self._host:
            return protocol.Done(f"{answer.text}; {stays_text(self._host)}")
        return answer

    def answered(self, answer: events.Answered) -> None:
        """The controller has answered; nobody waits if another launcher was asked."""
        waiting = self._waiting.get(answer.request)
        if waiting is not None and not waiting.done():
            denied = protocol.Denied(answer.text, answer.mistaken)
            waiting.set_result(protocol.Done(answer.text) if answer.done else denied)

    def refuse(self, why: str) -> None:
        """From now on the answer is this, also for those who wait."""
        self._refusal = protocol.Denied(why)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(self._refusal)


def stays_text(node: str) -> str:
    """What a drain of the launcher's own node does not move, as a sentence."""
    return f"the launcher stays on {node} until the job ends, so leave the node running until then"
