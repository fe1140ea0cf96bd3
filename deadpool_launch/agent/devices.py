"""What is wrong with the node's GPUs: lines of the kernel's log, and what NVIDIA's library counts.

Only lines are made here; what they mean is for the launcher's rules (``deadpool_launch.classify``).
Both sources may be missing, which is said once in the agent's own log and changes nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

KERNEL_LOG = Path("/dev/kmsg")
#: What of the kernel's log is about a GPU, and which one.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): \d+.*")
#: One message of the kernel is no longer.
_RECORD_NBYTES = 8192
#: So many messages are read at one time.
_MOST_RECORDS = 1000
_MOST_LINE = 300


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is known of one GPU."""

    #: Where it is: ``0000:3b:00``.
    place: str
    #: The driver no longer reaches it.
    lost: bool = False
    #: Errors of its memory since the driver was loaded that could not be corrected.
    uncorrectable: int = 0
    #: Broken memory is taken out of use at its next reset.
    pending: bool = False
    #: Why it is held back so that it does not break; empty if it is not.
    held_back: str = ""


class Library(Protocol):
    """Where GPUs are asked for; may take long when one is broken."""

    def gpus(self) -> Sequence[Gpu]:
        """All GPUs that this process may use. Raises ``OSError`` if they cannot be asked for."""


def news(before: Gpu | None, after: Gpu) -> Iterator[str]:
    """What became worse, as lines that rules know. What was so from the start is told too, but for
    counts."""
    old = before or Gpu(after.place, uncorrectable=after.uncorrectable)
    who = f"GPU {after.place}"
    if after.lost and not old.lost:
        yield f"{who}: GPU is lost"
    if after.uncorrectable > old.uncorrectable:
        yield f"{who}: {after.uncorrectable - old.uncorrectable} uncorrectable ECC errors"
    if after.pending and not old.pending:
        yield f"{who}: broken memory is to be taken out of use at the next reset"
    if after.held_back and after.held_back != old.held_back:
        yield f"{who}: held back by {after.held_back}"


class KernelLog:
    """New lines about GPUs in the kernel's log."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        """Raises ``OSError`` if the log cannot be read."""
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._handle, 0, os.SEEK_END)

    def lines(self, places: Sequence[str]) -> list[str]:
        """Those since the last call. ``places``: of the job's GPUs, others are left out; empty if
        they are not known."""
        found = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._handle, _RECORD_NBYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # older messages were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            for match in _XID.finditer(record.decode(errors="replace")):
                if not places or any(_same(place, match[1]) for place in places):
                    found.append(match[0].strip()[:_MOST_LINE])
        return found

    def close(self) -> None:
        """Read no more."""
        os.close(self._handle)


def _same(place: str, other: str) -> bool:
    """Whether both are one GPU's address on the bus, with or without domain and function."""
    one, two = (text.lower().split(".")[0].split(":")[-2:] for text in (place, other))
    return one == two


class Nvml:
    """``Library`` of NVIDIA's ``pynvml``, where that is installed and finds a driver."""

    def __init__(self) -> None:
        """Raises ``OSError`` if there is none."""
        try:
            import pynvml
        except ImportError as error:
            raise OSError("pynvml is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error
        self._places: dict[int, str] = {}

    def gpus(self) -> Sequence[Gpu]:
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise OSError(str(error)) from error
        return [self._gpu(index) for index in range(max(count, len(self._places)))]

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            place = nvml.nvmlDeviceGetPciInfo(handle).busId
        except nvml.NVMLError as error:
            lost = error.value == nvml.NVML_ERROR_GPU_IS_LOST
            return Gpu(self._places.get(index, f"no. {index}"), lost=lost)
        place = place.decode() if isinstance(place, bytes) else str(place)
        self._places[index] = place = place.lower().split(".")[0][-10:]
        try:
            held_back = self._held_back(handle)
            return Gpu(place, False, self._count(handle), self._pending(handle), held_back)
        except nvml.NVMLError as error:
            return Gpu(place, lost=error.value == nvml.NVML_ERROR_GPU_IS_LOST)

    def _asked(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """The answer; ``otherwise`` where this kind of GPU has none."""
        try:
            return question()
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return otherwise

    def _count(self, handle: Any) -> int:
        nvml = self._nvml
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(self._asked(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), 0))

    def _pending(self, handle: Any) -> bool:
        nvml = self._nvml
        rows = self._asked(lambda: nvml.nvmlDeviceGetRemappedRows(handle)[2], 0)
        pages = self._asked(lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle), 0)
        return bool(rows or pages)

    def _held_back(self, handle: Any) -> str:
        nvml = self._nvml
        reasons = self._asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
        if reasons & nvml.nvmlClocksThrottleReasonHwThermalSlowdown:
            return "heat"
        return "its power supply" if reasons & _POWER_BRAKE else ""


#: ``nvmlClocksThrottleReasonHwPowerBrakeSlowdown``, which older bindings do not name.
_POWER_BRAKE = 0x80


class DeviceWatch:
    """Looks at the GPUs now and then; ``report`` gets lines that are news, ``say`` what is missing.

    ``interval_s``: between two questions to the library; 0: nothing is looked at.
    """

    def __init__(
        self,
        interval_s: float,
        report: Callable[[list[str]], None],
        say: Callable[[str], None],
        *,
        library: Callable[[], Library] = Nvml,
        kernel_log: Callable[[], KernelLog] = KernelLog,
    ) -> None:
        self._interval_s = interval_s
        self._report = report
        self._say = say
        self._make_library = library
        self._log: KernelLog | None = None
        self._known: dict[str, Gpu] = {}
        self._closed = threading.Event()
        if interval_s:
            try:
                self._log = kernel_log()
            except OSError as error:
                say(f"the kernel's log cannot be read ({error.strerror}): no XIDs are seen")

    def look(self) -> None:
        """Report what the kernel has written since the last look."""
        lines = self._log.lines(list(self._known)) if self._log is not None else []
        if lines:
            self._report(lines)

    def start(self, post: Callable[..., object]) -> None:
        """Ask the library again and again, in a thread of its own: a broken GPU may never answer,
        and nobody waits for it. ``post`` has a function called by the agent's event loop.
        """
        if self._interval_s:
            threading.Thread(target=self._ask, args=(post,), name="devices", daemon=True).start()

    def _ask(self, post: Callable[..., object]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            try:
                library = self._make_library()
                while True:
                    post(self._heard, library.gpus())
                    if self._closed.wait(self._interval_s):
                        return
            except OSError as error:
                post(self._say, f"the state of the GPUs is not known ({error})")

    def _heard(self, gpus: Sequence[Gpu]) -> None:
        lines = [line for gpu in gpus for line in news(self._known.get(gpu.place), gpu)]
        self._known.update({gpu.place: gpu for gpu in gpus})
        if lines and not self._closed.is_set():
            self._report(lines)

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        if self._log is not None:
            self._log.close()
            self._log = None
