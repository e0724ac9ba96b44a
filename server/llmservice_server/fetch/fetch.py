"""From a URI to a folder that a server can load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmservice_server.fetch.cache import completed, mark_completed, sole_writer
from llmservice_server.fetch.checkpoint import needed, require_servable
from llmservice_server.fetch.download import Downloader
from llmservice_server.fetch.error import FetchError
from llmservice_server.fetch.folder import copy_folder
from llmservice_server.fetch.lock import LockLostError
from llmservice_server.fetch.progress import Progress
from llmservice_server.fetch.retry import RetryPolicy, retried
from llmservice_server.fetch.source import Source


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How to fetch."""

    parallel: int = 4
    """Files that are downloaded at once."""
    shared: bool = False
    """Whether other processes fetch into the same folder: then one does, the others wait."""
    lease_s: float = 30.0
    """How long a silent downloader keeps the others waiting."""
    silence_s: float = 30.0
    """How long a connection may bring nothing."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)


def fetch(
    uri: str, directory: Path, options: FetchOptions | None = None, progress: Progress | None = None
) -> list[str]:
    """Bring the checkpoint that `uri` names into `directory`; returns the names of its files.

    `hf://org/name[@revision]`, `s3://bucket/path` or `file:///path`. A second run completes what a first one left
    unfinished, and one that finds the folder complete asks nobody. Raises FetchError.
    """
    options, progress = options or FetchOptions(), progress or Progress()
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in {"hf", "s3", "file"}:
        raise FetchError(
            f"{uri} is no URI that can be fetched, expected hf://org/name[@revision], s3://bucket/path or file:///path"
        )
    try:
        if scheme == "file":
            directory.mkdir(parents=True, exist_ok=True)
            return copy_folder(rest, directory)
        source = _source(scheme, rest)
        directory.mkdir(parents=True, exist_ok=True)
        return _fetch_remote(uri, source, directory, options, progress)
    except OSError as error:
        raise FetchError(f"cannot fetch {uri} into {directory}: {error}") from error


def _source(scheme: str, rest: str) -> Source:
    if scheme == "s3":
        from llmservice_server.fetch.s3 import S3Source

        return S3Source.parse(rest)
    from llmservice_server.fetch.hub import HubSource

    return HubSource.parse(rest)


def _fetch_remote(uri: str, source: Source, directory: Path, options: FetchOptions, progress: Progress) -> list[str]:
    def whole() -> bool:
        return completed(directory, uri) is not None

    while (names := completed(directory, uri)) is None:
        if not options.shared:
            _download(uri, source, directory, options, progress, lambda: None)
            continue
        try:
            waiting = lambda: progress.enter("waiting")  # noqa: E731
            with sole_writer(directory, options.lease_s, done=whole, waiting=waiting) as still_ours:
                if still_ours is not None:
                    _download(uri, source, directory, options, progress, still_ours)
        except LockLostError:
            continue  # whoever has it now goes on where we were
    progress.enter("done")
    return names


def _download(
    uri: str,
    source: Source,
    directory: Path,
    options: FetchOptions,
    progress: Progress,
    still_ours: Callable[[], None],
) -> None:
    progress.enter("listing")
    names = needed(retried(source.names, options.retry, source.where))
    require_servable(source.where, names)
    files = retried(lambda: source.describe(names), options.retry, source.where)
    downloader = Downloader(
        source,
        directory,
        progress,
        parallel=options.parallel,
        retry=options.retry,
        silence_s=options.silence_s,
        still_ours=still_ours,
    )
    downloader.run(files)
    still_ours()
    for stale in directory.glob(".*.part"):  # of a version that the source no longer has
        stale.unlink(missing_ok=True)
    mark_completed(directory, uri, names)
