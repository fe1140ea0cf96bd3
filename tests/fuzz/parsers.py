"""Every reader of bytes or text from outside: right inputs for it, how it is called, and what it
may raise.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import xxhash
from journals import swap
from mutate import sample

from deadpool_launch import channel, journal, statelog
from deadpool_launch.classify import rules as rules_module
from deadpool_launch.classify.scan import find_root
from deadpool_launch.controller import persist
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import Event
from deadpool_launch.controller.states import initial_state
from deadpool_launch.errors import UsageError
from deadpool_launch.policy import reading
from deadpool_launch.report.facts import document
from deadpool_launch.report.page import page
from deadpool_launch.sites.merge import settle
from deadpool_launch.sites.reading import read_site
from deadpool_launch.status.facts import status
from deadpool_launch.status.metrics import exposition
from deadpool_launch.status.screen import screen
from deadpool_launch.view import RunView
from deadpool_launch.whatif.reading import parse_trace
from deadpool_runtime import protocol
from deadpool_runtime.durable import index
from deadpool_runtime.replication import messages, mover_messages, naming, slots, sockets, wire
from deadpool_runtime.replication.manifest import OWN, Manifest, Segment, chunk_hash
from deadpool_runtime.replication.slots import SlotFile
from deadpool_slurm import environ, parse, submission

RECORDED = Path(__file__).parents[1] / "slurm" / "recorded"
_SECRET = b"s" * channel.SECRET_NBYTES


@dataclass(frozen=True)
class Parser:
    """``run`` may return anything, raise one of ``raises``, and nothing else.

    ``seal`` makes what is behind a checksum reachable: it puts the right checksum on an input.
    """

    name: str
    seeds: tuple[bytes, ...]
    run: Callable[[bytes], object]
    raises: tuple[type[Exception], ...] = ()
    seal: Callable[[bytes], bytes] | None = None
    #: All but a few inputs are cut to this: slow readers get through more of them.
    usual_nbytes: int = 1 << 20


def all_parsers(directory: Path) -> dict[str, Parser]:
    """By name. ``directory``: where those that read files have theirs."""
    made = (
        *_of_messages(),
        *_of_handshakes(),
        _of_slots(directory / "slot"),
        *_of_state_logs(directory / "state"),
        _of_journals(directory),
        _of_reports(),
        *_of_checkpoints(),
        *_of_slurm(),
        *_of_settings(),
        Parser("classify", _fault_lines(), _classify, usual_nbytes=1000),
        Parser(
            "segment-names",
            tuple(msgspec.msgpack.encode(naming.packed(tuple(range(0, n, 3)))) for n in (9, 40)),
            lambda data: naming.members(msgspec.msgpack.decode(data, type=tuple[int, ...])),
            (ValueError, msgspec.MsgspecError, RecursionError),
        ),
    )
    return {parser.name: parser for parser in made}


# ---------------------------------------------------------------- messages


#: Every conversation between processes, with all that is said in it.
UNIONS: dict[str, Any] = {
    "to-launcher": protocol.ToLauncher,
    "from-launcher": protocol.FromLauncher,
    "to-rank": protocol.ToRank,
    "from-rank": protocol.FromRank,
    "between-replicators": wire.OnLink,
    "agent-and-replicator": wire.ToAgent | wire.FromAgent,
    "from-replicator": messages.FromReplicator,
    "to-replicator": messages.ToReplicator,
    "to-mover": mover_messages.ToMover,
}


def _of_messages() -> list[Parser]:
    return [_of_union(name, union) for name, union in UNIONS.items()]


def _of_union(name: str, union: Any) -> Parser:
    dice = random.Random(name)
    kinds = get_args(union)
    frames = tuple(protocol.frame(sample(kind, dice)) for kind in kinds for _ in range(6))
    codec = protocol.Codec(union)

    def run(data: bytes) -> None:
        reader = protocol.Frames()
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            for body in reader.feed(part):
                codec.decode(body)

    def seal(data: bytes) -> bytes:
        return struct.pack("!I", max(0, len(data) - 4)) + data[4:]

    return Parser(f"messages-{name}", frames, run, (protocol.ProtocolError,), seal)


def _of_handshakes() -> list[Parser]:
    right = protocol.new_nonce() + bytes(protocol.PROOF_NBYTES)
    loop = asyncio.new_event_loop()

    def asynchronous(data: bytes, shake: Any) -> None:
        async def meet() -> None:
            reader = asyncio.StreamReader()
            reader.feed_data(data)
            reader.feed_eof()
            await shake(reader, _NoWriter(), _SECRET)

        loop.run_until_complete(meet())

    def blocking(data: bytes, shake: Callable[[socket.socket, bytes], None]) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data[: 1 << 16])
            theirs.shutdown(socket.SHUT_WR)
            shake(ours, _SECRET)

    known = (protocol.ProtocolError,)
    return [
        Parser(
            "agents-server", (right,), lambda d: asynchronous(d, channel.accept_handshake), known
        ),
        Parser(
            "agents-client", (right,), lambda d: asynchronous(d, channel.connect_handshake), known
        ),
        Parser(
            "replicators-server",
            (right,),
            lambda d: blocking(d, sockets.accept_handshake),
            (*known, OSError),
        ),
        Parser(
            "replicators-client",
            (right,),
            lambda d: blocking(d, sockets.connect_handshake),
            (*known, OSError),
        ),
    ]


class _NoWriter:
    def write(self, data: bytes) -> None:
        """Nobody is there."""


# ---------------------------------------------------------------- files


def _of_slots(path: Path) -> Parser:
    seeds = []
    for present in ((0, 1, OWN), (1, OWN), (OWN,)):
        segments = tuple(
            Segment(ranks, (), 100, (chunk_hash(bytes(100)),)) for ranks in ((0, 1), (0,))
        )
        own = b"own part"
        manifest = Manifest(0, 3, 1, segments, len(own), chunk_hash(own))
        path.unlink(missing_ok=True)
        with SlotFile.open(path, create=True) as slot:
            slot.prepare(segments, present)
            slot.seal(manifest, present, own)
        seeds.append(path.read_bytes()[: 8 * 4096])

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with SlotFile.open(path) as slot:
            found = slot.read()
            if found is not None:
                slot.verify(*found)

    return Parser("slot", tuple(seeds), run, (), _seal_slot)


def _seal_slot(data: bytes) -> bytes:
    """The hash of the header as it is, and in it that of the manifest as it is."""
    prefix = slots._PREFIX
    if len(data) < 4096:
        return data
    magic, length = prefix.unpack_from(data)
    if magic != slots._MAGIC or length > 3000:
        return data
    end = prefix.size + length
    try:
        header = msgspec.msgpack.decode(data[prefix.size : end], type=slots._Header)
        at, nbytes = header.manifest_offset, header.manifest_nbytes
        hashed = chunk_hash(data[at : at + nbytes])
        header = msgspec.structs.replace(header, manifest_hash=hashed)
    except (msgspec.MsgspecError, RecursionError):
        return data
    page = msgspec.msgpack.encode(header)
    page = prefix.pack(magic, len(page)) + page
    page += chunk_hash(page)
    return page + data[len(page) :]


def _of_state_logs(path: Path) -> list[Parser]:
    dice = random.Random(1)
    config = Config(active=("n1", "n2"), spares=("n3",), nproc_per_node=2)
    kept = persist.Kept(1, 5.0, initial_state(config), {}, {"n1": {"pid": 7}}, {0: 12})
    log = statelog.StateLog(path, b"job", lambda why: None)
    log.begin(kept)
    events = [_event(kind, dice) for kind in get_args(Event)]
    for event in events:
        log.event(event, 3)
    log.started("n2", {"pid": 8})
    whole = path.read_bytes()
    log.remove()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        statelog.read(path)

    encoded = tuple(persist.encode_event(event, 3) for event in events)
    return [
        Parser("state-log", (whole,), run, (statelog.NoStateLog,), _seal_records),
        Parser("logged-events", encoded, persist.decode_event, (persist.NotReadable,)),
        Parser("kept", (persist.encode_kept(kept),), persist.decode_kept, (persist.NotReadable,)),
    ]


def _event(kind: Any, dice: random.Random) -> Any:
    """An event with plain values: dataclasses are no structs, so their fields are drawn here."""
    hints = get_type_hints(kind)
    return kind(**{field.name: sample(hints[field.name], dice) for field in fields(kind)})


def _seal_records(data: bytes) -> bytes:
    """Every record with the checksums of what it has."""
    sealed, at = b"", 0
    head = struct.Struct("!cII")
    while len(data) - at >= head.size + 4:
        kind, nbytes, _ = head.unpack_from(data, at)
        body = data[at + head.size + 4 : at + head.size + 4 + nbytes]
        front = head.pack(kind, len(body), zlib.crc32(body))
        sealed += front + struct.pack("!I", zlib.crc32(front)) + body
        at += head.size + 4 + nbytes
    return sealed + data[at:]


def _of_journals(directory: Path) -> Parser:
    path = directory / journal.JOURNAL_NAME
    lines = b'{"at":1.5,"kind":"say","text":"a"}\n{"at":2.0,"kind":"step","rank":0,"loss":null}\n'

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for record in journal.read(directory):
            record.get("kind")

    return Parser("journal", (lines,), run)


def _of_reports() -> Parser:
    """What is made of a journal, whatever its records have in them."""
    lines = "".join(json.dumps(record) + "\n" for record in swap()).encode()

    def run(data: bytes) -> None:
        view = RunView()
        view.apply_all(filter(None, map(journal.record_of, data.split(b"\n"))))
        page(document(view), UTC)
        exposition(view)
        screen(status(view, None, 10.0), "run", 10)

    return Parser("report", (lines,), run)


def _of_checkpoints() -> list[Parser]:
    dice = random.Random(2)
    found = []
    for kind in (index.Complete, index.RankIndex):
        seeds = []
        for _ in range(8):
            content = msgspec.structs.replace(sample(kind, dice), format=index.FORMAT)
            seeds.append(index.seal(content))
        found.append(
            Parser(
                f"checkpoint-{kind.__name__.lower()}",
                tuple(seeds),
                lambda data, kind=kind: index.unseal(data, kind),  # type: ignore[misc]
                (ValueError, msgspec.MsgspecError),
                _seal_index,
            )
        )
    return found


def _seal_index(data: bytes) -> bytes:
    try:
        body = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])["body"])
    except (msgspec.MsgspecError, KeyError, RecursionError, UnicodeDecodeError):
        return data
    return b'{"body":%b,"xxh3_128":"%b"}' % (body, xxhash.xxh3_128_hexdigest(body).encode())


# ---------------------------------------------------------------- texts


def _text(data: bytes) -> str:
    """As the client gets the output of Slurm's commands."""
    return data.decode("utf-8", "replace")


