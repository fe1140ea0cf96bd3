"""Wrong files: policies, sites, and rules for faults."""

from __future__ import annotations

from bad_inputs import Case, Content, bad, bad_file

_CHECK, _SITE = "deadpool policy check", "deadpool sites --check"
#: More than fits; no policy is as long.
_LONG = b"#" * ((1 << 20) + 1)


def _policy(text: Content, *parts: str, lines: int = 1) -> Case:
    return bad_file(_CHECK, text, *parts, lines=lines)


def _site(text: Content, *parts: str, lines: int = 1) -> Case:
    return bad_file(_SITE, text, *parts, lines=lines)


YAML = (
    bad(f"{_CHECK} none.yaml", "none.yaml: cannot be read (No such file or directory)"),
    bad(f"{_CHECK}", "no file given: deadpool policy check [OPTIONS] FILE"),
    bad(f"{_CHECK} a.yaml b.yaml", "Got unexpected extra argument (b.yaml)"),
    _policy(None, "cannot be read (Is a directory)"),
    _policy(_LONG, "is larger than 1 MiB; is it a policy?"),
    _policy("spares: {count: 1}\n".encode("utf-16"), "line 1: is not UTF-8 text"),
    _policy(b"rules: /caf\xe9\n", "line 1: is not UTF-8 text"),
    _policy(b"spares: {count: 1}\n\0\0", "is not YAML: unacceptable character"),
    _policy("spares:\n\tcount: 1\n", "line 2: is not YAML: a tab stands where blanks must; indent"),
    _policy("spares: {count: 1\n", "is not YAML: expected ',' or '}'"),
    _policy("spares: count: 1\n", "line 1: is not YAML: mapping values are not allowed here"),
    _policy("max_restarts: *one\n", "is not YAML: found undefined alias"),
    _policy("max_restarts: 1\n---\nmax_restarts: 2\n", "is not YAML: but found another document"),
    _policy("[" * 2_000, "is nested too deeply for a policy"),
    _policy(
        "- spares\n", "line 1: must be a mapping of keys to values; valid are admission, agent"
    ),
    _policy("spares\n", "line 1: must be a mapping of keys to values"),
    _policy("? [a]\n: 1\n", "line 1: a key must be a word"),
)

