"""The first root error of a log that may have gigabytes. Pure: lines in, a finding out.

Every line is looked at once. What may be an error is kept, a few hundred at most, each kind of it
once; which of them is the root is decided at the end, when all XIDs and all ranks are known: the
first that a rule gives a verdict and that is no echo. Not the last: what ends a job is mostly the
consequence of something that stands further up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deadpool_launch.classify.lines import LABEL_BYTES, XID, Ending, Line, clean, ending
from deadpool_launch.classify.model import (
    MAX_ERROR,
    Kind,
    Observation,
    Rule,
    Verdict,
    classify,
    signature,
)
from deadpool_launch.classify.traces import BEGINNING, EXCEPTION, WRAPPER, unbarred

#: Of errors that are different, so many are kept, and so many of those that are echoes.
_MAX_KEPT = 256
#: Lines kept of a traceback and of what follows an error.
_MAX_FRAMES = 200
_MAX_FOLLOWING = 8
#: Errors whose messages are followed at a time.
_MAX_OPEN = 4
#: Ranks and their unfinished tracebacks that are told apart.
_MAX_RANKS = 1 << 17
#: Longest list of torchrun's of failures that are not the root cause, in lines.
_MAX_OTHERS = 5_000
#: Kinds of line that are remembered as useless, by their bytes without these; lines with a word
#: that makes numbers count are not.
_MAX_USELESS = 20_000
_NUMBERS = b"0123456789.,+-"
_COUNTING = (b"rrno", b"xit", b"Xid", b"ailures:", b"Root Cause")
#: Only lines with one of these words can be an error by the packaged rules; written in lower case.
_HINT = re.compile(
    rb"error|exception|traceback|fail|kill|abort|fault|xid|exit|cancel|denied|quota|"
    rb"no space|read-only|stale|time[d ]? ?out|terminat|memory|assert|busy|"
    rb"fallen|lost|corrupt|free\(\)|instruction|refused|in use|not found|revoked|"
    rb"complet|alloc|invalid|cublas|cudnn|connect|broken|interrupt|keyerror|limit|closing signal|"
    rb"socket|reset|evict|machine check|hardware|mpi_abort|ecc|nvlink|nvrm|mce|edac|"
    rb"initialize|devices?\b|unreachable|too many|endpoint|worker|requeue|milliseconds|"
    rb"e(?:nospc|dquot|addrinuse)"
)
_GPU = re.compile(r"(?i)cuda|nccl|gpu|cublas|cudnn")


@dataclass(frozen=True, slots=True)
class Finding:
    """The first root error: its verdict, its line, and what else is known of it."""

    verdict: Verdict
    #: Line's number, from 1, and its text.
    number: int
    text: str
    #: Ranks that show it, and all ranks that the log has anything of.
    ranks: frozenset[int]
    all_ranks: int
    xids: frozenset[int]


@dataclass(slots=True)
class _Candidate:
    """A line that may be the root error."""

    number: int
    text: str
    #: With the traceback before it and the lines that follow; empty: the text alone.
    context: list[str]
    end: Ending | None
    ranks: set[int]
    xid: int | None = None
    #: What follows it is still taken for a part of its message.
    following: int = _MAX_FOLLOWING

    @property
    def key(self) -> str:
        """The same for what differs in numbers only, unless those are what counts."""
        if self.xid is not None:
            return f"XID {self.xid}"
        if self.end is not None:
            return f"end {self.end.exit_code} {self.end.signal}"
        return signature(self.text)

    @property
    def weak(self) -> bool:
        """Says how a process ended, and the cause may stand further down."""
        return self.end is not None and self.end.signal is None


@dataclass(slots=True)
class _Source:
    """What is unfinished in the output of one rank."""

    #: Lines of the traceback that has not come to its exception, and how far it is indented.
    frames: list[str] | None = None
    indent: int = 0
    #: The last errors, whose messages may go on; the newest is the last.
    open: list[_Candidate] = field(default_factory=list)


@dataclass(slots=True)
class _Scan:
    rules: Sequence[Rule]
    time_left_s: float | None
    candidates: dict[str, _Candidate] = field(default_factory=dict)
    #: Sources with something unfinished.
    sources: dict[int | None, _Source] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    labelled: bool = False
    xids: set[int] = field(default_factory=set)
    causes: int = 0
    echoes: int = 0
    #: Until this line lasts torchrun's list of failures that are not the root cause.
    others_until: int = 0

    def line(self, number: int, line: Line, hinted: bool) -> bool:
        """Look at one line; whether it is of any use, and not only where it stands."""
        self.seen(line.rank)
        source = self.sources.get(line.rank) or _Source()
        useful = True
        if not self._in_traceback(source, number, line):
            if hinted and (found := BEGINNING.match(line.text)) is not None:
                source.frames = [line.text]
                source.indent = unbarred(found[1])[0]
                source.open = []
            else:
                _follow(source, line.text)
                useful = hinted and self._plain(source, number, line)
        if source.frames is None and not source.open:
            self.sources.pop(line.rank, None)
        elif len(self.sources) < _MAX_RANKS:
            self.sources[line.rank] = source
        return useful

    def seen(self, rank: int | None) -> None:
        """The log has something of this rank."""
        if rank is not None and len(self.ranks) < _MAX_RANKS:
            self.labelled = True
            self.ranks.add(rank)

    def _in_traceback(self, source: _Source, number: int, line: Line) -> bool:
        """Whether the line belongs to an unfinished traceback; its exception finishes that."""
        if source.frames is None:
            return False
        depth, body = unbarred(line.text)
        if depth > source.indent or not body:
            if len(source.frames) < _MAX_FRAMES:
                source.frames.append(line.text)
            return True
        frames, source.frames = source.frames, None
        if not EXCEPTION.match(body):
            return False  # another process wrote in between, or this one was killed
        if not WRAPPER.match(body) and number > self.others_until:
            self._keep(source, _Candidate(number, body, [*frames, line.text], None, _one(line)))
        return True

    def _plain(self, source: _Source, number: int, line: Line) -> bool:
        """A line outside any traceback counts if a rule knows it."""
        text = line.text.strip()
        if text.startswith("Failures:"):
            self.others_until = number + _MAX_OTHERS
        elif text.startswith("Root Cause ("):
            self.others_until = 0
        if number <= self.others_until:
            return True
        end, found = ending(text), XID.search(text)
        if end is not None:
            self.ranks |= end.ranks
        xid = int(found[1]) if found is not None else None
        if xid is not None and len(self.xids) < _MAX_KEPT:
            self.xids.add(xid)
        ranks = set(end.ranks) if end is not None else set()
        candidate = _Candidate(number, text, [], end, ranks or _one(line), xid)
        if candidate.key in self.candidates or self.verdict(candidate) is not None:
            self._keep(source, candidate)
            return True
        return False

    def _keep(self, source: _Source, candidate: _Candidate) -> None:
        known = self.candidates.get(candidate.key)
        if known is not None:
            known.ranks |= candidate.ranks
            return
        source.open = [*source.open[1 - _MAX_OPEN :], candidate]
        verdict = self.verdict(candidate)
        if verdict is not None and verdict.kind is Kind.ECHO:
            self.echoes += 1
            fits = self.echoes <= _MAX_KEPT
        else:
            self.causes += 1
            fits = self.causes <= _MAX_KEPT
        if fits:
            self.candidates[candidate.key] = candidate

    def verdict(self, candidate: _Candidate) -> Verdict | None:
        """A line with an XID stands for itself; an error on the GPU is seen with all XIDs."""
        xids: Iterable[int] = ()
        if candidate.xid is not None:
            xids = (candidate.xid,)
        elif _GPU.search(candidate.text):
            xids = self.xids
        end = candidate.end
        seen = Observation(
            error=candidate.text,
            traceback="\n".join(candidate.context or [candidate.text]),
            exit_code=end.exit_code if end is not None else None,
            signal=end.signal if end is not None else None,
            xids=frozenset(xids),
            # srun names only those that ended badly; of how many is known from labels alone.
            ranks_alike=max(1, len(candidate.ranks)) if self.labelled else 1,
            ranks=max(1, len(self.ranks)),
            time_left_s=self.time_left_s,
        )
        return classify(seen, self.rules)

    def decide(self) -> Finding | None:
        """Causes before echoes, what went wrong before mere exit codes, then the first."""
        findings = []
        for candidate in self.candidates.values():
            verdict = self.verdict(candidate)
            if verdict is not None:
                echo = verdict.kind is Kind.ECHO
                findings.append(((echo, candidate.weak, candidate.number), candidate, verdict))
        if not findings:
            return None
        _, first, verdict = min(findings, key=lambda found: found[0])
        return Finding(
            verdict=verdict,
            number=first.number,
            text=first.text,
            ranks=frozenset(first.ranks),
            all_ranks=len(self.ranks),
            xids=frozenset(self.xids),
        )


def _one(line: Line) -> set[int]:
    return set() if line.rank is None else {line.rank}


def _follow(source: _Source, text: str) -> None:
    """Messages of NCCL and CUDA go on in further lines, up to an empty one."""
    if not text:
        source.open = []
    for candidate in source.open:
        candidate.following -= 1
        candidate.context = [*(candidate.context or [candidate.text]), text]
    source.open = [candidate for candidate in source.open if candidate.following > 0]


def find_root(
    lines: Iterable[tuple[int, bytes]],
    rules: Sequence[Rule],
    time_left_s: float | None = None,
    own: Sequence[Rule] = (),
) -> Finding | None:
    """The first root error in numbered lines; None if no rule knows any of them.

    ``time_left_s``: what was left of the job's time limit when the log ended; without it nothing
    is put down to the time limit. ``own``: those of ``rules`` that are not packaged, which may be
    about any line; the others are tried only on lines that have a word of an error.
    """
    scan = _Scan(rules, time_left_s)
    patterns = [
        re.compile(pattern) for rule in own for pattern in (rule.error, rule.traceback) if pattern
    ]
    useless: set[bytes] = set()
    for number, raw in lines:
        hinted = _HINT.search(raw.lower()) is not None
        kind = raw.translate(None, _NUMBERS) if hinted else b""
        if not patterns and (not hinted or kind in useless):
            label = LABEL_BYTES.match(raw)
            rank = int(label[1] or label[2]) if label is not None else None
            scan.seen(rank)
            if rank not in scan.sources:
                continue
        useful = False
        for line in clean(raw):
            mine = any(pattern.search(line.text[:MAX_ERROR]) for pattern in patterns)
            useful |= scan.line(number, line, hinted or mine)
        new = hinted and not useful and len(useless) < _MAX_USELESS and len(kind) <= MAX_ERROR
        if new and not any(word in raw for word in _COUNTING):
            useless.add(kind)
    return scan.decide()
