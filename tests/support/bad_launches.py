"""Wrong inputs of ``deadpool-launch``: its script, its options, and those of a submission."""

from __future__ import annotations

from bad_inputs import Case, bad

_HERE = "deadpool-launch --site local"
#: Outside of an allocation, so that a job would be submitted.
_SUBMIT = "deadpool-launch --print-script --nodes 2"
_SAVES = "--checkpoint-dir c --checkpoint-every 5"


def _script(content: str | bytes | None, *parts: str) -> Case:
    return bad(f"{_HERE} odd.py", "odd.py", *parts, files={"odd.py": content})


SCRIPTS = (
    bad("deadpool-launch", "no script given: deadpool-launch [OPTIONS] SCRIPT [-- SCRIPT ARGS]"),
    bad(f"{_HERE} none.py", "there is no script none.py"),
    bad(f"{_HERE} '~/train.py'", "there is no script ~/train.py"),
    bad(f"{_HERE} {'a' * 300}.py", "there is no script aaa"),
    bad(f"{_HERE} other/train.py", "there is no script", files={"other": None}, by_another=True),
    _script(None, "there is no script odd.py: it is a folder; name a file in it"),
    _script("#!/bin/bash\ncd $SCRATCH\n", "line 2: is not Python (invalid syntax)"),
    _script("x = 1\ny = (\n", "line 2: is not Python ('(' was never closed)"),
    _script(
        "def f():\n\tx = 1\n        y = 2\n", "line 3: is not Python (inconsistent use of tabs"
    ),
    _script("return 1\n", "line 1: is not Python ('return' outside function)"),
    _script(bytes(range(256)), "is not Python ("),
    _script(b"print('caf\xe9')\n", "is not Python (", "'utf-8' codec"),
    _script(b"#" * ((16 << 20) + 1), "is larger than 16 MiB; is it a Python script?"),
    bad(f"{_SUBMIT} odd.py", "odd.py, line 1: is not Python", files={"odd.py": "if\n"}),
    bad(f"{_HERE} train.py -- {'a' * 70_000}", "arguments have 70001 bytes, and 65536 at most can"),
    Case((*_HERE.split(), "train.py", "--", "caf\udce9"), ("argument caf\\udce9: is not UTF-8",)),
    Case((*_HERE.split(), "caf\udce9.py"), ("there is no script caf\\udce9.py",)),
    Case((*_SUBMIT.split(), "train.py", "--", "caf\udce9"), ("is not UTF-8; write such names",)),
)

WORDS = (
    bad(f"{_HERE} train.py --spare 2", "--spare is not an option", "did you mean --spares?"),
    bad(f"{_HERE} train.py --lr 3e-4", "--lr is not an option", "the script go after --:"),
    bad(f"{_HERE} train.py config.yaml", "config.yaml is one argument too many", "go after --"),
    bad(f"{_HERE} train.py —nodes 4", "—nodes: does not begin with -", "type it anew"),
    bad(f"{_HERE} train.py --nodes ''", "--nodes: is empty", "variable of the shell not set"),
    bad(f"{_HERE} '' train.py", "an argument: is empty", "leave it out"),
    bad(f"{_HERE} --dry-run train.py --checkpoint-name=", "--checkpoint-name: is empty"),
    Case((*_HERE.split(), "train.py\r"), ("train.py\\r: ends with a carriage return", "dos2unix")),
    Case((*_HERE.split(), "train.py", "--nodes\xa04"), ("--nodes\\xa04 is not an option",)),
)

COUNTS = (
    bad(f"{_HERE} train.py --spares two", "'--spares': 'two' is not a valid integer"),
    bad(f"{_HERE} train.py --spares", "'--spares' requires an argument"),
    bad(f"{_HERE} train.py --spares -1", "--spares -1: must be at least 0"),
    bad(f"{_HERE} train.py --nodes 0", "--nodes 0: must be at least 1"),
    bad(f"{_HERE} train.py --nodes 1.5", "'--nodes': '1.5' is not a valid integer"),
    bad(f"{_HERE} train.py --nodes 257", "--nodes 257: must be at most 256 with --site local"),
    bad(f"{_HERE} train.py --nproc-per-node 0", "--nproc-per-node 0: must be auto, gpu or a numb"),
    bad(f"{_HERE} train.py --nproc-per-node gpus", "--nproc-per-node gpus: must be auto, gpu or"),
    bad(f"{_HERE} train.py --nproc-per-node gpu", "has no GPUs on this node; request them"),
    bad(f"{_HERE} --dry-run train.py --nproc-per-node 9999999999", "number from 1 to 1024"),
    bad(
        f"{_HERE} train.py",
        "--nproc-per-node 4096: must be at most 1024",
        env={"SLURM_GPUS_ON_NODE": "4096"},
    ),
    bad(f"{_HERE} train.py --world-size 0", "--world-size 0: must be at least 1"),
    bad(f"{_HERE} train.py --world-size 3", "--world-size 3: 1 active node with --nproc-per-no"),
    bad(f"{_HERE} train.py --max-restarts -1", "--max-restarts -1: must be at least 0"),
    bad(f"{_HERE} train.py --max-restarts 1{'0' * 20}", "must be at most 999999999"),
    bad(f"{_HERE} train.py --standby-launchers no", "'no' is not a valid integer"),
)

