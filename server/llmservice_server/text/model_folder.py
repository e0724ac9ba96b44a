"""The folder that is served in the place of a checkpoint's, where some of its files are others."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmservice_planner.model.config import patched
from llmservice_server.text.tekken import TEKKEN, from_tekken
from llmservice_server.types.checkpoint_config import read_json_object
from llmservice_server.types.errors import ModelLoadError

_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_NUMBERS = itertools.count()


def served_folder(model: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """`model`, or one with its files but for a config.json with `overrides`, and a tokenizer that tekken.json makes.

    It lasts as long as this process. Raises ModelLoadError.
    """
    files: dict[str, str] = {}
    if overrides:
        files["config.json"] = json.dumps(patched(read_json_object(model / "config.json"), overrides))
    if (model / TEKKEN).is_file() and not (model / "tokenizer.json").is_file():
        has_template = any((model / name).is_file() for name in _TEMPLATES)
        files |= {
            name: text
            for name, text in from_tekken(model / TEKKEN).items()
            if not (model / name).is_file() and not (has_template and name in _TEMPLATES)
        }
    if not files:
        return model
    folder = Path(tempfile.gettempdir()) / f"llmservice-model-{os.getpid()}-{next(_NUMBERS)}"
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a container's process before this one, which was killed
        folder.mkdir(mode=0o700)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for path in model.iterdir():
            if path.name not in files:
                (folder / path.name).symlink_to(path.absolute())
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"{folder} cannot be written ({error}), where the changed files of {model} are put: make room there, or "
            "set TMPDIR"
        ) from error
    return folder
