"""Wrong inputs of what is asked about jobs: those that run, that have ended, that are planned."""

from __future__ import annotations

import json

from bad_inputs import Case, bad

_LONG_NAME = "a" * 300
#: Run directories by how the journal in them is.
_FOREIGN = {"foreign/journal.jsonl": '{"level": "info", "message": "hello"}\n' * 3}
_GOING = {"deadpool-runs/1/address": "h:1\n", "deadpool-runs/2/address": "h:1\n"}


def _of_each(arguments: str, *parts: str, **given: object) -> tuple[Case, ...]:
    """For each of the commands that read a journal."""
    return tuple(
        bad(f"deadpool {command} {arguments}", *parts, **given)  # type: ignore[arg-type]
        for command in ("status", "events", "report")
    )


RUN_DIRECTORIES = (
    *_of_each("", "no job goes on in deadpool-runs: name one with RUN_DIR or JOBID"),
    *_of_each("", "there are several jobs: give one of them as an argument: deadp", files=_GOING),
    *_of_each("nowhere", "nowhere: there is no such run directory"),
    *_of_each("train.py", "train.py: a file, and no run directory"),
    *_of_each("99", "99: there is no run directory of this job in deadpool-runs; name it: RUN_DIR"),
    *_of_each(_LONG_NAME, "there is no such run directory"),
    *_of_each("empty", "empty is no run directory: it has no journal.jsonl", files={"empty": None}),
    *_of_each(
        "x", "x/journal.jsonl cannot be read (Is a directory)", files={"x/journal.jsonl": None}
    ),
    *_of_each("foreign", "foreign/journal.jsonl has no record of a job", files=_FOREIGN),
    *_of_each(
        "noise", "noise/journal.jsonl has no record", files={"noise/journal.jsonl": b"\0\xff\n" * 9}
    ),
    *_of_each("swap", "swap/journal.jsonl can be read by the job's user only", by_another=True),
    *_of_each("", "SLURM_JOB_ID 7: there is no run directory of", env={"SLURM_JOB_ID": "7"}),
    *_of_each("", "SLURM_JOB_ID x: there is no such run", env={"SLURM_JOB_ID": "x"}),
    *_of_each("a b", "Got unexpected extra argument (b)"),
    *_of_each("--wach", "--wach is not an option of deadpool"),
    bad("deadpool events swap --kind incidnt", "--kind incidnt: is no kind", "mean incident?"),
    bad("deadpool events swap --kind x", "--kind x: is no kind of record, and no event; kinds are"),
    bad("deadpool events swap --rank -1", "'--rank': -1 is not in the range x>=0"),
    bad("deadpool events swap --rank x", "'x' is not a valid integer"),
    bad("deadpool events swap --node", "'--node' requires an argument"),
    bad("deadpool report swap --to none", "none/report.json cannot be written (No such file or"),
    bad("deadpool report swap --to train.py", "(Not a directory); name another folder with --to"),
)

_LATER = {"later/journal.jsonl": "", "later/secret": "x"}


def _address(text: str, *parts: str) -> Case:
    files = {**_LATER, "later/address": text}
    return bad("deadpool drain n1 --job later", *parts, code=10, files=files)


DRAINS = (
    bad("deadpool drain", "no node given: deadpool drain [OPTIONS] NODE"),
    bad("deadpool drain n1", "no job goes on in deadpool-runs: name one with --job RUN_DIR"),
    bad("deadpool drain n1", "several jobs: give one of them with --job: deadpo", files=_GOING),
    bad("deadpool drain n1 --job x", "--job x: there is no such run directory"),
    bad("deadpool drain n1 --job 99", "no run directory of this job", "name it: --job RUN_DIR"),
    bad("deadpool drain n1 --job train.py", "--job train.py: a file, and no run directory"),
    bad("deadpool drain n1 --job empty", "empty is no run directory", files={"empty": None}),
    bad("deadpool drain n1 --job swap", "the job of swap has ended: ", code=10),
    bad("deadpool drain n1 --job later", "has not begun yet, or has", code=10, files=_LATER),
    bad("deadpool drain n1 --job swap --reason", "'--reason' requires an argument"),
    _address("nonsense\n", "does not say where the launcher is: address is not HOST:PORT"),
    _address("h:99999\n", "address is not HOST:PORT"),
    _address("\xff\0:1\n", "address is not HOST:PORT"),
    _address(f"{'a' * 70}:9\n", "address is not HOST:PORT"),
    _address("127.0.0.1:1\n", "cannot be reached at 127.0.0.1:1 (", "is it still there?"),
)

