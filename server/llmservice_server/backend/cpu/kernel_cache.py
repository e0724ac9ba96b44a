"""numba's cache of compiled functions, in a folder that many processes and pods write at once.

Compared with numba's own: it has no index, where two writers at once could enter one data file for two signatures, so
that code for other types or another CPU would run; each entry is a file with its key and a checksum, and replaces an
earlier one at once. The folder's name contains a hash of the sources of all kernels, as one is compiled into others,
and of the versions of the compilers. numba's key has the signature and the CPU's name and features. Reading needs no
right to write. Of several processes that miss an entry, one compiles it and the others wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import pickle
import platform
import shutil
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, _CacheLocator

from llmservice_server.backend.compile_cache import COMPILATIONS, cpu_folder, warn_once

_DIGEST_BYTES = hashlib.sha256().digest_size
_KEPT_S = 30 * 86400.0
_POLL_S = 0.05
_COMPILE = "numba:compile"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


class KernelCache(FunctionCache):
    """The entries of one function. `_cache` of a numba dispatcher."""

    def __init__(self, function: Any) -> None:
        self._impl_class = _Functions
        super().__init__(function)
        self._cache_file: _Entries = _Entries(Path(self.cache_path), self._impl.filename_base)
        if cpu_folder() is None:
            self.disable()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None and self._enabled:
            lock = self._lock_of(sig, target_context.codegen())
            _LOCKS.acquire(lock)
            found = super().load_overload(sig, target_context)  # another process may have compiled it meanwhile
            if found is not None:
                _LOCKS.release(lock)
        if found is not None:
            COMPILATIONS.loaded += 1
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        COMPILATIONS.compiled += 1
        try:
            super().save_overload(sig, data)
        except OSError as error:
            warn_once(error)
        finally:
            _LOCKS.release(self._lock_of(sig, data.codegen))

    def _lock_of(self, sig: Any, codegen: Any) -> Path:
        return self._cache_file.path(self._index_key(sig, codegen)).with_suffix(".lock")


@dataclass(slots=True)
class Locks:
    """Locks of entries that this process compiles. A lock that cannot be had, or not soon, is done without."""

    patience_s: float = 60.0
    """For all locks together: another process may be slow, or its end not yet noticed by a network file system."""

    _held: dict[Path, int] = field(default_factory=dict)
    _latest: Path | None = None

    def acquire(self, path: Path) -> None:
        if self.patience_s <= 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o664)
        except OSError:  # read-only or full, about which `save_overload` warns
            return
        try:
            while not _is_locked(descriptor):
                time.sleep(_POLL_S)
                self.patience_s -= _POLL_S
                if self.patience_s <= 0:
                    raise TimeoutError
        except OSError:  # too late, or no locks on this file system
            os.close(descriptor)
            return
        self._held[path] = descriptor
        self._latest = path

    def take_latest(self) -> Path | None:
        """The lock for what is compiled next; None where there is none."""
        latest, self._latest = self._latest, None
        return latest if latest in self._held else None

    def release(self, path: Path) -> None:
        if (descriptor := self._held.pop(path, None)) is not None:
            os.close(descriptor)


_LOCKS = Locks()


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Entries(IndexDataCacheFile):
    """A file for each key, instead of an index and numbered files."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(str(folder), name, source_stamp=None)
        self._folder, self._name = folder, name

    def save(self, key: Any, data: Any) -> None:
        content = self._dump((key, data))
        with self._open_for_write(str(self.path(key))) as file:  # a temporary file, then os.replace
            file.write(hashlib.sha256(content).digest() + content)

    def load(self, key: Any) -> Any:
        """None where there is no such entry, or one that is damaged: it is compiled and replaced."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(error)
            return None
        digest, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            warn_once(f"{path} is damaged and will be replaced")
            return None
        stored, data = pickle.loads(content)  # noqa: S301 - who may write there is in docs/security.md
        return data if stored == key else None

    def path(self, key: Any) -> Path:
        return self._folder / f"{self._name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.kernel"


class _Locator(_CacheLocator):
    """Names the folder of a function's entries, and makes it when the first is written."""

    def __init__(self, folder: Path, file: str, line: int) -> None:
        self._folder, self._py_file, self._line = folder, file, line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        root = cpu_folder() or Path()
        return cls(_in_use(root, versions(Path(py_file))), py_file, py_func.__code__.co_firstlineno)

    def ensure_cache_path(self) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            forget_unused(self._folder.parent, time.time())

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> None:
        """The sources are in the folder's name."""

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Functions(CompileResultCacheImpl):
    _locator_classes: Any = (_Locator,)


@cache
def may_use_tiles() -> bool:
    """Ask for the use of AMX's tiles by this process (https://docs.kernel.org/arch/x86/xstate.html).

    False where the system does not permit it, as in some sandboxes, though numba's key has the CPU's feature: code with
    tiles would end the process.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@cache
def versions(file: Path) -> str:
    """A folder's name: of our version and of all that determines the code of a kernel in `file` beside numba's key."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for source in sorted({*here.glob("*.py"), *here.parent.glob("*.py"), file}):
        digest.update(source.read_bytes())
    numbers = [version(name) for name in ("llmservice", "numba", "llvmlite")]
    digest.update(f"{numbers} {numba.config.OPT} {may_use_tiles()}".encode())  # type: ignore[attr-defined]
    return f"llmservice-{numbers[0]}-numba-{numbers[1]}-{digest.hexdigest()[:16]}"


@cache
def _in_use(root: Path, name: str) -> Path:
    """The folder, marked as used today."""
    folder = root / name
    with contextlib.suppress(OSError):  # there is none yet, or it is read-only
        os.utime(folder)
    return folder


def forget_unused(root: Path, now: float) -> None:
    """Remove the folders of other versions that no process has used for a month."""
    for folder in root.iterdir():
        try:
            if now - folder.stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:  # another process removed it
            continue


class _Compiling(event.Listener):
    """Adds up the seconds of the outermost functions, which compile what they call, and unlocks what fails.

    numba compiles a function once more, for another signature, where a type has to be a literal.
    """

    def __init__(self) -> None:
        self._locks: list[Path | None] = []
        self._began_s = 0.0

    def on_start(self, event: Any) -> None:
        if not self._locks:
            self._began_s = time.perf_counter()
        self._locks.append(_LOCKS.take_latest())

    def on_end(self, event: Any) -> None:
        lock = self._locks.pop()
        if lock is not None and event._exc_details is not None:  # `is_failed` is true where it is None
            _LOCKS.release(lock)
        if not self._locks:
            COMPILATIONS.seconds += time.perf_counter() - self._began_s


event.register(_COMPILE, _Compiling())  # numba holds its lock while it compiles: one thread at a time
