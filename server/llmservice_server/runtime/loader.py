"""From a Hugging Face folder to a model with its weights. Only safetensors: unpickling a file can run any code."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from llmservice_server.backend.base import Model
from llmservice_server.engine.config import Implementation
from llmservice_server.models.config import ModelConfig, is_own
from llmservice_server.models.llama import LlamaModel
from llmservice_server.types.checkpoint_config import eos_token_ids, read_json_object
from llmservice_server.types.errors import ModelLoadError

if TYPE_CHECKING:
    from llmservice_server.models.transformers_model import TransformersConfig

_INDEX = "model.safetensors.index.json"
_PARALLEL_SHARDS = 4
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder whose config has been read and whose weight files exist."""

    folder: Path
    config: ModelConfig | TransformersConfig
    shards: tuple[Path, ...]
    eos_token_ids: frozenset[int]

    @classmethod
    def open(cls, folder: Path, implementation: Implementation = "auto") -> Checkpoint:
        """Raises `ModelLoadError`: no such folder, broken JSON, an architecture that we do not run, a missing shard."""
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder: expected one with config.json and *.safetensors")
        raw = read_json_object(folder / "config.json")
        shards = weight_files(folder)
        if implementation == "own" or (implementation == "auto" and is_own(raw)):
            return cls(folder, ModelConfig.from_dict(raw), shards, eos_token_ids(folder))
        from llmservice_server.models.transformers_model import examine  # transformers is imported in seconds

        return cls(folder, examine(folder), shards, eos_token_ids(folder))

    def dtype(self, wanted: str) -> torch.dtype:
        """The dtype to run in; `auto` is the checkpoint's own."""
        if wanted != "auto":
            return _DTYPES[wanted]
        named = str(self.config.dtype or "float32").removeprefix("torch.")
        if named not in _DTYPES:
            raise ModelLoadError(
                f"config.json: dtype is {named!r}, expected one of {', '.join(_DTYPES)}: choose one with --dtype"
            )
        return _DTYPES[named]

    @property
    def weight_file_bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)

    def load(self, dtype: torch.dtype, device: torch.device) -> Model:
        """Raises `ModelLoadError` for a tensor that is missing, unknown, of the wrong shape, or unreadable."""
        if not isinstance(self.config, ModelConfig):
            from llmservice_server.models.transformers_model import TransformersModel

            return TransformersModel.load(self.folder, self.config, dtype, device)
        model = LlamaModel(self.config, dtype, device)
        wanted = model.checkpoint_tensors()
        with ThreadPoolExecutor(_PARALLEL_SHARDS) as readers:  # each reads a file's pages straight into the weights
            list(readers.map(lambda shard: self._load_shard(shard, wanted), self.shards))
        if wanted:
            raise ModelLoadError(
                f"{self.folder}: {len(wanted)} tensors that {self.config.architecture} needs are in none of its "
                f"{len(self.shards)} safetensors files, among them {min(wanted)}"
            )
        model.finish_loading()
        return model

    def _load_shard(self, shard: Path, wanted: dict[str, torch.Tensor]) -> None:
        """Fill the tensors that `shard` holds, and take them out of `wanted`."""
        try:
            with safe_open(shard, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    target = wanted.pop(name, None)
                    if target is None:
                        self._refuse_unknown(name, shard)
                        continue
                    shape = tensors.get_slice(name).get_shape()
                    if shape != list(target.shape):
                        raise ModelLoadError(
                            f"{shard.name}: {name} has the shape {shape}, config.json makes it {list(target.shape)}"
                        )
                    target.copy_(tensors.get_tensor(name))
        except SafetensorError as error:
            raise ModelLoadError(f"{shard} is not a readable safetensors file ({error}): fetch it again") from error

    def _refuse_unknown(self, name: str, shard: Path) -> None:
        """Refuse a weight that the model has no place for: its results would be wrong. Two kinds are superfluous."""
        tied_head = name == "lm_head.weight" and isinstance(self.config, ModelConfig) and self.config.tied_embeddings
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            raise ModelLoadError(
                f"{shard.name} holds {name}, which {self.config.architecture} with this config.json has no place for "
                "(or which two files hold)"
            )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Raises `ModelLoadError` where there are no safetensors files, or not all that the index names."""
    if (folder / _INDEX).exists():
        weight_map = read_json_object(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
        shards = tuple(folder / str(name) for name in sorted(set(weight_map.values())))
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder}: {_INDEX} names {len(shards)} files, {', '.join(missing)} missing: fetch it again"
            )
        return shards
    shards = tuple(sorted(folder.glob("*.safetensors")))
    if shards:
        return shards
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run any code when read: "
            "convert them to safetensors"
        )
    raise ModelLoadError(f"{folder} holds no *.safetensors file")
