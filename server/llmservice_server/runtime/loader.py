"""From a Hugging Face folder to a model with its weights."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from llmservice_planner.model.checkpoint import StoredTensor, has_other_head, read_tensors, stored_dtype
from llmservice_planner.model.encoders import CLASSIFIER, ENCODERS
from llmservice_planner.model.families import FAMILIES
from llmservice_planner.model.quantization import (
    ABSMAX,
    SUFFIXES,
    Quantization,
    QuantizationConfig,
    is_quantized,
    module_and_suffix,
)
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.model.weight_counts import (
    LANGUAGE_MODEL,
    WeightCounts,
    has_head,
    is_linear,
    place_of,
    refuse_embedding,
    refuse_separate_experts,
)
from llmservice_server.backend.base import Model
from llmservice_server.backend.layers import Linear
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.engine.config import Implementation
from llmservice_server.models.architectures import ARCHITECTURES
from llmservice_server.models.config import ModelConfig, is_own
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.models.quantization import read, shape_of
from llmservice_server.models.weights import SUPERFLUOUS, ComputedPlace, QuantizedPlace, StackedPlace, Weights
from llmservice_server.runtime.matrix_form import MatrixForm
from llmservice_server.runtime.parallel_read import THREADS, is_direct, read_into
from llmservice_server.runtime.weight_files import Stored, TensorReader, stored_tensors, weight_files
from llmservice_server.types.checkpoint_config import architectures, as_load_errors, eos_token_ids, read_model_config
from llmservice_server.types.errors import ModelLoadError

if TYPE_CHECKING:
    from llmservice_server.models.transformers_config import TransformersConfig
    from llmservice_server.models.transformers_model import Replaced

_LOG = logging.getLogger(__name__)
_OWN_NAMES = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
_WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.")
"""Names in a checkpoint that was saved for embeddings, without the head and its owner."""
_ZEROS = ("bias", "input_zero_point")
"""Of quantised modules; without effect where all numbers are zero."""
_NUMBER_OF_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")
_LAYER_MATRIX = re.compile(r"model\.layers\.\d+(\.\w+)+\.(\w+_proj|w[123])|lm_head")
_DENSE = {"F64", "F32", "F16", "BF16"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_Modules = Mapping[str, Mapping[str, Stored]]
"""Modules' tensors, by the module's name and by what follows it in theirs."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder whose config has been read, and the headers of its weight files."""

    folder: Path
    config: ModelConfig | TransformersConfig
    shards: tuple[Path, ...]
    tensors: tuple[tuple[str, Stored], ...]
    """Those of the language model, by their names in a checkpoint of it alone, in the files' order."""
    eos_token_ids: frozenset[int]

    @classmethod
    def open(cls, folder: Path, implementation: Implementation = "auto") -> Checkpoint:
        """Raises `ModelLoadError`: no such folder, broken JSON, an architecture that we do not run, a missing shard."""
        if not folder.is_dir():
            raise ModelLoadError(f"{folder} is not a folder: expected one with config.json and *.safetensors")
        raw = read_model_config(folder)
        _refuse_classifier(raw)
        shards = weight_files(folder)
        config: ModelConfig | TransformersConfig
        if implementation == "own" or (implementation == "auto" and is_own(raw)):
            config = ModelConfig.from_dict(raw)
        else:
            from llmservice_server.models.transformers_config import examine  # transformers is imported in seconds

            config = examine(folder)
        stored = stored_tensors(shards)
        without_head = not has_head(each.name for each in stored)
        if without_head and not config.tied_embeddings:
            if _is_for_embeddings(folder, raw):
                config = replace(config, tied_embeddings=True, has_head=False)
            elif _ties_in_text(raw):
                config = replace(config, tied_embeddings=True)
        tensors = tuple((name, each) for each in stored if (name := _name_in_language_model(config, each.name)))
        if config.tied_embeddings and config.has_head and has_other_head(folder):
            _LOG.warning(
                "config.json ties the output head to the embedding (tie_word_embeddings), but the files have a "
                "lm_head.weight that differs from it: it is used, as transformers does"
            )
            config = replace(config, tied_embeddings=False)
        return cls(folder, config, shards, tensors, eos_token_ids(folder))

    def dtype(self, wanted: str) -> torch.dtype:
        """The dtype to run in; `auto` is the checkpoint's own: config.json's, else that of most of its weights.

        Raises `ModelLoadError` for one that is not served, or a file whose header is broken.
        """
        if wanted != "auto":
            return _DTYPES[wanted]
        named = str(self.config.dtype or stored_dtype(self._headers().values())).removeprefix("torch.")
        if named not in _DTYPES:
            raise ModelLoadError(
                f"config.json: dtype is {named!r}, expected one of {', '.join(_DTYPES)}: choose one with --dtype"
            )
        return _DTYPES[named]

    @property
    def weight_file_bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)

    def held_bytes(self, dtype: torch.dtype, quantization: Quantization, *, on_cpu: bool) -> int:
        """The weights in memory, predicted.

        Raises `ModelLoadError` for a file whose header is broken.
        """
        config, name = self.config, str(dtype).removeprefix("torch.")
        with as_load_errors():
            if isinstance(config, ModelConfig):
                shape = ModelShape.from_folder(self.folder, {"tie_word_embeddings": config.tied_embeddings})
                return shape.weights_bytes(name, quantization, on_cpu=on_cpu)
            counts = WeightCounts.of(
                self._headers(),
                config.quantization,
                layers=len(config.windows),
                hidden_size=config.hidden_size,
                tied=config.tied_embeddings,
            )
        return counts.held_bytes(quantization, on_cpu=on_cpu, dtype_bytes=dtype.itemsize)

    def _headers(self) -> dict[str, StoredTensor]:
        with as_load_errors():
            return read_tensors(self.folder)

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "auto",
        keeps: Callable[[QuantizedWeight], bool] = lambda _: False,
        *,
        max_model_len: int | None = None,
    ) -> Model:
        """A model with matrices of this `MatrixForm`, for requests of up to `max_model_len` tokens.

        Raises `ModelLoadError` for a tensor that is missing, unknown, of the wrong shape or format, or unreadable.
        """
        form = MatrixForm(dtype, device, quantization, keeps)
        if isinstance(self.config, ModelConfig):
            return self._load_own(self.config, form)
        return self._load_by_transformers(self.config, form, max_model_len)

    def _load_by_transformers(self, config: TransformersConfig, form: MatrixForm, max_model_len: int | None) -> Model:
        """transformers loads what is dense, and gets tensors without memory in the place of quantised matrices.

        Each of these is read when it is put in its place.
        """
        from llmservice_server.models.transformers_model import TransformersModel, replaced_weights, without_memory

        stored = self._modules(every=False) if config.quantization is not None else {}
        model = without_memory(self.folder) if stored else None
        replaced = [] if model is None else [*replaced_weights(model)]
        places = {} if model is None else _places(model, stored, replaced)
        matrices = _Matrices(config.quantization, stored, TensorReader())

        def quantized_of(modules: Sequence[str], weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
            modules = _as_stored(modules, places)
            is_stored = places.keys() >= {*map(place_of, modules)}
            parts = [matrices.at(places[place_of(each)]) for each in modules] if is_stored else []
            if not parts and (form.quantization != "int8" or not is_linear(modules[0], len(weight))):
                return None  # it stays as it is
            expected = len(weight) // len(modules), weight.shape[1]
            for module, part in zip(modules, parts, strict=False):
                if part.shape != expected:
                    raise ModelLoadError(f"{module} has the shape {[*part.shape]}, config.json makes it {[*expected]}")
            return form.linear(parts or [weight], None if bias is None else bias.to(form.device))

        found = self._for_transformers(places, matrices, replaced, form.dtype) if stored else None
        return TransformersModel.load(self.folder, config, form.dtype, form.device, quantized_of, found, max_model_len)

    def _for_transformers(
        self,
        places: Mapping[str, _Place],
        matrices: _Matrices,
        replaced: Sequence[Replaced],
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """A quantised checkpoint's tensors: those that will be replaced without memory, other matrices dense."""
        found, taken = {}, set[str]()
        for name, shape, modules in replaced:
            places_of = [place_of(module) for parts in modules for module in _as_stored(parts, places)]
            if places.keys() >= {*places_of}:
                found[name] = torch.empty((), dtype=dtype).expand(shape)
                taken.update(places_of)
        whole = {_NUMBER_OF_EXPERT.sub("", place) for place in taken}
        for place in places.keys() - taken:
            name = places[place].module
            if _NUMBER_OF_EXPERT.sub("", place) in whole:
                raise ModelLoadError(f"{self.folder} holds {name}, for which config.json has too few experts")
            found[f"{name}.weight"] = matrices.quantized(name).dequantize(dtype)
        for name, stored in self.tensors:
            module, suffix = module_and_suffix(name)
            if (module in matrices.stored and suffix in SUFFIXES) or SUPERFLUOUS.search(name):
                continue
            tensor = matrices.reader.tensor(stored)
            if module in matrices.stored and suffix == "input_zero_point" and not tensor.float().any():
                continue
            if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                raise ModelLoadError(f"{name} is {tensor.dtype} in one tensor of several matrices: not served")
            found[name] = tensor
        return found

    def _load_own(self, config: ModelConfig, form: MatrixForm) -> DecoderModel:
        found = dict(self.tensors)
        modules = self._modules(every=form.quantization == "int8")
        reader = TensorReader()
        weights = Weights(form.dtype, form.device, modules.keys(), {name: each.shape for name, each in found.items()})
        model = DecoderModel(config, weights, ARCHITECTURES[config.architecture])
        for part in (name for place in weights.places for name in place.parts):
            if part not in modules and (dense := found.get(f"{part}.weight")) is not None:
                modules[part] = {"weight": dense}  # of a fused matrix whose other parts are quantised
        special: list[ComputedPlace | StackedPlace] = [*weights.computed, *weights.stacked]
        computed = {name for place in special for name in place.shapes}
        if computed and form.quantization == "int8":
            raise ModelLoadError(
                f"quantization is int8, which is not for {config.architecture}, whose experts are in one tensor: use "
                "--quantization auto"
            )
        missing = self._fill(weights.tensors, modules.keys(), computed, reader) | (computed - found.keys())
        if missing:
            raise ModelLoadError(
                f"{self.folder}: {len(missing)} tensors that {self.config.architecture} needs are in none of its "
                f"{len(self.shards)} safetensors files, among them {min(missing)}"
            )

        def tensors_of(place: ComputedPlace | StackedPlace) -> list[torch.Tensor]:
            for name, shape in place.shapes.items():
                found[name].check_shape(shape)
            return [reader.tensor(found[name]) for name in place.shapes]

        for computed_place in weights.computed:
            computed_place.fill(*tensors_of(computed_place))
        of_stacks: dict[int, Linear] = {}
        for stacked in weights.stacked:
            linears = form.stack(stacked.linears, stacked.read(*tensors_of(stacked)))
            of_stacks.update(zip(map(id, stacked.linears), linears, strict=True))
        places = {id(place.linear): place for place in weights.places}
        matrices = _Matrices(config.quantization, modules, reader)

        def replaced(linear: Linear) -> Linear:
            if (place := places.get(id(linear))) is None:
                return of_stacks.get(id(linear), linear)
            return form.linear(matrices.parts(place), linear.bias)

        model.map_linears(replaced)
        if form.quantization == "int8" and config.tied_embeddings:
            model.lm_head = form.linear([model.embed_tokens], None)
        weights.finish()
        return model

    def _modules(self, every: bool) -> dict[str, Mapping[str, Stored]]:
        """The modules whose weights are quantised, or `every` matrix of a layer. Raises ModelLoadError."""
        modules: dict[str, dict[str, Stored]] = defaultdict(dict)
        for name, stored in self.tensors:
            module, suffix = module_and_suffix(name)
            if suffix in SUFFIXES:
                modules[module][suffix] = stored
        quantized = {
            module
            for module, tensors in modules.items()
            if is_quantized(tensors) or ("weight" in tensors and tensors["weight"].dtype not in _DENSE)
        }
        with as_load_errors():
            for module in quantized:
                refuse_embedding(module)
            if self.config.architecture == "GptOssForCausalLM":
                refuse_separate_experts(name for name, _ in self.tensors)
        return {
            module: tensors
            for module, tensors in modules.items()
            if module in quantized or (every and _LAYER_MATRIX.fullmatch(module))
        }

    def _fill(
        self,
        wanted: Mapping[str, torch.Tensor],
        besides: Collection[str],
        computed: Collection[str],
        reader: TensorReader,
    ) -> set[str]:
        """Fill these tensors, by name, and return the names of those that no file holds.

        The modules `besides` and the tensors `computed` are read later. Biases of zeros, which AutoGPTQ writes for
        every matrix, are left out where the model has none, as are zeros of symmetric activations.
        """
        missing = {*wanted}
        direct: dict[Path, dict[str, torch.Tensor]] = defaultdict(dict)
        others: list[tuple[torch.Tensor, Stored]] = []
        for name, stored in self.tensors:
            if name in missing:
                missing.remove(name)
                target = wanted[name]
                stored.check_shape(target.shape)
                if is_direct(target, stored.dtype):
                    direct[stored.shard][stored.name] = target
                else:
                    others.append((target, stored))
            elif name not in computed:
                module, suffix = module_and_suffix(name)
                is_zero = suffix in _ZEROS and not reader.tensor(stored).float().any()
                if module not in besides or not (suffix in SUFFIXES or is_zero):
                    self._refuse_unknown(name, stored.shard)
        with ThreadPoolExecutor(THREADS) as readers:
            list(readers.map(lambda each: each[0].copy_(reader.tensor(each[1])), others))
        read_into(direct)
        return missing

    def _refuse_unknown(self, name: str, shard: Path) -> None:
        """Refuse a weight that the model has no place for: its results would be wrong. Some kinds are superfluous."""
        tied_head = name == "lm_head.weight" and isinstance(self.config, ModelConfig) and self.config.tied_embeddings
        if not tied_head and not SUPERFLUOUS.search(name):
            raise ModelLoadError(
                f"{shard.name} holds {name}, which {self.config.architecture} with this config.json has no place for "
                "(or which two files hold)"
            )


class _Place(NamedTuple):
    """The quantised module of a checkpoint that has a matrix of transformers' model."""

    module: str
    outputs: tuple[int, int] | None = None
    """First and end; None: all."""


def _places(model: torch.nn.Module, stored: Iterable[str], replaced: Sequence[Replaced]) -> dict[str, _Place]:
    """Where transformers' `model` has these quantised modules, by `place_of`."""
    from llmservice_server.models.transformers_model import renamed_module

    sizes = {place_of(name): each.shape[0] for each in replaced for modules in each.modules for name in modules}
    places, renamed = {}, renamed_module(model)
    for name in stored:
        modules = renamed(name)
        if len(modules) == 1:
            places[place_of(modules[0])] = _Place(name)
        elif sizes.keys() >= {*map(place_of, modules)}:
            ends = [*accumulate(sizes[place_of(module)] for module in modules)]
            for module, first, end in zip(modules, [0, *ends], ends, strict=False):
                places[place_of(module)] = _Place(name, (first, end))
        else:
            places[place_of(name)] = _Place(name)
    return places


def _as_stored(modules: Sequence[str], places: Mapping[str, _Place]) -> Sequence[str]:
    """The parts of transformers' `gate_up_proj` (Phi-3, GLM) where these are stored, as GPTQModel writes them."""
    name, _, last = modules[0].rpartition(".")
    parts = [f"{name}.gate_proj", f"{name}.up_proj"]
    return parts if last == "gate_up_proj" and places.keys() >= {*map(place_of, parts)} else modules


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Reads the matrices of modules as the checkpoint's `quantization` says."""

    quantization: QuantizationConfig | None
    stored: _Modules
    reader: TensorReader

    def at(self, place: _Place) -> QuantizedWeight:
        """Raises `ModelLoadError`."""
        whole = self.quantized(place.module)
        return whole if place.outputs is None else whole.outputs(*place.outputs)

    def quantized(self, name: str) -> QuantizedWeight:
        """Raises `ModelLoadError`."""
        return self._quantized(name, self.reader.module(self.stored[name]), None)

    def parts(self, place: QuantizedPlace) -> list[QuantizedWeight | torch.Tensor]:
        """Those of a matrix; dense ones in the checkpoint's dtype. Raises `ModelLoadError`."""
        inputs = place.linear.weight.shape[1]
        return [self._part(name, (outputs, inputs)) for name, outputs in place.parts.items()]

    def _part(self, name: str, size: tuple[int, int]) -> QuantizedWeight | torch.Tensor:
        tensors = self.reader.module(self.stored.get(name, {}))
        weight = tensors.get("weight")
        if weight is None or weight.dtype not in _DTYPES.values() or ABSMAX in tensors:
            return self._quantized(name, tensors, size)
        if weight.shape != size:
            raise ModelLoadError(f"{name}.weight has the shape {[*weight.shape]}, config.json makes it {[*size]}")
        return weight

    def _quantized(
        self, name: str, tensors: Mapping[str, torch.Tensor], size: tuple[int, int] | None
    ) -> QuantizedWeight:
        """size: None: as the tensors have it."""
        form = None if self.quantization is None else self.quantization.format_of(name)
        if form is None:
            raise ModelLoadError(
                f"{name} is quantised ({', '.join(sorted(tensors)) or 'it has no tensors'}), which config.json's "
                "quantization_config does not say"
            )
        return read(form, name, tensors, size or shape_of(form, name, tensors))


def _name_in_language_model(config: ModelConfig | TransformersConfig, stored: str) -> str | None:
    """The name of a tensor in a checkpoint of the language model alone.

    None for what other parts of a model with images or sound have, and what predicts further tokens.
    """
    if not isinstance(config, ModelConfig) and config.is_extra(stored):
        return None
    if not isinstance(config, ModelConfig) or not config.is_part:
        return f"model.{stored}" if stored.startswith(_WITHOUT_HEAD) else stored
    if LANGUAGE_MODEL.match(stored):
        name = LANGUAGE_MODEL.sub("", stored).replace("encoder.layers.", "layers.")  # Qianfan-OCR
        return name if name.startswith("lm_head.") else f"model.{name.removeprefix('model.')}"
    return stored if stored.startswith(_OWN_NAMES) else None


def _refuse_classifier(raw: Mapping[str, Any]) -> None:
    """Of a family that `is_encoder` does not know."""
    name = next(iter(architectures(raw)), "")
    if name.endswith(CLASSIFIER):
        raise ModelLoadError(
            f"{name} cannot be served: the server computes the scores of the model types "
            f"{', '.join([*FAMILIES, *ENCODERS])} alone, choose a checkpoint of one of these"
        )


def _ties_in_text(raw: Mapping[str, Any]) -> bool:
    """Whether the language model's config ties the head. The whole's may say otherwise (LLaVA-OneVision)."""
    text = raw.get("text_config")
    return isinstance(text, Mapping) and text.get("tie_word_embeddings") is True


def _is_for_embeddings(folder: Path, raw: Mapping[str, Any]) -> bool:
    """Whether a head that is missing is no damage: the model is named without one, or sentence-transformers' own."""
    bare = any(name.endswith("Model") for name in architectures(raw))
    return bare or (folder / "modules.json").exists() or (folder / "1_Pooling").exists()