POLICY = (
    _policy("spars: {count: 1}\n", "line 1: spars is not a key (did you mean spares?); valid here"),
    _policy("spares: {cuont: 1}\n", "spares.cuont is not a key (did you mean count?); valid here"),
    _policy('"a\\nb": 1\n', "line 1: a\\nb is not a key"),
    _policy("spares: 2\n", "spares is a section; its keys are auto, count, fraction, order, start"),
    _policy("spares: [count, 2]\n", "spares is a section; its keys are"),
    _policy("max_restarts: 1\nmax_restarts: 2\n", "line 2: max_restarts stands here a second time"),
    _policy("spares: {count: 1}\nspares.count: 2\n", "line 2: spares.count stands here a second"),
    _policy("spares.count: two\n", "spares.count: 'two' is wrong; must be a whole number of at le"),
    _policy("spares.count: -1\n", "'-1' is wrong; must be a whole number of at least 0"),
    _policy("spares.count: true\n", "'true' is wrong; must be a whole number"),
    _policy("spares.count: 2.5\n", "'2.5' is wrong; must be a whole number"),
    _policy("spares.count:\n", "spares.count: has no value; must be a whole number of at least 0"),
    _policy("spares.count: [1]\n", "spares.count: must be a whole number of at least 0"),
    _policy("spares.fraction: 1\n", "'1' is wrong; must be a number above 0 and below 1, or none"),
    _policy("spares.fraction: .nan\n", "'.nan' is wrong; must be a number above 0 and below 1"),
    _policy("straggler.factor: inf\n", "'inf' is wrong; must be a number above 1"),
    _policy("heartbeat_timeout: 5 seconds\n", "'5 seconds' is wrong; must be a duration such as"),
    _policy("heartbeat_timeout: 0.1\n", "'0.1' is wrong", "from 0.5s to 10m"),
    _policy("slurm.poll: nevr\n", "'nevr' is wrong", "or never"),
    _policy("heartbeat_timeout: 30s\ncollective_timeout: 30s\n", "line 2: collective_timeout 30s"),
    _policy("spares: {count: 1, fraction: 0.1}\n", "both say how many spares are held; keep one"),
    _policy("on_drain: Swap\n", "on_drain: 'Swap' is wrong; must be swap or ignore"),
    _policy("on_exhausted: [stop, shrink]\n", "'stop, shrink' is wrong", "stop last"),
    _policy("checkpoint.dir: ckpt\n", "'ckpt' is wrong; must be an absolute path"),
    _policy("replication.mpi: mpiexec\n", "'mpiexec' is wrong; must be none, pmi2"),
    _policy("failure_domains: [n1]\n", "must be node lists as Slurm writes them, each with a name"),
    _policy('failure_domains: {"n[1-": a}\n', "'n[1-' is not a node list"),
    _policy('failure_domains: {"n[1-3]": a, n2: b}\n', "n2 is in a and in b; name every node once"),
    _policy("admission: nvidia-smi\n", "admission: must be a list of checks, each with a command"),
    _policy("admission: [{command: x}]\n", "check 1 has no timeout; must be a list of checks"),
    _policy(
        "admission: [{command: x, timeout: 5s, comand: y}]\n", "comand is not a key of check 1"
    ),
    _policy("admission: [{command: x, timeout: 5s, command: y}]\n", "command is in check 1 twice"),
    _policy("limits: 2\n", "limits must be a mapping of keys to min, max or fixed"),
    _policy("limits: {spares.count: 2}\n", "limits.spares.count must be a mapping with min or max"),
    _policy("limits: {spares.count: {most: 2}}\n", "most is not valid; use min or max or fixed"),
    _policy(
        "limits: {spares.count: {[max]: 2}}\n", "a key must be a word; use min or max or fixed"
    ),
    _policy("limits: {spares.count: {max: 2, max: 9}}\n", "max stands here a second time; remove"),
    _policy("limits: {spares.count: {min: 3, max: 2}}\n", "min 3 is above max 2"),
    _policy("limits: {on_drain: {max: swap}}\n", "max is not valid; use fixed"),
    _policy(
        "limits: {spares.count: {max: 2}}\nspares.count: 3\n", "3 is above the site's limit of"
    ),
    _policy("spars: 1\nmax_restarts: many\n", "spars is not a key", "'many' is wrong", lines=2),
)

_LAUNCH = "deadpool-launch --site local --dry-run train.py --policy p.yaml"


def _used(text: str, *parts: str, options: str = "", env: dict[str, str] | None = None) -> Case:
    return bad(f"{_LAUNCH} {options}", *parts, files={"p.yaml": text}, env=env)


POLICIES_IN_USE = (
    _used(
        "spars: 1\nmax_restarts: x\n", "p.yaml, line 1: spars is not a key", "(and 1 more: deadp"
    ),
    _used(
        "limits: {spares.count: {max: 1}}\n", "limits has effect only in the site's file; remove"
    ),
    _used(
        "checkpoint.every: 5\n", "p.yaml:1: checkpoint.every needs a folder that every node sees"
    ),
    _used(
        "checkpoint: {every: 5, dir: $NOWHERE/c}\n", "checkpoint.dir $NOWHERE/c: NOWHERE is not s"
    ),
    _used("checkpoint: {every: 5, dir: ~bob/c}\n", "comes to ~bob/c; it must be an absolute path"),
    _used("checkpoint: {every: 5, dir: $/c}\n", "a $ stands before no variable's name"),
    _used("rules: ~/none.yaml\n", "home/none.yaml: cannot be read (No such file or directory)"),
    _used("replication.factor: 3\n", "replication.factor 3: replicas go to so many other nodes"),
    _used(
        "replication.confirm_timeout: 1s\n", "replication.confirm_timeout 1", "--heartbeat-timeout"
    ),
    _used(
        "spares.fraction: 0.999999\n",
        "0.999999: makes 8999991 spares beside 9",
        options="--nodes 9",
    ),
    _used("spares.auto.node_mtbf_hours: 5\n", "spares.auto: how long the spares must last is not"),
    bad(
        "deadpool policy show --policy p.yaml",
        "p.yaml, line 1: on_drain: 'no' is wrong; must be swap or ignore",
        files={"p.yaml": "on_drain: no\n"},
    ),
    bad("deadpool policy show --policy none.yaml", "--policy none.yaml: cannot be read (No such"),
    bad(
        "deadpool policy show",
        "home/.config/deadpool/policy.yaml, line 1: spares is a section",
        files={"home/.config/deadpool/policy.yaml": "spares: 2\n"},
    ),
    bad(
        "deadpool policy show",
        "home/.config/deadpool/policy.yaml: cannot be read (No such file or directory)",
        links=("home/.config/deadpool/policy.yaml",),
    ),
    bad("deadpool policy chek x", "chek is not a command of deadpool policy; those are check and"),
)

