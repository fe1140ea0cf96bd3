"""``docs/policy.md`` from the schema: ``python -m deadpool_launch.policy.page`` prints it."""

from __future__ import annotations

from deadpool_launch.policy.schema import KEYS, Key

_HEAD = """\
# policy.yaml

What a site or a user settles once for all jobs. Every key is optional.

    spares:
      auto: {node_mtbf_hours: 20000, probability: 0.99}
    heartbeat_timeout: 5s
    admission:
      - command: nvidia-smi -L
        timeout: 10s
    failure_domains:
      "n[1-8]": rack1
      "n[9-16]": rack2

`spares.count: 2` on one line means the same as a section. Durations are written `90s`, `5m`,
`2h`, `1d` or as Slurm writes times (`1-00:00:00`); a bare number is in seconds.

## Levels

Later ones win:

1. the defaults below,
2. the site's file, `/etc/deadpool/policy.yaml`, or the one that `DEADPOOL_SITE_POLICY` names
   (empty: none),
3. the user's file, `~/.config/deadpool/policy.yaml`, or the one that `--policy FILE` names,
4. the command line.

`spares.count`, `spares.fraction` and `spares.auto` are three ways to say one thing: a level that
uses one of them undoes what earlier levels said with another. A list or mapping of a later level
replaces the earlier one whole.

With `--site local` (rehearsals) `admission` and `failure_domains` of the site's file and
`replication.mpi` of any file have no effect, as this machine is none of the site's nodes.

## The site's limits

In the site's file, `limits` names for any key a `min`, a `max` or both (numbers and durations),
or what it is `fixed` at. They win over every level:

    limits:
      spares.count: {max: 4}
      heartbeat_timeout: {min: 2s, max: 60s}
      spares.start: {fixed: on-failure}

The launcher says what they changed: `--spares 9 is above the site's limit of 4
(/etc/deadpool/policy.yaml): 4 are held`. A `min` or `max` does not set what is not set. Limits
guard against mistakes; they cannot bind a user who starts something else.

## Commands

```sh
deadpool policy check FILE  # a sentence for each thing that is wrong, exit code 2
deadpool policy show        # every key: its value, where it came from; --json
```

`deadpool plan`, `deadpool simulate` and `deadpool preflight` reckon with the effective
`replication.factor` and `replication.interval`.

## How many spares

`spares.auto` takes the losses of nodes for a Poisson process: with `n` nodes held (active and
spare) for `h` hours the number of losses `N` has the mean `n h / node_mtbf_hours`, and it holds
the fewest spares `s` with `P(N <= s)` of at least `probability`. Nodes that fail together (a
rack's power) are not foreseen in it. The job says what it came to: `spares.auto: 66 nodes with an
MTBF of 20000 h lose at most 2 within 72 h with probability 0.9981: 2 are held`.

## Keys
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n{_entry(key)}" for key in KEYS)


def _entry(key: Key) -> str:
    default = key.show(key.default)
    lines = [f"### {key.name}", "", f"Default: `{default}`."]
    if key.flag:
        lines[-1] += f" On the command line: `{key.flag}`."
    lines += [f"Takes {key.wanted}.", "", key.doc, ""]
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    print(page(), end="")


if __name__ == "__main__":
    main()
