"""The reliability table: from the results in JSON to Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos_outcome import RUNGS

HEAD = """# Reliability

Every fault below is brought about in a real job on a real Slurm cluster of {nodes} nodes
(`make cluster`): three active nodes with a rank each, one or two spares, all on {cpus} cores.
After every step each rank writes down the hash of its parameters, optimizer state, random
generators and data position; *same bits* means that each of them, also those of steps that were
run again, is that of the undisturbed run. *Seconds* go from the fault to the first completed step
behind it, with the time-outs in them ({timeouts}). A process or file that a job
leaves on a node that can be reached fails the run.

`make chaos` writes this page from `reliability.json`; `python tests/chaos/chaos.py --case NAME`
runs one case. The exit code is 1 if anything is not as the case expects it.

"""
#: Characters of a job's reason to stop.
_MOST_REASON = 140
_COLUMNS = ("fault", "how", "what happened", "rung", "steps again", "seconds", "same bits", "exit")


def page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    head = HEAD.format(nodes=results["nodes"], cpus=results["cpus"], timeouts=results["timeouts"])
    lines = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS))]
    lines += [_row(_cells(case)) for case in results["cases"]]
    wrong = [case for case in results["cases"] if case["deviations"]]
    text = head + "\n".join(lines) + "\n"
    if wrong:
        text += "\n## Not as expected\n\n"
        text += "".join(f"- {case['fault']}: {'; '.join(case['deviations'])}\n" for case in wrong)
    return text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _cells(case: Mapping[str, Any]) -> list[str]:
    outcome = case["outcome"]
    closed = outcome["incidents"]
    verdicts = [incident["verdict"] for incident in closed]
    seconds = outcome["first_step_s"]
    return [
        case["fault"],
        case["how"],
        case["told"] or _happened(outcome, verdicts),
        ", ".join(f"{rung} {RUNGS[rung]}" for rung in _each_once(i["rung"] for i in closed)) or "-",
        ", ".join(str(incident["replayed_steps"]) for incident in closed) or "-",
        "-" if seconds is None else f"{seconds:.1f}",
        {True: "yes", False: "**no**", None: "-"}[outcome["same_bits"]],
        "none" if outcome["exit_code"] is None else str(outcome["exit_code"]),
    ]


def _happened(outcome: Mapping[str, Any], verdicts: Sequence[str]) -> str:
    if outcome["exit_code"]:
        reason = str(outcome["reason"])
        return reason if len(reason) <= _MOST_REASON else f"{reason[: _MOST_REASON - 1].rstrip()}…"
    return _counted(verdicts) or "trained on"


def _each_once(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _counted(words: Sequence[str]) -> str:
    parts = []
    for word in _each_once(words):
        count = words.count(word)
        parts.append(word if count == 1 else f"{word} {count} times")
    return ", ".join(parts)
