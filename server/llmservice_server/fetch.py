"""Bring a checkpoint into a folder: from the Hugging Face hub or from a mounted path. Never a pickle."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PATTERNS = ("*.safetensors", "*.json", "*.jinja")  # weights, configurations, tokenizer, chat template
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")

_SHARD = re.compile(r".*-\d+-of-(?P<of>\d+)\.safetensors")


class FetchError(Exception):
    """The checkpoint cannot be had: one sentence with what to do."""


def fetch(uri: str, directory: Path) -> list[str]:
    """Copy the checkpoint that `uri` names into `directory`; returns the names of its files.

    `hf://org/name[@revision]` reads the hub's access token from `HF_TOKEN`; `file:///path` is a folder on this machine.
    A second run completes what a first one left unfinished. Raises FetchError.
    """
    scheme, separator, rest = uri.partition("://")
    sources: dict[str, Callable[[str, Path], None]] = {"hf": _from_hub, "file": _from_folder}
    if not separator or scheme not in sources:
        raise FetchError(f"{uri} is no URI that can be fetched, expected hf://org/name[@revision] or file:///path")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sources[scheme](rest, directory)
    except OSError as error:
        raise FetchError(f"cannot fetch {uri} into {directory}: {error}") from error
    return _checked(uri, directory)


def _checked(uri: str, directory: Path) -> list[str]:
    """What a server needs is there: better said here than by a pod that then cannot start."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if "config.json" not in names:
        raise FetchError(f"{uri} holds no config.json: expected a checkpoint in Hugging Face's format")
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchError(f"{uri} holds no safetensors: pickled weights (.bin, .pt) are never loaded: convert them")
    shards = [shard for name in names if (shard := _SHARD.fullmatch(name))]
    if shards and len(shards) < (expected := int(shards[0]["of"])):  # the hub's client may give up half-way in silence
        raise FetchError(f"{uri} is incomplete: {len(shards)} of {expected} shards are there; fetch it again")
    if "tokenizer.json" not in names:
        raise FetchError(f"{uri} holds no tokenizer.json: save the model's fast tokenizer beside its weights")
    return names


def _from_folder(path: str, directory: Path) -> None:
    source = Path(path)
    if not source.is_absolute():
        raise FetchError(f"file://{path} is not absolute, expected file:///path")
    if not source.is_dir():
        raise FetchError(f"{source} is no folder: expected one that holds a checkpoint")
    for file in sorted(source.iterdir()):
        target = directory / file.name
        if (
            file.is_file()
            and any(fnmatch.fnmatch(file.name, pattern) for pattern in PATTERNS)
            and not _same(file, target)
        ):
            unfinished = target.with_name(target.name + ".part")
            shutil.copy2(file, unfinished)
            unfinished.replace(target)  # a run that is killed leaves no half file under the real name


def _same(file: Path, target: Path) -> bool:
    if not target.is_file():
        return False
    ours, theirs = target.stat(), file.stat()
    return (ours.st_size, ours.st_mtime_ns) == (theirs.st_size, theirs.st_mtime_ns)


def _from_hub(name: str, directory: Path) -> None:
    import huggingface_hub

    repository, separator, revision = name.partition("@")
    if not _HUB_NAME.fullmatch(repository) or (separator and not revision):
        raise FetchError(f"hf://{name} names no repository, expected hf://org/name or hf://org/name@revision")
    with _hub_errors(repository, revision or "main"):
        huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            local_dir=directory,
            allow_patterns=list(PATTERNS),
            ignore_patterns=["*/*"],  # other formats of the same weights live in folders
        )


@contextmanager
def _hub_errors(repository: str, revision: str) -> Iterator[None]:
    """The hub's errors, each with what to do about it."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{repository} is gated: accept its licence on the hub and give the token of that account in HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{repository} does not exist on the hub, or HF_TOKEN gives no access to it: check the name and the token"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{repository} has no revision {revision}: check the branch, tag or commit") from error
    except errors.HFValidationError as error:
        raise FetchError(f"{repository} is no repository's name: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, errors.RevisionResolutionError) as error:
        reason = str(error).splitlines()[0]  # its other lines are general advice
        raise FetchError(
            f"the hub cannot be reached for {repository} ({reason}): check network, proxy and HF_ENDPOINT"
        ) from error