_HOME = "home/.config/deadpool/sites"
SITES = (
    bad(f"{_SITE} none.yaml", "none.yaml: cannot be read (No such file or directory)"),
    bad(f"{_SITE} x.yaml vista", "--check x.yaml: shows no site; leave out", files={"x.yaml": ""}),
    _site(_LONG, "is larger than 1 MiB; is it a site file?"),
    _site(
        "gpu.per_node: 4\n",
        "gpu.per_node is not a key (did you mean gpus.per_node?); valid here are abo",
    ),
    _site(
        "gpus.per_node: four\n", "gpus.per_node: 'four' is wrong; must be a whole number", "none"
    ),
    _site("gpus.per_node: 0\n", "'0' is wrong; must be a whole number of at least 1, or none"),
    _site("kind: cloud\n", "kind: 'cloud' is wrong; must be slurm or local"),
    _site("submit.exclusive: maybe\n", "'maybe' is wrong; must be yes or no"),
    _site("submit.options: --exclusive\n", "must be a list of options, each as one word, such as"),
    _site("submit.options: [--mem 0]\n", "'--mem 0' is wrong; must be a list of options, each as"),
    _site("submit.forbidden: [mem]\n", "'mem' is wrong; must be a list of long options"),
    _site("submit.time: 30\n", "submit.time: '30' is wrong", "from 1m to 366d"),
    _site(
        "submit.setup: module load x\n", "submit.setup: must be a list of texts, each on one line"
    ),
    _site("match.environment: [A]\n", "must be names of environment variables, each with a value"),
    _site("env: {A-B: 1}\n", "env: 'A-B' is no variable's name"),
    _site("env: {A: 1, A: 2}\n", "env: A is there twice; remove one"),
    _site("env: {A: [1]}\n", "env: must be names of environment variables, each with a value"),
    _site('network.interfaces: ["["]\n', "'[' is wrong (unterminated character set"),
    _site("failure_domain.pattern: abc\n", "must be a regular expression with one group in parent"),
    _site("gpus.per_node: !unknown\n", "gpus.per_node: '' is wrong; must be how to find it out"),
    _site("partitions: debug\n", "partitions must be a mapping of names to keys and their values"),
    _site("partitions: {debug: 4}\n", "partitions must be a mapping of names to keys and their va"),
    _site("partitions: {debug: {kind: local}}\n", "kind is not a key; valid here are"),
    _site(
        "partitions:\n  debug: {limits.nodes: 4}\n  debug: {limits.nodes: 8}\n",
        "line 3: partitions.debug stands here a second time; remove one",
    ),
    _site("kind: cloud\nabot: x\n", "must be slurm or local", "did you mean about?", lines=2),
    bad(
        "deadpool sites vsta", "NAME vsta: is no site (did you mean vista?)", "/NAME.yaml would be"
    ),
    bad("deadpool sites ./vista.yaml", "NAME ./vista.yaml: must be the name of a site, not a path"),
    bad("deadpool sites --partition debug", "--partition: name the site to show"),
    bad("deadpool sites --qos debug", "--qos: name the site to show"),
    bad(
        "deadpool sites mine",
        f"{_HOME}/mine.yaml, line 1: kind: 'cloud' is wrong",
        files={f"{_HOME}/mine.yaml": "kind: cloud\n"},
    ),
    bad(
        "deadpool sites mine",
        f"{_HOME}/mine.yaml: cannot be read (No such file or directory)",
        links=(f"{_HOME}/mine.yaml",),
    ),
    bad(
        "deadpool sites mine",
        f"{_HOME}/mine.yaml: cannot be read (Is a directory)",
        files={f"{_HOME}/mine.yaml": None},
    ),
)

