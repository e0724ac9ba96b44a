"""Downloading files: several at once, each continued where it broke off, each compared with its checksum."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import httpx2

from llmservice_server.fetch.error import FetchError, RetryableError
from llmservice_server.fetch.progress import Progress
from llmservice_server.fetch.retry import RetryPolicy
from llmservice_server.fetch.source import RemoteFile, Source

_READ_BYTES = 1 << 20
_CORRUPT_LIMIT = 3
_GIB = 1 << 30
_CONNECT_TIMEOUT_S = 10.0


class _CorruptError(Exception):
    """The bytes are not those that the source tells of."""


class _StoppedError(Exception):
    """Another file has failed for good."""


class Downloader:
    """Brings files of one source into one folder. A file has its real name only once it is whole and right.

    A connection that brings nothing for `silence_s` seconds is given up and begun anew.
    `still_ours` is asked before every write and raises where the folder has gone to somebody else.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        progress: Progress,
        *,
        parallel: int = 4,
        retry: RetryPolicy | None = None,
        silence_s: float = 30.0,
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._directory, self._progress = source, directory, progress
        self._parallel = parallel
        self._retry = retry or RetryPolicy()
        self._timeout = httpx2.Timeout(silence_s, connect=_CONNECT_TIMEOUT_S)
        self._still_ours = still_ours
        self._stop = threading.Event()

    def run(self, files: list[RemoteFile]) -> None:
        """Bring all of them. Raises FetchError for the first that cannot be had."""
        present = {file.name: self._present_bytes(file) for file in files}
        total = sum(file.size for file in files)
        self._require_space(total - sum(present.values()))
        self._progress.begin(present, total)
        with httpx2.Client(timeout=self._timeout, follow_redirects=True) as client:
            pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="download")
            try:
                # the largest first: the last one to end should be a small one
                ordered = sorted(files, key=lambda file: file.size, reverse=True)
                tasks = [pool.submit(self._fetch, client, file) for file in ordered]
                done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            except BaseException:  # a signal: nobody waits for threads that wait for the network
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        failures = [error for task in done if (error := task.exception())]
        if failures:
            raise next((error for error in failures if not isinstance(error, _StoppedError)), failures[0])

    def _fetch(self, client: httpx2.Client, file: RemoteFile) -> None:
        target, part = self._directory / file.name, self._part(file)
        if target.is_file() and target.stat().st_size == file.size:
            return
        failures = corrupt = 0
        while not self._stop.is_set():
            had = _size(part)
            try:
                self._transfer(client, file, part)
                self._still_ours()
                part.replace(target)
                return
            except RetryableError as error:
                failures = 1 if _size(part) > had else failures + 1
                if failures >= self._retry.attempts:
                    raise FetchError(
                        f"{self._source.where}: {file.name}: {error} ({failures} attempts without a new byte):"
                        " check network and proxy; what is there is kept for the next run"
                    ) from error
                self._stop.wait(self._retry.delay_s(failures, error.retry_after_s))
            except _CorruptError as error:
                part.unlink(missing_ok=True)
                corrupt += 1
                if corrupt >= _CORRUPT_LIMIT:
                    raise FetchError(
                        f"{self._source.where}: {file.name}: {error}, {corrupt} times in a row:"
                        " what answers there changes files on their way, or the upload is damaged"
                    ) from error

    def _transfer(self, client: httpx2.Client, file: RemoteFile, part: Path) -> None:
        """One attempt: whole and right when it returns."""
        try:
            with part.open("ab") as out:
                if out.tell() >= file.size:
                    out.truncate(0)
                start = os.fstat(out.fileno()).st_size
                hasher = _hash_of(part, file, start)
                headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
                with client.stream("GET", file.url, headers=self._source.headers(file, headers)) as response:
                    self._check_answer(response, file, start)
                    if start and response.status_code == 200:  # it knows no ranges: from the beginning, then
                        out.truncate(0)
                        start, hasher = 0, file.digest.hasher(file.size) if file.digest else None
                    self._receive(response, file, out.write, start, hasher)
                out.flush()
                os.fsync(out.fileno())
        except httpx2.RequestError as error:
            raise RetryableError(f"the connection broke ({type(error).__name__})") from error
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise self._no_space(file.size - _size(part)) from error
            raise
        if hasher is not None and file.digest is not None and hasher.hexdigest() != file.digest.value:
            raise _CorruptError(f"its {file.digest.algorithm} is {hasher.hexdigest()}, expected {file.digest.value}")

    def _receive(
        self,
        response: httpx2.Response,
        file: RemoteFile,
        write: Callable[[bytes], object],
        start: int,
        hasher: hashlib._Hash | None,
    ) -> None:
        here = start
        for chunk in response.iter_bytes():
            if self._stop.is_set():
                raise _StoppedError
            self._still_ours()
            here += len(chunk)
            if here > file.size:
                raise _CorruptError(f"it is longer than the {file.size} bytes announced")
            write(chunk)
            if hasher is not None:
                hasher.update(chunk)
            self._progress.at(file.name, here)
        if here < file.size:
            raise RetryableError(f"the answer ended after {here} of {file.size} bytes")

    def _check_answer(self, response: httpx2.Response, file: RemoteFile, start: int) -> None:
        status = response.status_code
        if status in {408, 425, 429} or status >= 500:
            raise RetryableError(f"HTTP {status}", _retry_after_s(response))
        if status == 416:
            raise _CorruptError(f"it has no byte {start}")
        if status not in {200, 206}:
            raise self._source.refusal(status, file.name)
        begins = response.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
        if status == 206 and begins != str(start):
            raise _CorruptError(f"it was asked for from byte {start} and came from {begins or 'nowhere'}")

    def _part(self, file: RemoteFile) -> Path:
        version = hashlib.sha256(file.version.encode()).hexdigest()[:12]
        return self._directory / f".{file.name}.{version}.part"

    def _present_bytes(self, file: RemoteFile) -> int:
        whole = _size(self._directory / file.name)
        return whole if whole == file.size else min(_size(self._part(file)), file.size)

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


def _hash_of(part: Path, file: RemoteFile, num_bytes: int) -> hashlib._Hash | None:
    """The checksum so far of the `num_bytes` that an earlier attempt has left."""
    if file.digest is None:
        return None
    hasher = file.digest.hasher(file.size)
    with part.open("rb") as written:
        while chunk := written.read(min(_READ_BYTES, num_bytes - written.tell())):
            hasher.update(chunk)
    return hasher


def _retry_after_s(response: httpx2.Response) -> float | None:
    """Seconds only: a date would need this machine's clock to be right."""
    with contextlib.suppress(ValueError):
        return max(0.0, float(response.headers.get("retry-after", "")))
    return None