def _recorded(part: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(RECORDED.glob(f"*{part}*")))


def _of_slurm() -> list[Parser]:
    nodes = (b"n[1-3],m7", b"a[01-04,7]b[1-2]", b"n1")
    script = b"#!/bin/bash\n#SBATCH --nodes=5 --no-kill\n#SBATCH -k 'a b'\nexec x\n"
    lines = (b"sbatch -N 4 --no-kill job.sh", b"salloc --nodes=4 -k bash")

    def options(data: bytes) -> None:
        submission.asks_no_kill(submission.sbatch_options(_text(data)))
        submission.asks_no_kill(submission.submit_line_options(_text(data)))

    variables = tuple(
        b"\n".join(line for line in text.splitlines() if line.startswith(b"SLURM"))
        for text in _recorded("batch-environment")
    )

    def read_environ(data: bytes) -> None:
        pairs = (
            line.partition("=") for line in data.decode("utf-8", "surrogateescape").split("\n")
        )
        given = {name: value for name, _, value in pairs}
        environ.read_job({"SLURM_JOB_ID": "7", **given})
        environ.for_srun(given)

    return [
        Parser("slurm-nodes", _recorded("show-node"), lambda d: parse.parse_nodes(_text(d))),
        Parser("slurm-job", _recorded("show-job"), lambda d: parse.parse_job(_text(d))),
        Parser("slurm-sinfo", _recorded("sinfo"), lambda d: parse.parse_sinfo(_text(d))),
        Parser("slurm-squeue", _recorded("squeue"), lambda d: parse.parse_steps(_text(d))),
        Parser("slurm-config", _recorded("show-config"), lambda d: parse.parse_config(_text(d))),
        Parser("slurm-node-lists", nodes, lambda d: parse.expand_nodes(_text(d))),
        Parser("slurm-options", (script, *lines), options),
        Parser("slurm-environ", variables, read_environ),
        Parser("slurm-cpus", (b"4(x2),8", b"16"), lambda d: environ.expand_cpus(_text(d))),
    ]


