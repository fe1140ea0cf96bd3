"""How both ends of a connection prove that they know the job's secret."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

NONCE_NBYTES: Final = 32
#: Bytes of one proof (SHA-256).
PROOF_NBYTES: Final = 32


def new_nonce() -> bytes:
    """A fresh challenge."""
    return secrets.token_bytes(NONCE_NBYTES)


def proof(secret: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """HMAC-SHA256 over both challenges; ``side`` ("client" or "server") keeps one from being
    replayed as the other.

    Order on the wire: server sends its nonce; client sends its nonce and its proof; server checks
    it and sends its own proof; client checks that. Neither side sends anything else before.
    """
    return hmac.new(secret, side.encode() + server_nonce + client_nonce, hashlib.sha256).digest()


def proof_holds(expected: bytes, got: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(expected, got)
