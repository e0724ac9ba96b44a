"""Which files make a checkpoint that the server can load. Never a pickle."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from llmservice_server.fetch.error import FetchError

_PATTERNS = ("*.safetensors", "*.json", "*.jinja")  # weights, configurations and tokenizer, chat template
_ORIGINAL = "consolidated*.safetensors"  # the same weights once more, in their authors' own layout
_SHARD = re.compile(r".*-\d+-of-(?P<of>\d+)\.safetensors")


def needed(names: Iterable[str]) -> list[str]:
    """The names, sorted, that serving needs; those in folders, hidden ones and pickles are not among them."""
    found = sorted(name for name in names if _plain(name) and any(fnmatch.fnmatchcase(name, one) for one in _PATTERNS))
    others = [name for name in found if not fnmatch.fnmatchcase(name, _ORIGINAL)]
    return others if any(name.endswith(".safetensors") for name in others) else found


def require_servable(where: str, names: list[str]) -> None:
    """Better said now than by a server that cannot start. Raises FetchError."""
    if "config.json" not in names:
        raise FetchError(f"{where} holds no config.json: expected a checkpoint in Hugging Face's format")
    if not any(name.endswith(".safetensors") for name in names):
        raise FetchError(f"{where} holds no safetensors: pickled weights (.bin, .pt) are never loaded: convert them")
    shards = [shard for name in names if (shard := _SHARD.fullmatch(name))]
    if shards and len(shards) < (expected := int(shards[0]["of"])):
        raise FetchError(f"{where} is incomplete: {len(shards)} of {expected} shards are there; upload the others")
    if "tokenizer.json" not in names:
        raise FetchError(f"{where} holds no tokenizer.json: save the model's fast tokenizer beside its weights")


def _plain(name: str) -> bool:
    """A name of one file in the folder itself: what a remote place says is no path of ours."""
    return bool(name) and "/" not in name and "\\" not in name and not name.startswith(".") and name.isprintable()
