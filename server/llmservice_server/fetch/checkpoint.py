"""Fetch a checkpoint or a LoRA adapter: from a URI to a folder with the files that the server loads. Never a pickle."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llmservice_planner.model.checkpoint import weight_names
from llmservice_planner.model.encoders import MODULES, without_config
from llmservice_server.fetch.cache import Contents, LockLostError, completed, only_fetch, sole_writer
from llmservice_server.fetch.download import Downloader, FetchOptions
from llmservice_server.fetch.progress import Progress
from llmservice_server.fetch.source import FetchError, RetryableError, Source, retrying

_PATTERNS = ("*.safetensors", "*.json", "*.jinja")  # weights, configurations and tokenizer, chat template
_IN_FOLDERS = re.compile(
    r"\d+_Pooling/config\.json|\d+_Dense/(config\.json|model\.safetensors)|additional_chat_templates/tool_use\.jinja"
)
"""How sentence-transformers makes an embedding; the chat template of requests with tools."""
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_SHARD = re.compile(r".*-\d+-of-(?P<of>\d+)\.safetensors")


def fetch(
    uri: str, directory: Path, options: FetchOptions | None = None, progress: Progress | None = None
) -> list[str]:
    """Fetch the checkpoint at `uri` into `directory`; returns the names of its files. Raises FetchError.

    `hf://org/name[@revision]`, `s3://bucket/path` or `file:///path`. A second run continues what the first has not
    completed, and sends no request if the folder is complete.
    """
    options, progress = options or FetchOptions(), progress or Progress()
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in {"hf", "s3", "file"}:
        raise FetchError(
            f"{uri} is no URI that can be fetched, expected hf://org/name[@revision], s3://bucket/path or file:///path"
        )
    try:
        if scheme == "file":
            return _copy_folder(rest, directory, adapter=options.adapter)
        source = remote_source(uri, options.silence_s)
        directory.mkdir(parents=True, exist_ok=True)
        return _fetch_remote(uri, source, directory, options, progress)
    except OSError as error:
        raise FetchError(f"cannot fetch {uri} into {directory}: {error}") from error


def needed(names: Iterable[str], *, adapter: bool = False) -> list[str]:
    """The names, sorted, of the files that serving needs: not those in other folders, hidden ones and pickles."""
    names = set(names)
    if adapter:
        return [name for name in _ADAPTER if name in names]
    found = sorted(name for name in names if _plain(name) and any(fnmatch.fnmatchcase(name, one) for one in _PATTERNS))
    weights = weight_names(found)
    chosen = [name for name in found if name in weights or not name.endswith(".safetensors")]
    return [*sorted(filter(_IN_FOLDERS.fullmatch, names)), *chosen]


def _plain(name: str) -> bool:
    """Whether a name from a remote source is that of a file in the folder itself, never a path."""
    return bool(name) and "/" not in name and "\\" not in name and not name.startswith(".") and name.isprintable()


def _require_servable(where: str, names: list[str], *, adapter: bool) -> None:
    """Raises FetchError, before the download, for what the server cannot load."""
    if adapter:
        for name in _ADAPTER:
            if name not in names:
                raise FetchError(
                    f"{where} holds no {name}: expected a LoRA adapter in PEFT's format, as safetensors (a pickle, "
                    "adapter_model.bin, is never loaded: convert it)"
                )
        return
    if "config.json" not in names:
        raise FetchError(without_config(where, [] if MODULES in names else None))
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchError(
            f"{where} holds no safetensors: pickled weights (.bin, .pt) are never loaded, GGUF and ONNX are not "
            "served: convert them, or choose another repository of the model"
        )
    shards = [shard for name in names if (shard := _SHARD.fullmatch(name))]
    if shards and len(shards) < (expected := int(shards[0]["of"])):
        raise FetchError(f"{where} is incomplete: {len(shards)} of {expected} shards are there; upload the others")
    if not {"tokenizer.json", "tekken.json"} & {*names}:
        raise FetchError(f"{where} holds no tokenizer.json: save the model's fast tokenizer beside its weights")


def remote_source(uri: str, silence_s: float) -> Source:
    """Of a `hf://` or `s3://` URI. Raises FetchError."""
    scheme, _, rest = uri.partition("://")
    if scheme == "s3":
        from llmservice_server.fetch.s3 import S3Source

        return S3Source.parse(rest, silence_s)
    from llmservice_server.fetch.hub import HubSource

    return HubSource.parse(rest, silence_s)


def _fetch_remote(uri: str, source: Source, directory: Path, options: FetchOptions, progress: Progress) -> list[str]:
    while (names := completed(directory, uri)) is None:
        if not options.shared:
            with only_fetch(directory):
                _download(uri, source, directory, options, progress, lambda: None)
            continue
        try:
            with sole_writer(
                directory,
                options.lease_s,
                done=lambda: completed(directory, uri) is not None,
                waiting=lambda: progress.enter("waiting"),
            ) as check_lock:
                if check_lock is not None:
                    _download(uri, source, directory, options, progress, check_lock)
        except LockLostError:
            continue  # the new holder continues our partial files
    progress.enter("done")
    return names


def _download(
    uri: str,
    source: Source,
    directory: Path,
    options: FetchOptions,
    progress: Progress,
    check_lock: Callable[[], None],
) -> None:
    progress.enter("listing")
    request = retrying(options.attempts, options.longest_wait_s)
    try:
        names = needed(request(source.names), adapter=options.adapter)
        _require_servable(source.where, names, adapter=options.adapter)
        files = request(source.describe, names)
    except RetryableError as error:
        raise FetchError(f"{source.where}: {error} ({options.attempts} attempts): check network and proxy") from error
    contents = Contents(directory)
    Downloader(source, directory, contents, progress, options, check_lock).run(files)
    check_lock()
    for stale in directory.glob(".*.part"):  # of a version that the source no longer has
        stale.unlink(missing_ok=True)
    _complete(contents, directory, uri, names, adapter=options.adapter)


def _complete(contents: Contents, directory: Path, uri: str, names: list[str], *, adapter: bool) -> None:
    """Mark the folder, without what earlier fetches have left there: an old index would name the weights to load."""
    for name in contents.left_over(names):
        safe = _plain(name) or _IN_FOLDERS.fullmatch(name)  # others may have written the marker of a shared folder
        if safe and (name in _ADAPTER) == adapter:  # an adapter may be in its model's folder
            (directory / name).unlink(missing_ok=True)
    contents.complete(uri, names)


def _copy_folder(path: str, directory: Path, *, adapter: bool) -> list[str]:
    """Copy the files that serving needs from a folder of this machine, if they differ in size or time."""
    source = Path(path)
    if not source.is_absolute():
        raise FetchError(f"file://{path} is not absolute, expected file:///path")
    if not source.is_dir():
        what = "an adapter" if adapter else "a checkpoint"
        raise FetchError(f"{source} is no folder: expected one that holds {what}")
    files = (file for pattern in ("*", "*/*") for file in source.glob(pattern) if file.is_file())
    names = needed((file.relative_to(source).as_posix() for file in files), adapter=adapter)
    _require_servable(f"file://{path}", names, adapter=adapter)
    directory.mkdir(parents=True, exist_ok=True)
    uri, changed = f"file://{path}", [name for name in names if not _same(source / name, directory / name)]
    if not changed and completed(directory, uri) == sorted(names):
        return names
    contents = Contents(directory)
    contents.begin({name: (source / name).stat().st_size for name in names}, {})
    for name in changed:
        target = directory / name
        unfinished = target.with_name(f".{target.name}.part")
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(source / name, unfinished)
        unfinished.replace(target)  # a file has its final name only once it is complete
    _complete(contents, directory, uri, names, adapter=adapter)
    return names


def _same(file: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    theirs, ours = file.stat(), target.stat()
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