_SIMULATE = "deadpool simulate --steps 5000 --step-time 10s --nodes 64 --seeds 2"
_MEDIANS = {"kill of one process": 3.0, "power-off, spare at-start": 4.0}


def _medians(**changed: object) -> str:
    cases = {**_MEDIANS, **changed}
    return json.dumps({"results": {k: {"median": {"first step": v}} for k, v in cases.items()}})


def _recorded(text: str | bytes | None, *parts: str) -> Case:
    return bad(f"{_SIMULATE} --trace t.csv", "t.csv", *parts, files={"t.csv": text})


def _measured(text: str | bytes | None, *parts: str) -> Case:
    return bad(f"{_SIMULATE} --measured m.json", "m.json: ", *parts, files={"m.json": text})


SIMULATIONS = (
    bad("deadpool simulate", "--steps is missing; say what to simulate, such as --steps 100000"),
    bad(f"{_SIMULATE} extra", "Got unexpected extra argument (extra)"),
    bad(f"{_SIMULATE} --steps ten", "--steps ten: must be a whole number of at least 1"),
    bad(f"{_SIMULATE} --steps -5", "--steps -5: must be a whole number of at least 1"),
    bad(f"{_SIMULATE} --steps 1e400", "--steps 1e400: must be a whole number of at least 1"),
    bad(f"{_SIMULATE} --steps 1e15 --step-time 1h", "is the unit right?"),
    bad(f"{_SIMULATE} --nodes 1e9", "--nodes 1e9: must be at most 200,000"),
    bad(f"{_SIMULATE} --spares x", "--spares x: must be a whole number of at least 0"),
    bad(f"{_SIMULATE} --seeds 0", "--seeds 0: must be a whole number of at least 1"),
    bad(f"{_SIMULATE} --seeds 1e9", "--seeds 1e9: must be at most 100,000"),
    bad(f"{_SIMULATE} --seed 1e30", "--seed 1e30: must be at most"),
    bad(f"{_SIMULATE} --domain 0", "--domain 0: must be a whole number of at least 1"),
    bad(f"{_SIMULATE} --least-nodes 65", "--least-nodes 65: must be at most the 64 of --nodes"),
    bad(f"{_SIMULATE} --step-time -5s", "--step-time -5s: must be a duration such as 90s"),
    bad(f"{_SIMULATE} --step-time 10y", "--step-time 10y: must be a duration such as 90s"),
    bad(f"{_SIMULATE} --step-time nan", "--step-time nan: must be a duration"),
    bad(f"{_SIMULATE} --node-mtbf 50", "fails every 0.781 s, and a step takes 10s", "unit missing"),
    bad(
        f"{_SIMULATE} --queue-wait 0", "--queue-wait 0: must be a duration such as 90s", "above ze"
    ),
    bad(f"{_SIMULATE} --group 4", "--group and --group-mtbf: give both or neither"),
    bad(f"{_SIMULATE} --group 4 --group-mtbf 1s", "so none would be completed"),
    bad(f"{_SIMULATE} --weibull nan", "--weibull nan: must be a shape from 0.1 to 10"),
    bad(f"{_SIMULATE} --weibull flat", "'flat' is not a valid float"),
    bad(f"{_SIMULATE} --transient nan", "--transient nan: must be a number from 0 and below 1"),
    bad(f"{_SIMULATE} --transient 25%", "--transient 25%: must be a number from 0 and below 1"),
    bad(f"{_SIMULATE} --strategy luck", "--strategy luck: not one of fixed, young-daly"),
    bad(f"{_SIMULATE} --set fixed.save", "must be STRATEGY.FIGURE=VALUE; figures are"),
    bad(f"{_SIMULATE} --set fixed.save=-1s", "save (standstill for a durable checkpoint) must be"),
    bad(f"{_SIMULATE} --set deadpool.overhead=nan", "must be a share such as 0.02, at least 0"),
    bad(f"{_SIMULATE} --plot a.pdf", "--plot a.pdf: must end in .png"),
    bad(f"{_SIMULATE} --plot none/a.png", "--plot none/a.png: the folder does not exist"),
    bad(f"{_SIMULATE} --plot a.png", "--plot a.png: is a folder; name a", files={"a.png": None}),
    bad(f"{_SIMULATE} --policy .", "--policy .: cannot be read (Is a directory)"),
    bad(f"{_SIMULATE} --replication-factor 64", "replicas go to so many other nodes"),
    bad(f"{_SIMULATE} --replication-interval -1", "-1: must be a whole number of at least 1"),
    bad("deadpool simulate --paper --nodes 4", "--nodes: --paper sets it; leave out one of them"),
    bad("deadpool simulate --paper --step-time 10d", "is the unit right?"),
    bad("deadpool simulate --paper --node-mtbf 20m", "so none would be completed"),
    bad("deadpool simulate --paper --seeds 1 --node-mtbf 99999d", "no fault strikes in 1 runs"),
    bad(f"{_SIMULATE} --trace none.csv", "none.csv: cannot be read as lines of text (No such file"),
    bad(f"{_SIMULATE} --trace swap", "swap: cannot be read as lines of text (Is a directory)"),
    bad(f"{_SIMULATE} --trace t --weibull 2", "--weibull: is not for a --trace; leave out one of"),
    _recorded("", "has no fault later than its begin; name at least one"),
    _recorded("time,node,kind\n1h,1,permanent\n", "line 1: must be TIME,NODE,KIND"),
    _recorded("1h,-1,permanent\n", "line 1: must be TIME,NODE,KIND with a node's number from 0"),
    _recorded("-1h,1,permanent\n", "line 1: must be TIME,NODE,KIND"),
    _recorded("nan,1,permanent\n", "line 1: must be TIME,NODE,KIND"),
    _recorded(
        "\ufeff1h,1,permanent\r\n2h,64,permanent\r\n", "line 2: there is no node 64; the job"
    ),
    _recorded("1h;1;permanent\n", "line 1: must be TIME,NODE,KIND"),
    _recorded(b"1h,1,perm\xe9\n", "cannot be read as lines of text (not UTF-8 text)"),
    _recorded("1s,1,permanent\n" * 9 + "1s,2,transient\n", "so none would be completed"),
    _measured("{", "is not what bench/first_step.py writes (line 1 is not JSON"),
    _measured("[]", "is not what bench/first_step.py writes (it has another form)"),
    _measured("[" * 5_000, "is not what bench/first_step.py writes (it has another form)"),
    _measured('{"results": {}}', "('kill of one process' is not in it)"),
    _measured(_medians(**{"kill of one process": -1}), "kill of one process has the median -1"),
    _measured(_medians(**{"kill of one process": float("nan")}), "has the median nan; must be sec"),
    _measured(_medians(**{"kill of one process": "3"}), "has the median '3'; must be seconds to"),
    _measured(None, "is not what bench/first_step.py writes (Is a directory)"),
)