def _of_settings() -> list[Parser]:
    policies = (
        b"spares.count: 2\nnode.local_restarts: 1\n",
        b"spares:\n  auto: {node_mtbf_hours: 20000, probability: 0.99}\n",
        b"admission: [{command: nvidia-smi -L, timeout: 10s}]\nlimits: {spares.count: {max: 4}}\n",
    )
    sites = (
        b"match: {clusters: [vista]}\npartitions: {gh: {limits: {nodes: 64, time: 48h}}}\n",
        b"gpus: {per_node: 4, flag: gres}\nenv: {NCCL_NET: IB}\nlimits.srun: !unknown ask\n",
        b"network.interfaces: ['ib\\d+', eth.*]\nfailure_domain.pattern: '(c\\d+)-.*'\n",
    )
    rules = (
        b"rules:\n  - name: a\n    kind: transient\n    reason: b\n    when: {error: 'x.*y'}\n",
        b"rules:\n  - {name: c, kind: permanent, reason: d, when: {exit_code: [1, 2], xid: 79}}\n",
    )
    return [
        Parser(
            "policy",
            policies,
            lambda d: reading.read(_text(d), "policy.yaml", may_limit=True),
            usual_nbytes=200,
        ),
        Parser(
            "site",
            sites,
            lambda d: settle("x", [read_site(_text(d), "site.yaml")[0]], partition="gh"),
            usual_nbytes=200,
        ),
        Parser(
            "rules",
            rules,
            lambda d: rules_module.parse_rules(_text(d), "rules.yaml"),
            (UsageError,),
            usual_nbytes=200,
        ),
        Parser(
            "fault-record",
            (b"# time,node,kind\n1h, 3, permanent\n", b"90s,0,transient\n1-00:00:00,5,permanent\n"),
            lambda d: parse_trace(_text(d), 6, "faults.csv"),
            (UsageError,),
        ),
    ]


def _fault_lines() -> tuple[bytes, ...]:
    path = Path(__file__).parents[1] / "launch" / "fault_lines.txt"
    lines = path.read_bytes().splitlines(keepends=True)
    trace = (
        b'3: Traceback (most recent call last):\n3:   File "t.py", line 3, in f\n'
        b"3: RuntimeError: CUDA error: out of memory\n"
    )
    return (trace, *(b"".join(lines[at : at + 5]) for at in range(1, len(lines), 5)))


_RULES = rules_module.default_rules()


def _classify(data: bytes) -> object:
    return find_root(enumerate(data.splitlines(keepends=True), 1), _RULES, 60)
