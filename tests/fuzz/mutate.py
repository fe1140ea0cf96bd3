"""Inputs that are almost right: mutations of right ones, all drawn from one source of chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

#: Lengths and numbers that readers trip over: as msgpack, as a frame's length, and as text.
_GIANTS = (
    *(
        b"\xff\xff\xff\xff",
        b"\xdd\x7f\xff\xff\xff",
        b"\xc6\xff\xff\xff\xf0",
        b"\xdb\x7f\xff\xff\xff",
    ),
    *(b"\xdf\x7f\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00", b"\x10\x00\x00\x00"),
    *(b"99999999999999999999", b"-1", b"1-999999999", b"0" * 5000, b"9" * 5000, b"1e999", b"NaN"),
)
#: Pieces of the texts' own languages, and of none.
_PIECES = (
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b"=",
        b"|",
        b",",
        b"(x9)",
        b"(x999999999)",
        b"\n",
        b"\r",
        b"\t",
        b" ",
    ),
    *(b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x92\xa9", b"\xd9\xa3", b"'", b'"'),
    *(b"&a", b"*a", b"<<:", b"!!python/object:os.system", b"---", b": ", b"- ", b"?", b"#", b"\\"),
    *(b"n[1-3]", b"[1-", b"(null)", b"@all", b"%", b"$(", b"NodeName=", b"State="),
)


def mutated(data: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """One input: ``data`` after up to four mutations. ``others``: what is spliced in."""
    for _ in range(dice.choice((1, 1, 1, 2, 2, 4))):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(9):
            case 0 if data:
                place = dice.randrange(len(data))
                flipped = data[place] ^ (1 << dice.randrange(8))
                data = data[:place] + bytes([flipped]) + data[place + 1 :]
            case 1:
                data = data[:at]
            case 2:
                end = min(len(data), at + dice.choice((1, 2, 8, 64)))
                data = data[:at] + data[end:]
            case 3:
                other = dice.choice(others)
                data = data[:at] + other[dice.randrange(len(other) + 1) :]
            case 4:
                data = data[:at] + dice.choice(_GIANTS) + data[at + dice.choice((0, 4)) :]
            case 5:
                data = data[:at] + dice.choice(_PIECES) + data[at:]
            case 6:
                data = data[:at] + dice.randbytes(dice.choice((1, 4, 30))) + data[at:]
            case 7:
                end = min(len(data), at + dice.choice((1, 3, 20)))
                data = data[:end] + data[at:end] * dice.choice((1, 2, 300)) + data[end:]
            case _:
                nested = dice.choice((b"\x91", b"[", b"{a: ", b"\x81\xa1a", b'{"a":', b"- "))
                data = data[:at] + nested * dice.choice((2, 50, 3000)) + data[at:]
    return data


# ---------------------------------------------------------------- values of a type


def sample(kind: Any, dice: random.Random, depth: int = 0) -> Any:
    """A value of the type: of a struct, or of what structs consist of."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return sample(dice.choice(args), dice, depth + 1)
    if origin is list:
        return [sample(args[0], dice, depth + 1) for _ in range(_count(dice, depth))]
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(sample(args[0], dice, depth + 1) for _ in range(_count(dice, depth)))
        return tuple(sample(each, dice, depth + 1) for each in args)
    if origin is dict:
        return {
            sample(args[0], dice, depth + 1): sample(args[1], dice, depth + 1)
            for _ in range(_count(dice, depth))
        }
    if isinstance(kind, type) and issubclass(kind, Enum):
        return dice.choice(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        names = kind.__struct_fields__
        return kind(**{name: sample(hints[name], dice, depth + 1) for name in names})
    return _plain(kind, dice)


def _count(dice: random.Random, depth: int) -> int:
    return dice.randrange(4) if depth < 6 else 0


def _plain(kind: Any, dice: random.Random) -> Any:
    if kind is bool:
        return dice.random() < 0.5
    if kind is int:
        return dice.choice((0, 1, 7, 255, 70_000, 1 << 40))
    if kind is float:
        return dice.choice((0.0, 1.5, 1e9))
    if kind is str:
        return dice.choice(("", "n1", "rank-3", "ünï", "step"))
    if kind is bytes:
        return dice.randbytes(dice.choice((0, 4, 16)))
    if kind is NoneType:
        return None
    raise TypeError(f"there is no sample of {kind}")
