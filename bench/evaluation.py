"""``docs/evaluation.md``, written from ``bench/results``: no figure on the page is typed in.

``python bench/evaluation.py`` prints it. ``page`` is pure; what has not been measured is named as
such, with the command that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import prediction
import records
import struck

Record = Mapping[str, Any]

_HEAD = """\
# Evaluation

How DEADPOOL was measured, what came out, and what that does not say. `python bench/evaluation.py`
makes this page from `bench/results/`; `make bench` measures everything on this page again (root,
a machine with nothing else to do, about an hour), and `python bench/compare.py OLD NEW` says
whether two folders of results agree within their spread. Shorter: [What it costs](figures.md).

## What is measured, simulated, quoted

| | where it is from |
|---|---|
| recovery, overhead, rebuilding | measured: real processes, a real Slurm 22.05, on one machine |
| up to 4,096 nodes | measured: the real launcher; its agents answer for ranks that do not exist |
| larger clusters, long jobs | simulated: the real controller; `deadpool simulate` |
| costs of other systems at scale | quoted; `deadpool simulate` names the source beside each |
"""
_THREATS = """\
## Threats to validity

- *Two cores for all nodes.* Every node of the mini cluster, and the launcher, share two cores.
  Processes that start together slow each other down, on both sides of each comparison; systems
  that start more processes in a recovery suffer more from it than on a cluster where each node
  has its own cores.
- *Loopback TCP and Gloo.* No network between nodes, no NCCL, no GPU. Bandwidth, congestion and
  the time that NCCL takes to abort and to connect are not in these figures.
- *A step is mostly sleep in the measurement of recovery*, so that its time does not depend on the
  machine. State is small: the time to move it is not tested there.
- *Replay is chosen.* A fault comes halfway between two checkpoints, which is the mean of faults
  at random. With checkpoints further apart the others lose more, with closer ones less; the
  column of what is lost without replay does not depend on it.
- *No queue.* A requeued job finds an idle node at once. On a busy cluster it waits for one.
- *Slurm was made quick for the baseline* (see its settings): its defaults take minutes longer.
- *The launcher's own node is not struck here*, nor is the node of torchrun's store, whose loss
  ends that job.
- *Baselines were set up by people who know DEADPOOL better.* Their settings are below, and the
  scripts are in `bench/`.
- *Peers.* NVIDIA's resiliency extension 0.4.1 can be installed beside the tested torch and takes
  torchrun's place with `python bench/recovery.py --peers PYTHON`; its rows are there if that was
  done. torchft 0.2.0 can be
  installed and imported here too, but wants another training script and was not run under these
  faults. Nothing is claimed against either where no row shows it.

## What the paper says, and what cannot be compared

