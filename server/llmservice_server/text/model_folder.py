"""The folder that is served in the place of a checkpoint's, where some of its files are others."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmservice_planner.model_config import patched
from llmservice_server.text.tekken import TEKKEN, from_tekken
from llmservice_server.types.checkpoint_config import read_json_object

_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def served_folder(model: Path, overrides: Mapping[str, Any] | None) -> Path:
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
    folder = Path(tempfile.mkdtemp(prefix="llmservice-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for path in model.iterdir():
        if path.name not in files:
            (folder / path.name).symlink_to(path.absolute())
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
