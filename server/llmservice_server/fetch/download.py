"""Parallel downloads, each continued after an interruption and compared with its checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from llmservice_server.fetch.cache import Contents, also_fetched
from llmservice_server.fetch.progress import Progress
from llmservice_server.fetch.source import CorruptError, FetchError, RemoteFile, RetryableError, Source, retrying

_READ_BYTES = 1 << 20
_CORRUPT_LIMIT = 3
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How a checkpoint is downloaded."""

    parallel: int = 4
    """Files that are downloaded at the same time."""
    attempts: int = 7
    """Requests in a row without a new byte after which a file has failed."""
    longest_wait_s: float = 60.0
    """Upper bound of the backoff between attempts, and of a Retry-After."""
    silence_s: float = 30.0
    """A connection that receives nothing for so long is closed and the request repeated."""
    shared: bool = False
    """Whether other processes fetch into the same folder: one downloads, the others wait."""
    adapter: bool = False
    """Whether a LoRA adapter is fetched instead of a checkpoint."""
    lease_s: float = 30.0
    """After so long without a heartbeat another process takes the lock of a shared folder."""


class _StoppedError(Exception):
    """Another file has failed, or the process is to end."""


class Downloader:
    """Downloads files of one source into one folder.

    A file has its final name only once it is complete and its checksum is right. `check_lock` is called before every
    write, and raises where another process has taken the lock of the folder.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        contents: Contents,
        progress: Progress,
        options: FetchOptions,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._directory, self._contents = source, directory, contents
        self._progress, self._options = progress, options
        self._check_lock = check_lock
        self._stop = threading.Event()

    def run(self, files: list[RemoteFile]) -> None:
        """Download those that are not there. Raises the first file's error that is not retryable."""
        pool = ThreadPoolExecutor(self._options.parallel, thread_name_prefix="download")
        try:
            present = {file for file, there in zip(files, pool.map(self._is_present, files), strict=True) if there}
            self._begin(files, present)
            # the largest first, so that the last one is small
            missing = sorted((file for file in files if file not in present), key=lambda file: -file.size)
            done, _ = wait([pool.submit(self._fetch, file) for file in missing], return_when=FIRST_EXCEPTION)
        except BaseException:  # a signal: do not wait for threads that wait for the network
            self._stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        self._stop.set()
        pool.shutdown(cancel_futures=True)
        failures = [error for task in done if (error := task.exception())]
        if failures:
            raise next((error for error in failures if not isinstance(error, _StoppedError)), failures[0])

    def _is_present(self, file: RemoteFile) -> bool:
        """Whether the folder has this version of the file. Its content is read only where no version is recorded."""
        target = self._directory / file.name
        if not target.is_file() or target.stat().st_size != file.size:
            return False
        if self._contents.version(file.name) == file.version:
            return True
        hasher = self._hash_of(target, file, file.size)
        return hasher is not None and file.digest is not None and hasher.hexdigest() == file.digest.value

    def _begin(self, files: list[RemoteFile], present: set[RemoteFile]) -> None:
        total = sum(file.size for file in files)
        done = {file.name: file.size if file in present else min(_size(self._part(file)), file.size) for file in files}
        self._require_space(total - sum(done.values()))
        self._check_lock()
        self._contents.begin({file.name: file.size for file in files}, {file.name: file.version for file in present})
        self._progress.begin(done, total)

    def _fetch(self, file: RemoteFile) -> None:
        target, part = self._directory / file.name, self._part(file)
        target.parent.mkdir(exist_ok=True)
        request = retrying(self._options.attempts, self._options.longest_wait_s, self._stop)
        for corrupt in range(1, _CORRUPT_LIMIT + 1):
            try:
                request(self._attempt, file, part)
                break
            except RetryableError as error:
                raise FetchError(
                    f"{self._source.where}: {file.name}: {error} ({self._options.attempts} attempts without a new"
                    " byte): check network and proxy; partial files are kept for the next run"
                ) from error
            except CorruptError as error:
                part.unlink(missing_ok=True)
                if corrupt == _CORRUPT_LIMIT:
                    raise FetchError(
                        f"{self._source.where}: {file.name}: {error}, {corrupt} times in a row:"
                        " a proxy changes the content, or the upload is damaged"
                    ) from error
        self._check_lock()
        try:
            part.replace(target)
        except FileNotFoundError as error:
            raise FetchError(also_fetched(self._directory)) from error
        self._contents.add(file.name, file.version)

    def _attempt(self, file: RemoteFile, part: Path) -> None:
        """One request. The part file is complete, and its checksum right, when it returns."""
        if self._stop.is_set():
            raise _StoppedError
        before = _size(part)
        try:
            self._transfer(file, part)
        except RetryableError as error:
            error.progressed = _size(part) > before
            raise
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise self._no_space(file.size - _size(part)) from error
            raise

    def _transfer(self, file: RemoteFile, part: Path) -> None:
        with part.open("ab") as out:
            if out.tell() >= file.size:
                out.truncate(0)
            start = os.fstat(out.fileno()).st_size
            hasher = self._hash_of(part, file, start)
            with self._source.open(file, start) as (first, chunks):
                here = first
                if first != start:  # the server does not support ranges
                    out.truncate(0)
                    hasher = self._hash_of(part, file, 0)
                for chunk in chunks:
                    if self._stop.is_set():
                        raise _StoppedError
                    self._check_lock()
                    here += len(chunk)
                    if here > file.size:
                        raise CorruptError(f"it is longer than the {file.size} bytes announced")
                    out.write(chunk)
                    if hasher is not None:
                        hasher.update(chunk)
                    self._progress.at(file.name, here)
            if here < file.size:
                raise RetryableError(f"the response ended after {here} of {file.size} bytes")
            out.flush()
            os.fsync(out.fileno())
            if os.fstat(out.fileno()).st_size != file.size:
                raise FetchError(also_fetched(self._directory))
        if hasher is not None and file.digest is not None and hasher.hexdigest() != file.digest.value:
            raise CorruptError(f"its {file.digest.algorithm} is {hasher.hexdigest()}, expected {file.digest.value}")

    def _hash_of(self, path: Path, file: RemoteFile, num_bytes: int) -> hashlib._Hash | None:
        """The hash of the first `num_bytes` of what an earlier attempt or fetch has written."""
        if file.digest is None:
            return None
        hasher = file.digest.hasher(file.size)
        with path.open("rb") as written:
            while chunk := written.read(min(_READ_BYTES, num_bytes - written.tell())):
                if self._stop.is_set():
                    raise _StoppedError
                hasher.update(chunk)
        return hasher

    def _part(self, file: RemoteFile) -> Path:
        version = hashlib.sha256(file.version.encode()).hexdigest()[:12]
        target = self._directory / file.name
        return target.with_name(f".{target.name}.{version}.part")

    def _require_space(self, need_bytes: int) -> None:
        if need_bytes > shutil.disk_usage(self._directory).free:
            raise self._no_space(need_bytes)

    def _no_space(self, need_bytes: int) -> FetchError:
        free = shutil.disk_usage(self._directory).free
        return FetchError(
            f"{self._source.where} needs {need_bytes / _GIB:.2f} GiB more, {free / _GIB:.2f} GiB is free in"
            f" {self._directory}: give the node or the cache's claim more room, or choose a smaller model"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
