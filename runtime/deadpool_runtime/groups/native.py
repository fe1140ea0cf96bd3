"""Building, caching and loading of native.cpp and what it includes.

It is compiled once per machine type, Python and torch version, with whatever C++ compiler
the machine has, and kept in the user's cache. Deciding whether that has been done imports
neither torch nor anything else that is slow, so every rank can ask at its start.

``python -m deadpool_runtime.groups.native`` builds it ahead of time and prints where it lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from deadpool_runtime.groups.errors import ShimUnavailable

_MODULE = "deadpool_native"
_SOURCE = Path(__file__).with_name("native.cpp")
_PARTS = (_SOURCE, _SOURCE.with_name("counting.hpp"))
#: Part of the cache key, so that changing a flag builds anew.
_FLAGS = ("-std=c++20", "-O1", "-g0", "-w", "-fPIC", "-shared", "-fvisibility=hidden")
_EXIT_UNAVAILABLE = 3


def cache_directory() -> Path:
    """The folder that holds built shims; only its owner may write there, as it is loaded from."""
    if explicit := os.environ.get("DEADPOOL_CACHE"):
        return Path(explicit)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "deadpool"
    return Path.home() / ".cache" / "deadpool"


def library_path() -> Path:
    """Where the shim for this interpreter, torch and machine lies, built or not."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ShimUnavailable("torch is not installed for this Python.") from None
    text = b"".join(part.read_bytes() for part in _PARTS) + " ".join(_FLAGS).encode()
    digest = hashlib.sha256(text).hexdigest()[:16]
    parts = (torch_version, sys.implementation.cache_tag, platform.machine(), digest)
    return cache_directory() / f"{_MODULE}-{'-'.join(parts)}.so"


def ensure_built() -> Path:
    """Return the shared library, compiling it first if no process has done so before.

    Any number of processes may call this at once: one compiles, the others wait for it.
    """
    library = library_path()
    if not library.exists():
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(library.parent)
        with build_lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(library)
    require_private(library.parent)
    return library


@cache
def load() -> ModuleType:
    """Import the shim, building it if need be. torch must be importable, and is imported."""
    import torch.distributed  # noqa: F401  # the shim's symbols and base types live there

    library = ensure_built()
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(library))
    spec = importlib.util.spec_from_file_location(_MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def require_private(directory: Path) -> None:
    """Refuse a cache that others can write to: whatever lies in it would run as this user."""
    info = directory.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ShimUnavailable(
            f"The cache directory {directory} must belong to this user and be writable by nobody "
            f"else (chmod 700), or DEADPOOL_CACHE must name another one."
        )


@contextlib.contextmanager
def build_lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Some network file systems cannot lock. Two processes then compile the same thing, and
        # the rename at the end still leaves one whole file.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(library: Path) -> None:
    compiler = find_compiler()
    python_include = sysconfig.get_path("include")
    if not Path(python_include, "Python.h").exists():
        raise ShimUnavailable(
            f"The headers of this Python are missing ({python_include}/Python.h): install its "
            f"development package (python3-dev or python3-devel)."
        )
    import torch

    root = Path(torch.__file__).parent
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [
        *compiler,
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={_MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        f"-I{root / 'include/torch/csrc/api/include'}",
        f"-I{python_include}",
        str(_SOURCE),
        "-o",
        scratch,
        f"-L{root / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch_python",
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            reason = errors[0] if errors else result.stderr.strip() or "no message"
            raise ShimUnavailable(
                f"{compiler[0]} could not compile {_SOURCE.name} for torch {torch.__version__} "
                f"(a C++20 compiler is needed): {reason}"
            )
        os.chmod(scratch, 0o700)
        os.replace(scratch, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(scratch)


def find_compiler() -> list[str]:
    """The command that compiles C++; CXX may name it, with options."""
    if explicit := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(explicit[0]):
            return explicit
        raise ShimUnavailable(
            f"CXX names the compiler {explicit[0]}, which is not there: install it (package g++ "
            f"or gcc-c++), or let CXX name another."
        )
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ShimUnavailable(
        "No C++ compiler was found, and DEADPOOL compiles one small file once for the installed "
        "torch: install g++ (package g++ or gcc-c++), or let CXX name a compiler."
    )


def main() -> int:
    """Build the shim if needed and print its path."""
    try:
        print(ensure_built())
    except ShimUnavailable as error:
        print(error, file=sys.stderr)
        return _EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