The paper (arXiv 2607.01646) reports recovery below 40 s on up to 512 A100, and over 100,000 steps
a recovery time of 5.3 % of that of checkpoint-restart, 18.8 times less. Its seconds cannot be
compared with those above: other hardware, other communication library, other state. Its ratio
depends on the time of a step and on how far back the checkpoint is, neither of which is
published; the simulation above solves for the one that is missing and shows how the ratio
changes.
"""


def page(results: Mapping[str, Record]) -> str:
    """The whole page. ``results``: the files that are there, by name."""
    parts = [_HEAD]
    for title, name, command, write in _SECTIONS:
        missing = f"Not measured yet: `{command}`.\n"
        text = write(results[name]) if name in results else missing
        parts.append(f"## {title}\n\n{text}")
    return "\n".join([*parts, _THREATS])


def _on(record: Record) -> str:
    kernel = f", Linux {record['kernel']}" if "kernel" in record else ""
    return (
        f"`{record['command']}`, on {record['cpus']} cores ({record['machine']}{kernel}), Python "
        f"{record['python']}, torch {record['torch']}.\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _span(span: Mapping[str, float] | None, digits: int = 2) -> str:
    if span is None:
        return "-"
    return f"{span['median']:.{digits}f} ({span['low']:.{digits}f}-{span['high']:.{digits}f})"


# ---------------------------------------------------------------- sections


def _recovery(record: Record) -> str:
    results = record["results"]
    rows = []
    for case in results.values():
        found = case["summary"]
        rungs = sorted({run["rung"] for run in case["runs"] if "rung" in run})
        rows.append(
            [
                case["fault"],
                case["system"] + (f", rung {', '.join(map(str, rungs))}" if rungs else ""),
                *(_span(found.get(key)) for key in ("detected_s", "new_step_s")),
                f"{found['replayed_steps']['median']:.0f}",
                _span(found.get("standstill_s")),
                _span(found["lost_s"]),
            ]
        )
    head = ["fault", "system", "detected", "new step", "replayed steps", "lost but for replay"]
    runs = min(len(case["runs"]) for case in results.values())
    every, step_s = record["checkpoint_every"], record["step_s"]
    same = all(case["same_numbers"] for case in results.values())
    numbers = (
        "Losses of all steps of all runs are those of an undisturbed run, bit for bit."
        if same
        else "**Some losses differ from those of an undisturbed run**: "
        + ", ".join(name for name, case in results.items() if not case["same_numbers"])
        + "."
    )
    settings = "".join(f"- {name}: {text}\n" for name, text in record["settings"].items())
    return (
        f"{_on(record)}\nThe same script on three nodes and a spare, under each system, struck "
        f"in the middle "
        f"of a step of {step_s:g} s and halfway between two checkpoints, {every} steps apart. "
        f"Seconds "
        f"since the fault, median and range of {runs} runs. *Lost* is what an undisturbed job "
        f"would "
        f"not have needed until {struck.AHEAD} new steps were completed. {numbers}\n\n"
        + table([*head, "lost"], sorted(rows, key=lambda row: _ORDER.index(row[0])))
        + "\n![Time lost by fault and system](pictures/evaluation-recovery.png)\n"
        + f"\n{ratios(results)}\nSettings:\n\n{settings}\n"
        + _predicted(record)
    )


_ORDER = ("power-off", "vanish", "kill", "cut", "kill-all")
#: What at-start is to lose less than, and how many times less.
_GOALS = {"sbatch --requeue": 10.0, "torchrun, standby agent": 5.0}


def ratios(results: Mapping[str, Any]) -> str:
    """How many times less is lost with a waiting spare, against the goals."""
    lost = {
        (case["fault"], case["system"]): case["summary"]["lost_s"]["median"]
        for case in results.values()
    }
    rows = []
    for (fault, system), value in lost.items():
        own = lost.get((fault, "DEADPOOL, spare at-start"))
        if system in _GOALS and own:
            times = value / own
            verdict = "reached" if times >= _GOALS[system] else "**missed**"
            rows.append([fault, system, f"{times:.1f}", f"{_GOALS[system]:g}, {verdict}"])
    return table(["fault", "against", "times less lost", "goal"], rows)


def _predicted(record: Record) -> str:
    rows, within = [], 0
    for name, case in record["results"].items():
        found = prediction.checked(case, record["checkpoint_every"])
        good = abs(found["off"]) <= prediction.GOAL
        within += good
        rows.append(
            [
                name,
                f"{found['predicted_s']:.2f}",
                f"{found['measured_s']:.2f}",
                f"{100 * found['off']:+.0f} %" + ("" if good else " **(too far)**"),
            ]
        )
    return (
        "### Is `deadpool simulate` right about these runs?\n\n"
        "Each run is foretold by the simulator's own walk from step to step: it is told the time "
        "of a step, when the fault "
        "came and how far apart checkpoints are, and, from the *other* runs of the case, how "
        "long the system stands "
        f"still. {within} of {len(rows)} cases are within {100 * prediction.GOAL:.0f} %. This "
        f"tests the simulator's account of "
        "replay and cut-short steps, and how well a measured standstill carries over to the next "
        "fault; it does not "
        "test the standstill at other sizes.\n\n"
        + table(["case", "foretold, s", "measured, s", "off"], rows)
    )


def _overhead(record: Record) -> str:
    sizes, layouts = [], []
    for name, case in record["results"].items():
        interval = f"{case['ratio_of_means']:.2f} ({case['low']:.2f}-{case['high']:.2f})"
        if "memory_low" in case:
            checkpoints = [
                f"{case[f'{kind}_ratio_of_means']:.1f} "
                f"({case[f'{kind}_low']:.1f}-{case[f'{kind}_high']:.1f})"
                for kind in ("memory", "disk")
            ]
            layouts.append([name, f"{1e3 * case['median_step_s']:.0f}", interval, *checkpoints])
        else:
            sizes.append([name, f"{case['operations_a_byte']:.0f}", interval])
    text = (
        f"{_on(record)}\nThe same processes train with and without copies by turns; ratios of "
        f"mean step times with 95 % "
        "intervals (blocks resampled). On two nodes, by operations for each byte of state:\n\n"
        + table(["model", "operations a byte", "with copies"], sizes)
    )
    if not layouts:
        return text + "\nBy layout: not measured yet: `python bench/overhead.py --set layouts`.\n"
    return (
        text
        + "\nBy layout, on 1, 2 and 4 nodes with as much work for each rank, beside a checkpoint "
        "of `torch.distributed.checkpoint` after every step. All nodes share the machine's cores, "
        "so steps take longer "
        "with more nodes; the ratio is what counts.\n\n"
        + table(
            ["layout", "plain step, ms", "with copies", "checkpoint to memory", "to disk"], layouts
        )
        + "\n![Step times by layout](pictures/evaluation-overhead.png)\n"
    )


def _rebuild(record: Record) -> str:
    rows = [
        [
            name,
            f"{1e3 * case['made_s']:.0f}",
            _span({key: 1e3 * value for key, value in case["rebuilt_s"].items()}, 0),
            *(f"{1e3 * seconds:.1f}" for seconds in case["phases_s"].values()),
        ]
        for name, case in record["results"].items()
    ]
    phases = list(next(iter(record["results"].values()))["phases_s"])
    return (
        f"{_on(record)}\nGloo groups over all ranks, cut off and connected again in living "
        f"processes; milliseconds of the "
        "slowest rank, median and range. *Made* is what torch took to make the same groups at "
        "first.\n\n"
        + table(["", "made", "rebuilt", *phases], rows)
        + "\n![Phases of rebuilding](pictures/evaluation-rebuild.png)\n"
    )


def _scale(record: Record) -> str:
    real = [case for case in record["results"].values() if "told_s" in case]
    simulated = [case for case in record["results"].values() if "what_if_s" in case]
    first = [
        [
            f"{case['agents']:,}",
            f"{case['start_s']:.1f}",
            f"{100 * case['steady_cpu']:.1f} %",
            f"{case['steady_nbytes_an_agent']:.0f}",
            f"{max(case['decided_s'].values()):.3f}",
            f"{max(case['told_s'].values()):.3f}",
            f"{case['loss_to_resume_s']:.2f}",
        ]
        for case in real
    ]
    second = [
        [
            f"{case['nodes']:,}",
            f"{case['decision_median_us']:.0f}",
            f"{case['decision_most_ms']:.0f}",
            f"{case['incident_decisions_s']:.2f}",
            f"{case['incident_messages']:,}",
            f"{case['what_if_s']:.2f}",
        ]
        for case in simulated
    ]
    return (
        f"{_on(record)}\nThe real launcher with scripted agents. *Start*: until all are told to "
        f"train. *Steady*: of one core, and "
        "bytes a second for each agent. *Order*: the slowest order of an incident, from its "
        "decision to the last agent, and from the last word that the decision needed. *Going on*: "
        "from the loss of a node to the last agent that is told to go on.\n\n"
        + table(
            ["agents", "start, s", "steady", "bytes", "order, s", "all, s", "going on, s"], first
        )
        + "\n![Orders of an incident](pictures/evaluation-scale.png)\n"
        "\nSimulated clusters, one rank a node: what the controller's decisions take, and a "
        "`deadpool simulate` of "
        "100,000 steps.\n\n"
        + table(
            ["nodes", "decision, µs", "longest, ms", "incident, s", "messages", "what-if, s"],
            second,
        )
    )


def _paper(record: Record) -> str:
    found = record["results"]
    ratio, published = found["ratio"], found["published"]
    assumptions = "".join(f"- {text}\n" for text in found["assumptions"])
    return (
        f"`deadpool simulate --paper` says {ratio['mean']:.1f} "
        f"({ratio['low']:.1f}-{ratio['high']:.1f}) times less recovery time "
        f"than checkpoint-restart, {100 * found['share']:.1f} % of it; published are "
        f"{published['ratio']:g} times, "
        f"{100 * published['share']:.1f} %. What had to be assumed:\n\n{assumptions}"
    )


_SECTIONS: tuple[tuple[str, str, str, Callable[[Record], str]], ...] = (
    ("Recovery", "recovery", "python bench/recovery.py --runs 5", _recovery),
    ("Overhead", "overhead", "python bench/overhead.py", _overhead),
    ("Rebuilding of communicators", "rebuild", "python bench/rebuild.py", _rebuild),
    ("Scale", "scale", "python bench/scale.py", _scale),
    ("The published job", "paper", "python bench/paper.py", _paper),
)


def found() -> dict[str, Record]:
    """The results that are there."""
    names = [name for _, name, _, _ in _SECTIONS]
    paths = {name: records.RESULTS / f"{name}.json" for name in names}
    return {name: records.read(path) for name, path in paths.items() if path.exists()}


def main() -> None:
    """Print the page."""
    print(page(found()), end="")


if __name__ == "__main__":
    main()