_PLAN = "deadpool plan --params 7B --nodes 16 --step-time 5s --time-limit 7d --seeds 2"
PLANS = (
    bad("deadpool plan --nodes 4", "--params is missing; say what to plan, such as --params 7B"),
    bad(f"{_PLAN} --params 7X", "--params 7X: must be a whole number of at least 1"),
    bad(f"{_PLAN} --params 0.5", "--params 0.5: must be a whole number of at least 1"),
    bad(f"{_PLAN} --params 1e30", "--params 1e30: must be at most"),
    bad(f"{_PLAN} --nodes 1e7", "--nodes 1e7: must be at most 200,000"),
    bad(f"{_PLAN} --nproc-per-node 1e6", "--nproc-per-node 1e6: must be at most 1,024"),
    bad(f"{_PLAN} --spares two", "--spares two: must be a whole number of at least 1"),
    bad(f"{_PLAN} --dp 3", "--dp 3: must be 16, as 16 ranks are shared"),
    bad(f"{_PLAN} --tp 3", "--tp 3 x --pp 1: 16 ranks (16 nodes x 1) are not a multiple of 3"),
    bad(f"{_PLAN} --pp 0", "--pp 0: must be a whole number of at least 1"),
    bad(f"{_PLAN} --shard 4", "--shard: is for --sharding hsdp only"),
    bad(f"{_PLAN} --sharding hsdp --shard 3", "must be 2 or more and divide the 16 data-parallel"),
    bad(f"{_PLAN} --sharding full", "'full' is not one of 'ddp', 'zero1', 'fsdp', 'hsdp'"),
    bad(f"{_PLAN} --dtype fp8", "'fp8' is not one of 'fp32'"),
    bad(f"{_PLAN} --optimizer lion", "'lion' is not one of 'adamw'"),
    bad(f"{_PLAN} --optimizer-dtype int8", "'int8' is not one of 'fp32'"),
    bad(f"{_PLAN} --step-time 8d", "--step-time: must be shorter than --time-limit"),
    bad(f"{_PLAN} --time-limit forever", "--time-limit forever: must be a duration such as"),
    bad(f"{_PLAN} --time-limit 99999d", "years without any fault, and 100 at most", "unit right?"),
    bad(f"{_PLAN} --node-mtbf 20", "fails every 1.25 s, and a step takes 5s, so none"),
    bad(f"{_PLAN} --transient 1", "--transient 1: must be a number from 0 and below 1"),
    bad(f"{_PLAN} --probability nan", "--probability nan: must be a number from 0 and below 1"),
    bad(f"{_PLAN} --probability 0", "--probability 0: must be a number above 0, such as 0.99"),
    bad(f"{_PLAN} --queue-wait soon", "--queue-wait soon: must be a duration"),
    bad(f"{_PLAN} --overhead -0.1", "--overhead -0.1: must be a number from 0 and below 1"),
    bad(f"{_PLAN} --memory-per-node lots", "--memory-per-node lots: must be a size such as 512G"),
    bad(f"{_PLAN} --memory-per-node 1e400", "must be a size such as 512G or 1.5T"),
    bad(f"{_PLAN} --copy-rate 0", "--copy-rate 0: must be a size such as 512G"),
    bad(f"{_PLAN} --send-rate -1G", "--send-rate -1G: must be a size such as 512G"),
    bad(f"{_PLAN} --seeds x", "--seeds x: must be a whole number of at least 1"),
    bad(f"{_PLAN} --policy none.yaml", "--policy none.yaml: cannot be read (No such file or direc"),
    bad(f"{_PLAN} --replication-factor 0", "--replication-factor 0: must be a whole number of at"),
    bad(f"{_PLAN} --replication-factor 99", "replicas go to so many other nodes"),
    bad(f"{_PLAN} --replication-interval x", "--replication-interval x: must be a whole number"),
)

