"""Reading LoRA adapters in PEFT's format, checked against the model that is to compute with them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from llmservice_planner.checkpoint import LANGUAGE_MODEL, NOT_LOADED, is_head, place_of
from llmservice_server.models.lora import AdapterSlots, LowRank
from llmservice_server.types.checkpoint_config import AdapterConfig, read_json_object
from llmservice_server.types.errors import AdapterError, ModelLoadError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = {"F32", "BF16", "F16"}
_VERSION_BYTES = 8


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Implements `AdapterWeights`."""

    version: str
    modules: Mapping[str, LowRank]


class SlotStore:
    """Implements `AdapterStore`: one adapter is read at a time, so that steps are hardly slower meanwhile."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._modules = slots.modules
        self._reader = ThreadPoolExecutor(1, "adapters")

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    def read(self, folder: str) -> Future[ReadAdapter]:
        return self._reader.submit(read_adapter, Path(folder), self._modules, self._slots.max_rank, self._slots.dtype)

    def put(self, slot: int, weights: ReadAdapter) -> None:
        self._slots.put(slot, weights.modules)


def read_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> ReadAdapter:
    """`modules`: those of the model that can be changed, with their outputs and inputs. Raises AdapterError."""
    path = _weight_file(folder)
    try:
        config = AdapterConfig.parse(read_json_object(folder / _CONFIG), _CONFIG)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    _check_config(config, max_rank)
    return ReadAdapter(_version(folder), _read_tensors(path, config, modules, dtype))


def _weight_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder: expected one with {_CONFIG} and {_WEIGHTS}")
    path = folder / _WEIGHTS
    if not path.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        if pickles:
            raise AdapterError(
                f"{folder} holds its weights as a pickle ({pickles[0]}), which can run any code when read: convert it "
                "to safetensors"
            )
        raise AdapterError(f"{folder} holds no {_WEIGHTS}: expected an adapter in PEFT's format")
    return path


def _check_config(config: AdapterConfig, max_rank: int) -> None:
    if config.peft_type != "LORA":
        raise AdapterError(f"{_CONFIG}: peft_type is {config.peft_type}, expected LORA")
    if (rank := config.largest_rank) > max_rank:
        raise AdapterError(f"the adapter's rank is {rank}, expected at most --max-lora-rank {max_rank}: raise it")
    if config.bias != "none" or config.lora_bias:
        raise AdapterError(f"{_CONFIG}: the adapter changes biases, expected bias: none")
    for name in config.changes_more:
        raise AdapterError(f"{_CONFIG}: {name} is set, which is not supported: train the adapter without it")


def _read_tensors(
    path: Path, config: AdapterConfig, modules: Mapping[str, tuple[int, int]], dtype: torch.dtype
) -> dict[str, LowRank]:
    sides: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    places = {place_of(module): module for module in modules}
    try:
        with safe_open(path, framework="pt") as tensors:
            factors = [_factor(name) for name in tensors.keys()]  # noqa: SIM118 - a safetensors handle is no mapping
            _check_targets(config, [each.module for each in factors])
            for name, named, side in _of_text(factors):
                module = places.get(place_of(named)) or _refuse_module(name, named, config, modules)
                rank, (outputs, inputs) = config.rank(named), modules[module]
                expected = [rank, inputs] if side == "A" else [outputs, rank]
                given = tensors.get_slice(name)
                if (found := given.get_shape()[0 if side == "A" else -1]) != rank:
                    raise AdapterError(f"{name} has the rank {found}, {_CONFIG} has {rank}: fetch the adapter again")
                if given.get_shape() != expected:
                    raise AdapterError(
                        f"{name} has the shape {given.get_shape()}, this model and the rank {rank} make it "
                        f"{expected}: {_made_for(config)}"
                    )
                if given.get_dtype() not in _DTYPES:
                    raise AdapterError(f"{name} is {given.get_dtype()}, expected one of {', '.join(sorted(_DTYPES))}")
                tensor = tensors.get_tensor(name)
                if side == "B":
                    tensor = tensor.float() * config.scale(named)
                tensor = tensor.to(dtype)
                if not tensor.isfinite().all():
                    raise AdapterError(f"{name} holds numbers that are not finite in {dtype}: train it again")
                sides[module][side] = tensor
    except SafetensorError as error:
        raise AdapterError(f"{path} is not a readable safetensors file ({error}): fetch it again") from error
    for module, both in sides.items():
        if len(both) < 2:
            raise AdapterError(f"{path.name} holds one of the two factors of {module}: fetch it again")
    if not sides:
        raise AdapterError(f"{path.name} holds no tensors of a language model")
    return {module: LowRank(both["A"], both["B"]) for module, both in sides.items()}


class _Factor(NamedTuple):
    tensor: str
    module: str  # as the adapter names it
    side: str  # A or B


def _factor(name: str) -> _Factor:
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise AdapterError(f"{_WEIGHTS} holds {name}, which is no factor of a linear layer (….lora_A.weight)")
    return _Factor(name, match["module"], match["side"])


def _of_text(factors: Sequence[_Factor]) -> Iterator[_Factor]:
    """Without those of what reads images or sound, which is not served."""
    is_part = any(LANGUAGE_MODEL.match(each.module) for each in factors)
    for each in factors:
        is_text = not is_part or LANGUAGE_MODEL.match(each.module) or is_head(each.module)
        if is_text and not NOT_LOADED.match(each.module):
            yield each


def _refuse_module(name: str, module: str, config: AdapterConfig, modules: Mapping[str, tuple[int, int]]) -> NoReturn:
    kinds = sorted({each.rpartition(".")[2] for each in modules})
    raise AdapterError(
        f"{_WEIGHTS} holds {name}, but this model has no linear layer {module} that adapters can change (it has "
        f"{', '.join(kinds)}): {_made_for(config)}"
    )


def _check_targets(config: AdapterConfig, modules: Sequence[str]) -> None:
    """A name of target_modules that has no tensors shows that the file is not whole."""
    if isinstance(config.target_modules, list):
        for target in config.target_modules:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                raise AdapterError(
                    f"{_CONFIG} names the target {target}, of which {_WEIGHTS} holds nothing: fetch the adapter again"
                )


def _made_for(config: AdapterConfig) -> str:
    base = config.base_model_name_or_path
    return "the adapter is for another model" + (f" ({base})" if base else "")


def _version(folder: Path) -> str:
    digest = blake2b((folder / _CONFIG).read_bytes(), digest_size=_VERSION_BYTES)
    with (folder / _WEIGHTS).open("rb") as file:
        digest.update(file_digest(file, "blake2b").digest())
    return digest.hexdigest()
