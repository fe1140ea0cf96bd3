"""CUDA calls beside a graph capture of the script.

While a thread captures a graph in CUDA's usual mode ("global"), calls of *any* thread that might
synchronise (asking an event, page-locking memory) fail and make the capture invalid, unless that
other thread has chosen the mode "relaxed" for itself. Nothing here waits for what is captured, so
the relaxed mode hides no fault of the script.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache

#: CU_STREAM_CAPTURE_MODE_RELAXED.
RELAXED = 2


@cache
def _driver() -> Callable[[int], int]:
    """Sets this thread's mode and returns the one before; does nothing without a driver."""
    try:
        # By the driver, since the name of CUDA's runtime library changes with its version.
        call = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return lambda mode: mode
    call.argtypes, call.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int

    def exchange(mode: int) -> int:
        value = ctypes.c_int(mode)
        return value.value if call(ctypes.byref(value)) == 0 else mode

    return exchange


class Beside:
    """A context in which the present thread has the relaxed mode. May be entered within itself,
    and by several threads at a time.

    ``exchange``: sets the thread's mode and returns the one before.
    """

    def __init__(self, exchange: Callable[[int], int] | None = None) -> None:
        self._exchange = exchange or _driver()
        self._before = threading.local()

    def __enter__(self) -> None:
        if not hasattr(self._before, "modes"):
            self._before.modes = []
        self._before.modes.append(self._exchange(RELAXED))

    def __exit__(self, *_: object) -> None:
        self._exchange(self._before.modes.pop())
