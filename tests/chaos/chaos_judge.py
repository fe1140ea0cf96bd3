"""Whether what came of a case is what it expects. Pure."""

from __future__ import annotations

from chaos_case import Expect
from chaos_outcome import Outcome


def deviations(expect: Expect, outcome: Outcome) -> list[str]:
    """What is not as expected, a sentence each."""
    found = []
    if outcome.exit_code != expect.exit_code:
        reason = f" ({outcome.reason})" if outcome.reason else ""
        found.append(f"exit code {outcome.exit_code}, not {expect.exit_code}{reason}")
    verdicts = {incident.verdict for incident in outcome.incidents}
    if verdicts != set(expect.verdicts):
        told = f"verdicts {', '.join(sorted(verdicts)) or 'none'}"
        found.append(f"{told}, not {', '.join(expect.verdicts) or 'none'}")
    for incident in outcome.incidents:
        if expect.rungs and incident.rung not in expect.rungs:
            found.append(f"rung {incident.rung}, not {' or '.join(map(str, expect.rungs))}")
        if incident.replayed_steps > expect.most_replayed:
            found.append(f"{incident.replayed_steps} completed steps were run again")
    if outcome.difference:
        found.append(outcome.difference)
    found += [f"left behind: {sentence}" for sentence in outcome.left]
    return found
