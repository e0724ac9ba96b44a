"""`file:///path`: a folder on this machine, copied."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmservice_server.fetch.checkpoint import needed, require_servable
from llmservice_server.fetch.error import FetchError


def copy_folder(path: str, directory: Path) -> list[str]:
    """Copy what serving needs and is not there yet; returns the names. Raises FetchError, OSError."""
    source = Path(path)
    if not source.is_absolute():
        raise FetchError(f"file://{path} is not absolute, expected file:///path")
    if not source.is_dir():
        raise FetchError(f"{source} is no folder: expected one that holds a checkpoint")
    names = needed(file.name for file in source.iterdir() if file.is_file())
    require_servable(f"file://{path}", names)
    for name in names:
        file, target = source / name, directory / name
        if not _same(file, target):
            unfinished = directory / f".{name}.part"
            shutil.copy2(file, unfinished)
            unfinished.replace(target)  # a run that is killed leaves no half file under the real name
    return names


def _same(file: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    ours, theirs = target.stat(), file.stat()
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)