_LOOK = "deadpool preflight --site local"
PREFLIGHTS = (
    bad(f"{_LOOK} --nodes 0", "--nodes 0: must be a whole number of at least 1"),
    bad(f"{_LOOK} --nodes 1000", "--nodes 1000: must be at most 256 with --site local"),
    bad(f"{_LOOK} --spares -1", "'--spares': -1 is not in the range x>=0"),
    bad(f"{_LOOK} --nproc-per-node some", "--nproc-per-node some: must be auto, gpu or a number"),
    bad("deadpool preflight --site lcal", "--site lcal: is no site (did you mean local?)"),
    bad(f"{_LOOK} --mpi pmix", "--mpi pmix: with --site local it is mpiexec"),
    bad(f"{_LOOK} --agent-start-timeout 2h", "7200: must be from 1 to 3600 s"),
    bad(f"{_LOOK} --agent-start-timeout x", "--agent-start-timeout x: must be a duration"),
    bad(f"{_LOOK} --state-bytes lots", "--state-bytes lots: must be a size such as 512G"),
    bad(f"{_LOOK} --state-bytes 1G --params 7B", "--params and --state-bytes: give one of them"),
    bad(f"{_LOOK} --state-bytes 1G --sharding zero1", "give --params"),
    bad(f"{_LOOK} --params 7B --tp 3", "--tp 3 x --pp 1: 1 ranks (1 nodes x 1) are not a multi"),
    bad(f"{_LOOK} --params 7B --shard 2", "--shard: is for --sharding hsdp only"),
    bad(f"{_LOOK} --params 7B --pp 0", "--pp 0: must be a whole number of at least 1"),
    bad(f"{_LOOK} --params 7B --dtype fp8", "'fp8' is not one of 'fp32'"),
    bad(f"{_LOOK} --params 7B --optimizer lion", "'lion' is not one of 'adamw'"),
    bad(f"{_LOOK} --params 7B --optimizer-dtype int8", "'int8' is not one of 'fp32'"),
    bad(f"{_LOOK} --run-dir=", "--run-dir: is empty"),
    bad(f"{_LOOK} --policy none.yaml", "--policy none.yaml: cannot be read (No such file or direc"),
    bad("deadpool preflight --self-test", "--self-test: there are no nodes to test; ru", code=10),
    bad(
        f"{_LOOK}",
        "home/.config/deadpool/policy.yaml, line 1: spars is not a key (did you mean spares?)",
        files={"home/.config/deadpool/policy.yaml": "spars: 1\n"},
    ),
)