_RULE = "rules: [{name: a, kind: user, reason: because, when: {%s}}]\n"


def _rules(text: Content, *parts: str) -> Case:
    return bad("deadpool classify log --rules r.yaml", *parts, files={"log": "", "r.yaml": text})


RULES = (
    bad("deadpool classify", "no log given: deadpool classify [OPTIONS] LOG"),
    bad("deadpool classify none.log", "none.log: cannot be read (No such file or directory)"),
    bad(f"deadpool classify {'a' * 300}", "cannot be read (File name too long)"),
    bad("deadpool classify swap", "swap: is a directory; name one of the files in it"),
    bad(
        "deadpool classify other/log", "(Permission denied)", files={"other": None}, by_another=True
    ),
    bad("deadpool classify train.py --time-left soon", "'soon' is not a valid float"),
    bad(
        "deadpool classify train.py --time-left nan", "--time-left nan: must be a number of seconds"
    ),
    bad("deadpool classify train.py", "train.py: no rule knows an error in it", code=1),
    bad(
        "deadpool classify log", "log: no rule knows", code=1, files={"log": bytes(range(256)) * 9}
    ),
    bad("deadpool classify train.py --rules none.yaml", "none.yaml: cannot be read (No such file"),
    _rules(None, "r.yaml: cannot be read (Is a directory)"),
    _rules(_LONG, "r.yaml: is larger than 1 MiB; is it a file of rules?"),
    _rules("rules: \xe9\n".encode("latin-1"), "r.yaml, line 1: is not UTF-8 text"),
    _rules("", "r.yaml: must begin with rules: and a list of them"),
    _rules("rules:\n\t- a\n", "r.yaml, line 2: is not YAML"),
    _rules("rules: []\nruels: []\n", "r.yaml: ruels is not a key here; valid are rules"),
    _rules("rules: [a]\n", "rule 1: is not a mapping with name, kind, reason, when"),
    _rules("rules: [{name: a}]\n", "r.yaml: rule a: kind is missing"),
    _rules('rules: [{name: "a\\nb"}]\n', "rule a\\nb: kind is missing"),
    _rules(_RULE % "", "when must have at least one condition: error, traceback"),
    _rules(_RULE % "eror: x", "rule a: eror is not a key here; valid are error"),
    _rules(_RULE % "error: '['", "error: '[' is not a regular expression"),
    _rules(_RULE % "error: 2026-13-45", "has a value that YAML cannot read", "put it into quotes"),
    _rules(_RULE % "error: x, error: y", "line 1: is not YAML (the key error stands twice)"),
    _rules(_RULE % "exit_code: many", "exit_code: 'many' must be a whole number from 0 on"),
    _rules(_RULE % f"exit_code: 1{'0' * 20}", "must be a whole number from 0 on"),
    _rules(_RULE % "exit_code: true", "True must be a whole number from 0 on"),
    _rules(_RULE % "signal: KILL", "'KILL' must be a signal by name (SIGKILL) or number (9)"),
    _rules(_RULE % "time_left_s: .nan", "must be a number of seconds above 0"),
    _rules(_RULE.replace("user", "bad") % "error: x", "kind is 'bad', must be transient"),
)

FILES = {
    "YAML": YAML,
    "policy": POLICY,
    "policies in use": POLICIES_IN_USE,
    "sites": SITES,
    "rules": RULES,
}
