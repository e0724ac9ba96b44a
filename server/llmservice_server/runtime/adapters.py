"""Reading LoRA adapters in PEFT's format, checked against the model that is to compute with them."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from llmservice_planner.model.checkpoint import LENGTH_BYTES, header_length, parse_header
from llmservice_planner.model.config import ShapeError
from llmservice_planner.model.weight_counts import LANGUAGE_MODEL, NOT_LOADED, is_head, place_of
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_server.models.lora import AdapterSlots, LowRank, PackedAdapter
from llmservice_server.runtime.parallel_read import DTYPES
from llmservice_server.types.checkpoint_config import AdapterConfig, read_json_object
from llmservice_server.types.errors import AdapterError, ModelLoadError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_BASE_LAYER = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.base_layer\.(?P<tensor>weight|bias)")
_ALL_EXPERTS = re.compile(r"(.+\.experts)(?:\.base_layer)?")
_VERSION_BYTES = 8


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Implements `AdapterWeights`."""

    version: str
    packed: PackedAdapter


class SlotStore:
    """Implements `AdapterStore`: one adapter is read at a time, so that steps are hardly slower meanwhile."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        adaptables = slots.adaptables
        self._targets = Targets(
            slots.modules, slots.max_rank, adaptables.alternates, slots.lacking_bytes, adaptables.renamed
        )
        self._reader = ThreadPoolExecutor(1, "adapters")

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    def read(self, folder: str) -> Future[ReadAdapter]:
        return self._reader.submit(self._read, Path(folder))

    def _read(self, folder: Path) -> ReadAdapter:
        version, modules = read_adapter(folder, self._targets, self._slots.dtype)
        return ReadAdapter(version, self._slots.pack(modules))

    def put(self, slot: int, weights: ReadAdapter) -> None:
        self._slots.put(slot, weights.packed)


@dataclass(frozen=True, slots=True)
class Targets:
    """What an adapter may change, and its largest rank."""

    modules: Mapping[str, tuple[int, int]]  # of the model, with their outputs and inputs
    max_rank: int
    alternates: bool = False  # as of `Experts`
    lacking_bytes: int = 0  # as of `AdapterSlots`
    renamed: Callable[[str], list[str]] = lambda module: [module]  # as of `Model`


def read_adapter(folder: Path, targets: Targets, dtype: torch.dtype) -> tuple[str, dict[str, LowRank]]:
    """A hash of what was read, and the factors of each module of the model that it changes. Raises AdapterError."""
    try:
        path = _weight_file(folder)
        if (config_path := folder / _CONFIG).exists() and not config_path.is_file():
            raise AdapterError(f"{config_path} is no file: fetch the adapter again")
        before = _written(folder)
        content = read_json_object(config_path)
        config = AdapterConfig.parse(content, _CONFIG)
        _check_config(config, targets.max_rank)
        with path.open("rb") as file:
            tensors = _Tensors(path, file, json.dumps(content, sort_keys=True).encode())
            modules = _Reader(path, tensors, config, targets, dtype).read()
        if _written(folder) != before:
            raise AdapterError(f"{folder} was changed while it was read: load the adapter again")
    except (ModelLoadError, ShapeError) as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(
            f"{folder} cannot be read ({error.strerror}): correct its path or its permissions"
        ) from error
    return tensors.version, modules


def _written(folder: Path) -> list[tuple[int, int]]:
    """When its files were last written, and their inodes."""
    found = [path.stat() for name in (_CONFIG, _WEIGHTS) if (path := folder / name).exists()]
    return [(each.st_mtime_ns, each.st_ino) for each in found]


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
    if config.changes_base:
        raise AdapterError(
            f"{_CONFIG}: init_lora_weights is {config.init_lora_weights}: such an adapter changes the base's weights "
            "too: save it with path_initial_model_for_weight_conversion"
        )
    for name in config.changes_more:
        raise AdapterError(f"{_CONFIG}: {name} is set, which is not supported: train the adapter without it")


class _Tensors:
    """Those of a safetensors file, which is not mapped: writing to it changes no tensor that was read."""

    def __init__(self, path: Path, file: BufferedReader, config: bytes) -> None:
        """config: what `version` depends on besides. Raises ShapeError and AdapterError."""
        self._path, self._file = path, file
        length = header_length(str(path), file.read(LENGTH_BYTES))
        header = file.read(length)
        self.stored = parse_header(str(path), header, length)
        self._hash = blake2b(config + header, digest_size=_VERSION_BYTES)
        first = self._first = LENGTH_BYTES + length
        begin = first + min((each.begin for each in self.stored.values()), default=0)
        end = first + max((each.begin + each.nbytes for each in self.stored.values()), default=0)
        if (begin, end) != (first, size := file.seek(0, os.SEEK_END)):
            raise self._broken(f"its tensors are at bytes {begin} to {end}, expected {first} to {size}")

    def read(self, name: str) -> torch.Tensor:
        """Raises AdapterError. Only for a shape and a dtype that are expected, so that memory for it is planned."""
        stored = self.stored[name]
        dtype = DTYPES[stored.dtype]
        data = bytearray(stored.elements * dtype.itemsize)
        self._file.seek(self._first + stored.begin)
        if self._file.readinto(data) != stored.nbytes:
            raise self._broken(f"{name} does not have the {len(data)} bytes of its shape")
        self._hash.update(data)
        return torch.frombuffer(data, dtype=dtype).view(stored.shape)

    def shape(self, name: str) -> list[int]:
        return [*self.stored[name].shape]

    @property
    def version(self) -> str:
        """A hash of what was read."""
        return self._hash.hexdigest()

    def _broken(self, problem: str) -> AdapterError:
        return AdapterError(f"{self._path} is no whole safetensors file ({problem}): delete it and fetch it again")


class _Reader:
    """Reads the factors."""

    def __init__(
        self, path: Path, tensors: _Tensors, config: AdapterConfig, targets: Targets, dtype: torch.dtype
    ) -> None:
        self._path = path
        self._tensors = tensors
        self._config = config
        self._targets = targets
        self._dtype = dtype
        self._places = {place_of(module): module for module in targets.modules}

    def read(self) -> dict[str, LowRank]:
        factors = [_factor(name) for name in self._tensors.stored if not self._is_of_base(name)]
        sides: dict[str, dict[str, str]] = defaultdict(dict)
        for each in _of_text(factors):
            sides[each.module][each.side] = each.tensor
        if not sides:
            raise AdapterError(f"{self._path.name} holds no tensors of a language model")
        for named, names in sides.items():
            if not self._modules(named) and not self._stack(named):
                self._refuse(named, next(iter(names.values())))
        read: dict[str, LowRank] = {}
        for named, names in sides.items():
            if len(names) < len("AB"):
                raise AdapterError(f"{self._path.name} holds one of the two factors of {named}: fetch it again")
            if modules := self._modules(named):
                sizes = [self._targets.modules[module] for module in modules]
                outputs = [size[0] for size in sizes]
                changed = self._config.pattern_name(named)
                down, up = self._factors(names, changed, (sum(outputs), sizes[0][1]))
                read.update(zip(modules, (LowRank(down, part) for part in torch.split(up, outputs)), strict=True))
            else:
                read.update(self._of_experts(names, self._stack(named)))
        return read

    def _is_of_base(self, name: str) -> bool:
        """Whether it is the model's own head, of which PEFT adds a copy to the factors. Raises AdapterError."""
        match = _BASE_LAYER.fullmatch(name)
        if match is None or (module := self._module(match["module"])) is None:
            return False
        expected = [*self._targets.modules[module]][: 1 if match["tensor"] == "bias" else 2]
        if (shape := self._tensors.shape(name)) != expected:
            raise AdapterError(f"{name} has the shape {shape}, expected {expected}: {_made_for(self._config)}")
        return True

    def _module(self, named: str) -> str | None:
        """The model's own name of a module that the adapter names."""
        return self._places.get(place_of(named))

    def _modules(self, named: str) -> list[str]:
        """Those of the model that an adapter's module is; several where the model has split it."""
        if (module := self._module(named)) is not None:
            return [module]
        found = [self._module(each) for each in self._targets.renamed(named)]
        return [each for each in found if each is not None] if None not in found else []

    def _stack(self, named: str) -> str:
        """The name of all experts of a layer; empty: it is none."""
        match = _ALL_EXPERTS.fullmatch(named)
        return match[1] if match is not None and self._experts(match[1], "down_proj") else ""

    def _experts(self, experts: str, part: str) -> list[str]:
        """The model's modules of all experts of a layer."""
        modules = (self._module(f"{experts}.{number}.{part}") for number in itertools.count())
        return [module for module in itertools.takewhile(bool, modules) if module is not None]

    def _of_experts(self, names: Mapping[str, str], experts: str) -> Iterator[tuple[str, LowRank]]:
        """Of all experts of a layer, as PEFT stores its `target_parameters`; which of the two, only shapes tell.

        A has the rows of one expert after the other; in B's columns are all experts, for one of the rank's numbers
        after the other.
        """
        downs, gates, ups = (self._experts(experts, part) for part in ("down_proj", "gate_proj", "up_proj"))
        hidden, width = self._targets.modules[downs[0]]
        outputs, inputs = (self._shape(names[side])[at] for side, at in (("B", 0), ("A", 1)))
        if (outputs, inputs) == (2 * width, hidden):
            size, part, halves = (outputs, inputs), "gate_up_proj", [gates, ups]
        else:
            size, part, halves = (hidden, width), "down_proj", [downs]
        down, up = self._factors(names, f"{experts}.{part}", size, len(downs))
        for number, of_expert in enumerate(up.view(size[0], -1, len(downs)).unbind(-1)):
            if len(halves) > 1 and self._targets.alternates:
                parts = [of_expert[::2], of_expert[1::2]]
            else:
                parts = [*of_expert.chunk(len(halves))]
            for modules, rows in zip(halves, parts, strict=True):
                yield modules[number], LowRank(down.view(len(downs), -1, size[1])[number], rows)

    def _factors(
        self, names: Mapping[str, str], named: str, size: tuple[int, int], count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A `[count * rank, in]` and B `[out, count * rank]` times the scale, of a matrix of that size in each expert.

        named: as the adapter's patterns name what they change.
        """
        rank, config = self._config.rank(named), self._config
        read = []
        for side, expected in (("A", [count * rank, size[1]]), ("B", [size[0], count * rank])):
            name = names[side]
            shape = self._shape(name)
            if (found := shape[0 if side == "A" else 1]) != count * rank:
                raise AdapterError(
                    f"{name} has the rank {found // count}, {_CONFIG} has {rank}: fetch the adapter again"
                )
            if shape != expected:
                raise AdapterError(
                    f"{name} has the shape {shape}, this model and the rank {rank} make it {expected}: "
                    f"{_made_for(config)}"
                )
            if (stored := self._tensors.stored[name].dtype) not in DTYPES:
                raise AdapterError(f"{name} is {stored}, expected one of {', '.join(sorted(DTYPES))}")
            tensor = self._tensors.read(name)
            if side == "B":
                tensor = tensor.float() * config.scale(named)
            tensor = tensor.to(self._dtype)
            if not tensor.isfinite().all():
                raise AdapterError(f"{name} holds numbers that are not finite in {self._dtype}: train it again")
            read.append(tensor)
        return read[0], read[1]

    def _shape(self, name: str) -> list[int]:
        if len(shape := self._tensors.shape(name)) != 2:
            raise AdapterError(f"{name} has the shape {shape}, expected rows and columns: fetch the adapter again")
        return shape

    def _refuse(self, module: str, name: str) -> NoReturn:
        if self._targets.lacking_bytes and ".experts" in module:
            raise AdapterError(
                f"{_WEIGHTS} holds {name}, but the slots have no memory for factors of experts: start the server with "
                "--lora-experts (spec.engine.loraExperts), by which each slot takes "
                f"{format_bytes(self._targets.lacking_bytes)} more"
            )
        kinds = sorted({each.rpartition(".")[2] for each in self._targets.modules})
        raise AdapterError(
            f"{_WEIGHTS} holds {name}, but this model has no linear layer {module} that adapters can change (it has "
            f"{', '.join(kinds)}): train without it, unless {_made_for(self._config)}"
        )


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


def _made_for(config: AdapterConfig) -> str:
    base = config.base_model_name_or_path
    return "the adapter is for another model" + (f" ({base})" if base else "")