_REHEARSE = "deadpool rehearse train.py --fault kill:0@5"
REHEARSALS = (
    bad("deadpool rehearse", "no script given: deadpool rehearse [OPTIONS] SCRIPT"),
    bad("deadpool rehearse none.py", "there is no script none.py"),
    bad("deadpool rehearse x.py --fault kill:0@5", "line 1: is not Python", files={"x.py": "if\n"}),
    bad("deadpool rehearse train.py", "nothing to rehearse: name at least one --fault, such as"),
    bad("deadpool rehearse train.py --fault boom:0@5", "the kind is one of power-off, vanish"),
    bad("deadpool rehearse train.py --fault kill:n1@5", "kill strikes a rank; the target is its"),
    bad("deadpool rehearse train.py --fault kill:0@0", "steps count from 1"),
    bad("deadpool rehearse train.py --fault kill:9@5", "--fault kill:9@5: ranks go from 0 to 2"),
    bad("deadpool rehearse train.py --fault vanish:9@5", "9 is no active node; those are local1"),
    bad(f"{_REHEARSE} --fault kill:0@9", "rank 0 brings about kill:0@5 already; let another"),
    bad(f"{_REHEARSE} --nodes 1{'0' * 12}", "must be at most", "--nodes 1000"),
    bad(f"{_REHEARSE} --nodes 300", "--nodes 300: must be at most 256 with --site local"),
    bad(f"{_REHEARSE} --spares x", "'x' is not a valid integer range"),
    bad(f"{_REHEARSE} --nproc-per-node 0", "'--nproc-per-node': 0 is not in the range x>=1"),
    bad(f"{_REHEARSE} --nproc-per-node 9999", "number from 1 to 1024"),
    bad(f"{_REHEARSE} --agent-start-timeout soon", "'soon' is not a duration such as 90s, 5m"),
    bad(f"{_REHEARSE} --agent-start-timeout 0", "0: must be from 1 to 3600 s"),
    bad(f"{_REHEARSE} --checkpoint-dir c", "--checkpoint-dir and --checkpoint-every go together"),
    bad(f"{_REHEARSE} --checkpoint-dir train.py --checkpoint-every 5", "(Not a directory); name a"),
    bad(f"{_REHEARSE} --checkpoint-every often", "'often' is not a valid integer"),
    bad(f"{_REHEARSE} --keep swap", "--keep swap: is not empty; name a new or empty folder"),
    bad(f"{_REHEARSE} --keep train.py", "--keep train.py: cannot be used (File exists)"),
    bad(f"{_REHEARSE} '--keep=~/kept'", "the shell has not replaced the beginning of ~/kept"),
    bad(f"{_REHEARSE} --plot loss.jpg", "--plot loss.jpg: must end in .png"),
    bad(f"{_REHEARSE} -- --lr {'9' * 70_000}", "65536 at most can be passed on"),
)

_SIM = "python -m deadpool_launch.sim"
OTHERS = (
    bad("deadpool rehears", "rehears is not a command of deadpool; those are classify, drain"),
    bad("deadpool --bogus", "--bogus is not an option of deadpool"),
    bad("deadpool version 2", "Got unexpected extra argument (2)"),
    bad(f"{_SIM} --seeds some", "--seeds some: not of the form FROM:TO, such as 0:1000"),
    bad(f"{_SIM} --seeds 5:3", "--seeds 5:3: TO must be larger than FROM"),
    bad(f"{_SIM} --nodes 0", "'--nodes': 0 is not in the range x>=1"),
    bad(f"{_SIM} --spares -1", "'--spares': -1 is not in the range x>=0"),
    bad(f"{_SIM} --nproc x", "'x' is not a valid integer range"),
    bad(f"{_SIM} --scale big", "--scale big: not of the form NODESxNPROC, such as 4096x4"),
    bad(f"{_SIM} --layout ring", "'ring' is not one of"),
    bad(f"{_SIM} --fault none.json", "--fault none.json: cannot be read: No such file"),
    bad(f"{_SIM} --fault train.py", "--fault train.py: not a list of faults: "),
    bad(f"{_SIM} --seeds 1 --only 99", "--only 99: seed 1 has", "give places from 0, such as 0,2"),
)

QUESTIONS = {
    "run directories": RUN_DIRECTORIES,
    "drain": DRAINS,
    "simulate": SIMULATIONS,
    "plan": PLANS,
    "preflight": PREFLIGHTS,
    "rehearse": REHEARSALS,
    "others": OTHERS,
}