VALUES = (
    bad(f"{_HERE} train.py --heartbeat-timeout 0", "--heartbeat-timeout 0: must be from 0.5 to"),
    bad(f"{_HERE} train.py --heartbeat-timeout nan", "'nan' is not a duration such as 90s, 5m"),
    bad(f"{_HERE} train.py --heartbeat-timeout -3s", "'-3s' is not a duration"),
    bad(f"{_HERE} train.py --heartbeat-timeout {'9' * 400}", "9' is not a duration"),
    bad(f"{_HERE} train.py --collective-timeout 2 --heartbeat-timeout 5", "must be longer than"),
    bad(f"{_HERE} train.py --agent-start-timeout 2h", "7200: must be from 1 to 3600 s"),
    bad(f"{_HERE} train.py --on-exhausted shrnk", "'shrnk' is wrong; must be a list of shrink"),
    bad(f"{_HERE} train.py --on-exhausted stop,shrink", "'stop, shrink' is wrong", "stop last"),
    bad(f"{_HERE} train.py --spare-start later", "'later' is not one of 'at-start', 'on-failure'"),
    bad(f"{_HERE} train.py --mpi openmpi", "'openmpi' is not one of 'none', 'pmi2'"),
    bad(f"{_HERE} train.py --mpi pmix", "--mpi pmix: with --site local it is mpiexec"),
    bad(f"{_HERE} train.py --metrics 99999", "--metrics 99999: must be a port, such as 9400"),
    bad(f"{_HERE} train.py --metrics http://a:1", "http://a:1: must be a port", "HOST:PORT"),
    bad(f"{_HERE} train.py --fault power-off", "power-off: not of the form KIND:TARGET@STEP"),
    bad(f"{_HERE} train.py --rules none.yaml", "none.yaml: cannot be read (No such file"),
    bad(f"{_HERE} train.py --policy none.yaml", "--policy none.yaml: cannot be read (No such"),
    bad(f"{_HERE} train.py --policy .", "--policy .: cannot be read (Is a directory)"),
    bad(f"{_HERE} train.py --requeue-before-limit", "there is no queue with --site local"),
    bad(f"{_HERE} train.py --job-comment", "there is no job in Slurm with --site local"),
)

FOLDERS = (
    bad(f"{_HERE} train.py --run-dir train.py", "train.py: cannot be used (File exists); name a"),
    bad(f"{_HERE} train.py --run-dir swap", "swap: holds another run already; name a new or"),
    bad(f"{_HERE} train.py --run-dir={'a' * 300}", "cannot be used (File name too long); name a"),
    bad(f"{_HERE} train.py '--run-dir=~/runs'", "'--run-dir'", "not replaced", "./~/runs for a"),
    bad(f"{_HERE} train.py --run-dir '$SCRATCH/a'", "not replaced the beginning of $SCRATCH/a"),
    bad(f"{_HERE} train.py --checkpoint-dir c", "--checkpoint-dir and --checkpoint-every go toge"),
    bad(f"{_HERE} train.py --checkpoint-dir c --checkpoint-every 0", "how many steps (at least 1)"),
    bad(f"{_HERE} train.py --checkpoint-dir c --checkpoint-every x", "'x' is not a valid integer"),
    bad(
        f"{_HERE} train.py --checkpoint-dir train.py --checkpoint-every 5",
        "train.py: cannot be used (Not a directory); name a directory that you can write",
    ),
    bad(f"{_HERE} train.py '--checkpoint-dir=~/c' --checkpoint-every 5", "not replaced the begin"),
    bad(f"{_HERE} train.py {_SAVES} --checkpoint-name ../x", "../x: is the name of one folder in"),
    bad(f"{_HERE} train.py {_SAVES} --checkpoint-name {'a' * 300}", "255 bytes at most"),
    bad(f"{_HERE} train.py --checkpoint-name x", "--checkpoint-name x: goes with --checkpoint-"),
    Case(
        (*_HERE.split(), "train.py", "--run-dir", "caf\udce9"),
        ("--run-dir ", "caf\\udce9: is not UTF-8; give it another name"),
    ),
)

_INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
PLACES = (
    bad("deadpool-launch train.py", "not inside a Slurm allocation: submit a script", code=10),
    bad("deadpool-launch train.py --site slurm", "not inside a Slurm allocation", code=10),
    bad(
        "deadpool-launch train.py",
        *("not inside a Slurm allocation", "or use --site local"),
        code=10,
        env={"SLURM_JOB_ID": ""},
    ),
    bad(
        "deadpool-launch train.py",
        *("the nodes of job 7 cannot be found", "SLURM_JOB_NODELIST is not set"),
        code=10,
        env={"SLURM_JOB_ID": "7"},
    ),
    bad(
        "deadpool-launch train.py",
        *("the nodes of job 7 cannot be found", "SLURM_JOB_NODELIST n[1- is no list of nodes"),
        code=10,
        env={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-"},
    ),
    bad(
        "deadpool-launch train.py",
        "was started by srun: call it once",
        code=10,
        env={**_INSIDE, "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
    ),
    bad(
        "deadpool-launch train.py",
        "DEADPOOL_SLURM_ACCESS=rest: must be commands or pyslurm",
        env={**_INSIDE, "DEADPOOL_SLURM_ACCESS": "rest"},
    ),
    bad("deadpool-launch train.py --spares 3", "the allocation has 3 nodes, so at", env=_INSIDE),
    bad("deadpool-launch train.py -t 60", "--time has no effect here: this is job 7", env=_INSIDE),
    bad("deadpool-launch train.py --site lokal", "is no site (did you mean local?); there are ge"),
    bad("deadpool-launch train.py --site ./my.yaml", "must be the name of a site, not a path"),
    bad(
        "deadpool-launch train.py",
        "DEADPOOL_SITE cloud: is no site",
        env={"DEADPOOL_SITE": "cloud"},
    ),
    bad(
        f"{_HERE} train.py",
        "DEADPOOL_SITE_POLICY none.yaml: cannot be read (No such file or directory)",
        env={"DEADPOOL_SITE_POLICY": "none.yaml"},
    ),
    bad(
        f"{_HERE} train.py",
        "home/.config/deadpool/sites/local.yaml: cannot be read (Permission denied)",
        files={"home/.config/deadpool/policy.yaml": ""},
        by_another=True,
    ),
)

SUBMISSIONS = (
    bad(f"{_SUBMIT} train.py -t 0", "--time 0: must be a time limit of at least a minute, such as"),
    bad(f"{_SUBMIT} train.py -t 30s", "--time 30s: must be a time limit of at least a minute"),
    bad(f"{_SUBMIT} train.py -t 1y", "--time 1y: must be a time limit"),
    bad(f"{_SUBMIT} train.py -t {'9' * 400}d", "must be a time limit"),
    bad(f"{_SUBMIT} train.py -p 'a b'", "--partition a b: must be a name, without blanks"),
    Case(
        (*_SUBMIT.split(), "train.py", "-A", "a\n#SBATCH -N9"), ("--account a\\n#SBATCH -N9: mus",)
    ),
    bad(f"{_SUBMIT} train.py -q ''", "-q: is empty; is a variable of the shell not set?"),
    bad(f"{_SUBMIT} train.py -J 'my job'", "--job-name my job: must be a letter or digit"),
    bad(f"{_SUBMIT} train.py --chain two", "'two' is not a valid integer"),
    bad(f"{_SUBMIT} train.py --chain 0 {_SAVES}", "--chain 0: must be from 1 to 100 jobs"),
    bad(f"{_SUBMIT} train.py --chain 3", "name --checkpoint-dir and --checkpoint-every"),
    bad(f"{_SUBMIT} train.py --chain-name 'a b'", "--chain-name a b: must be a letter or digit"),
    bad(f"{_SUBMIT} train.py --sbatch-arg --mail-type END", "END is one argument too many"),
    bad(f"{_SUBMIT} train.py --sbatch-arg=mem=5", "must be one option of sbatch as one word"),
    bad(f"{_SUBMIT} train.py --sbatch-arg=--nodes=3", "is set already; use --nodes and --spares"),
    bad(f"{_SUBMIT} train.py --sbatch-arg=--tim=5", "--tim=5: is set already; use --time"),
    bad(f"{_SUBMIT} train.py --sbatch-arg=-W", "is set already; deadpool status follows the job"),
    bad(f"{_SUBMIT} train.py --nodes 999999999999", "must be at most 131072"),
    bad(f"{_SUBMIT} train.py --rules none.yaml", "none.yaml: cannot be read (No such file or di"),
    bad(
        f"{_SUBMIT} train.py --nproc-per-node 4 --world-size 15",
        "--world-size 15: 2 active nodes with --nproc-per-node 4 make 8",
    ),
    bad("deadpool-launch train.py -t 60", "--time: to submit a job, name how many nodes are to"),
    bad("deadpool-launch train.py --print-script", "--print-script: to submit a job, name how"),
    bad("deadpool-launch train.py --nodes 2", "there is no sbatch here: submit from a", code=10),
    bad("deadpool-launch train.py --site local -t 60", "nothing is submitted with --site local"),
    bad(f"{_SUBMIT} train.py --site vista --nodes 99", "and site vista allows 64 (limits.nodes, "),
)

LAUNCHES = {
    "scripts": SCRIPTS,
    "words": WORDS,
    "counts": COUNTS,
    "values": VALUES,
    "folders": FOLDERS,
    "places": PLACES,
    "submissions": SUBMISSIONS,
}
