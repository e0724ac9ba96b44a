"""From a Hugging Face folder to a model with its weights. Only safetensors: unpickling a file can run any code."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from llmservice_planner.checkpoint import (
    INDEX,
    LANGUAGE_MODEL,
    StoredTensor,
    WeightCounts,
    has_head,
    is_linear,
    place_of,
    read_tensors,
    refuse_embedding,
    refuse_separate_experts,
    stored_dtype,
    weight_names,
)
from llmservice_planner.encoders import CLASSIFIER, ENCODERS
from llmservice_planner.families import FAMILIES
from llmservice_planner.quantization import (
    ABSMAX,
    SUFFIXES,
    Quantization,
    QuantizationConfig,
    WeightFormat,
    is_quantized,
    module_and_suffix,
)
from llmservice_planner.shape import ModelShape, ShapeError
from llmservice_server.backend.base import Linear, Model
from llmservice_server.backend.quantized import QuantizedWeight
from llmservice_server.engine.config import Implementation
from llmservice_server.models.architectures import build
from llmservice_server.models.config import ModelConfig, is_own
from llmservice_server.models.decoder import DecoderModel
from llmservice_server.models.quantization import read, shape_of
from llmservice_server.models.weights import SUPERFLUOUS, ComputedPlace, QuantizedPlace, StackedPlace, Weights
from llmservice_server.runtime.matrix_form import MatrixForm
from llmservice_server.runtime.parallel_read import THREADS, is_direct, read_into
from llmservice_server.types.checkpoint_config import eos_token_ids, read_json_object, read_model_config
from llmservice_server.types.errors import ModelLoadError

if TYPE_CHECKING:
    from llmservice_server.models.transformers_config import TransformersConfig

_LOG = logging.getLogger(__name__)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.gguf", "*.onnx", "onnx/*.onnx")
_OWN_NAMES = ("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm.")
_WITHOUT_HEAD = ("embed_tokens.", "layers.", "norm.")
"""Names in a checkpoint that was saved for embeddings, without the head and its owner."""
_ZEROS = ("bias", "input_zero_point")
"""Of quantised modules; without effect where all numbers are zero."""
_HEAD_AND_EMBEDDING = ("lm_head.weight", "model.embed_tokens.weight")
_NUMBER_OF_EXPERT = re.compile(r"(?<=\.experts)\.\d+(?=\.)")
_DENSE = {"F64", "F32", "F16", "BF16"}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Stored(NamedTuple):
    """Where a tensor of a checkpoint is, under which name, and its shape."""

    shard: Path
    name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shard: Path, tensors: Any, name: str) -> _Stored:
        """`tensors`: the file, open."""
        return cls(shard, name, tuple(tensors.get_slice(name).get_shape()))


class _Files:
    """A checkpoint's files, open from their first tensor on: opening one means parsing the names of all its tensors."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def tensor(self, stored: _Stored) -> torch.Tensor:
        """Raises `ModelLoadError` for a file that cannot be read."""
        try:
            if stored.shard not in self._open:
                self._open[stored.shard] = safe_open(stored.shard, framework="pt")
            tensor: torch.Tensor = self._open[stored.shard].get_tensor(stored.name)
        except SafetensorError as error:
            raise _unreadable(stored.shard, error) from error
        return tensor

    def module(self, stored: Mapping[str, _Stored]) -> dict[str, torch.Tensor]:
        """The tensors of a module, by their names after the module's."""
        return {suffix: self.tensor(each) for suffix, each in stored.items()}


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
        raw = read_model_config(folder)
        _refuse_classifier(raw)
        shards = weight_files(folder)
        config: ModelConfig | TransformersConfig
        if implementation == "own" or (implementation == "auto" and is_own(raw)):
            config = ModelConfig.from_dict(raw)
        else:
            from llmservice_server.models.transformers_config import examine  # transformers is imported in seconds

            config = examine(folder)
        if not config.tied_embeddings and _is_for_embeddings(folder, raw) and not has_head(_tensor_names(shards)):
            config = replace(config, tied_embeddings=True, has_head=False)
        checkpoint = cls(folder, config, shards, eos_token_ids(folder))
        if config.tied_embeddings and config.has_head and checkpoint._has_other_head():
            _LOG.warning(
                "config.json ties the output head to the embedding (tie_word_embeddings), but the files have a "
                "lm_head.weight that differs from it: it is used, as transformers does"
            )
            checkpoint = replace(checkpoint, config=replace(config, tied_embeddings=False))
        return checkpoint

    def _has_other_head(self) -> bool:
        """Whether the files have a head of the embedding's shape and with other numbers: some fine-tunes train it."""
        found: dict[str, _Stored] = {}
        for shard in self.shards:
            with _opened(shard) as tensors:
                for stored, name in self._names(tensors):
                    if name in _HEAD_AND_EMBEDDING:
                        found[name] = _Stored.of(shard, tensors, stored)
        if len(found) < len(_HEAD_AND_EMBEDDING):
            return False
        head, embedding = (_Files().tensor(found[name]) for name in _HEAD_AND_EMBEDDING)
        return head.shape == embedding.shape and not torch.equal(head, embedding)

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
        """The weights in memory, predicted; those of our own models that stay dense are as large as their files.

        Raises `ModelLoadError` for a file whose header is broken.
        """
        config, name = self.config, str(dtype).removeprefix("torch.")
        with _shape_errors():
            if isinstance(config, ModelConfig):
                if quantization != "int8" and not config.is_packed:
                    return self.weight_file_bytes
                return ModelShape.from_folder(self.folder).weights_bytes(name, quantization, on_cpu=on_cpu)
            counts = WeightCounts.of(
                self._headers(),
                config.quantization,
                layers=len(config.windows),
                hidden_size=config.hidden_size,
                tied=config.tied_embeddings,
            )
        return counts.held_bytes(quantization, on_cpu=on_cpu, dtype_bytes=dtype.itemsize)

    def _headers(self) -> dict[str, StoredTensor]:
        with _shape_errors():
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
        from llmservice_server.models.transformers_model import TransformersModel, replaced_weights

        stored = self._tensors(every=False)[1] if config.quantization is not None else {}
        names = {place_of(name): name for name in stored}
        files = _Files()

        def is_stored(modules: Sequence[str]) -> bool:
            return names.keys() >= {*map(place_of, modules)}

        def weight_at(place: str) -> QuantizedWeight:
            name = names[place]
            tensors = files.module(stored[name])
            stored_form = self._format(config.quantization, name, tensors)
            return read(stored_form, name, tensors, shape_of(stored_form, name, tensors))

        def quantized_of(modules: Sequence[str], weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
            parts = [weight_at(place_of(module)) for module in modules] if is_stored(modules) else []
            if not parts and (form.quantization != "int8" or not is_linear(modules[0], len(weight))):
                return None  # it stays as it is
            expected = len(weight) // len(modules), weight.shape[1]
            for module, part in zip(modules, parts, strict=False):
                if part.shape != expected:
                    raise ModelLoadError(f"{module} has the shape {[*part.shape]}, config.json makes it {[*expected]}")
            return form.linear(parts or [weight], None if bias is None else bias.to(form.device))

        found: dict[str, torch.Tensor] | None = None
        if stored:
            found, taken = {}, set[str]()
            for tensor, shape, matrices in replaced_weights(self.folder):
                if all(map(is_stored, matrices)):
                    found[tensor] = torch.empty((), dtype=form.dtype).expand(shape)
                    taken.update(place_of(module) for modules in matrices for module in modules)
            whole = {_NUMBER_OF_EXPERT.sub("", place) for place in taken}
            for place in names.keys() - taken:
                if _NUMBER_OF_EXPERT.sub("", place) in whole:
                    raise ModelLoadError(
                        f"{self.folder} holds {names[place]}, for which config.json has too few experts"
                    )
                found[f"{names[place]}.weight"] = weight_at(place).dequantize(form.dtype)
            found |= self._besides(stored.keys())
        return TransformersModel.load(self.folder, config, form.dtype, form.device, quantized_of, found, max_model_len)

    def _besides(self, quantized: Collection[str]) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors but the matrices of modules that are `quantized`, whose biases are among them."""
        found = {}
        for shard in self.shards:
            with _opened(shard) as tensors:
                for name, _ in self._names(tensors):
                    module, suffix = module_and_suffix(name)
                    if (module in quantized and suffix in SUFFIXES) or SUPERFLUOUS.search(name):
                        continue
                    tensor = tensors.get_tensor(name)
                    if module in quantized and suffix == "input_zero_point" and not tensor.float().any():
                        continue
                    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
                        raise ModelLoadError(f"{name} is {tensor.dtype} in one tensor of several matrices: not served")
                    found[name] = tensor
        return found

    def _load_own(self, config: ModelConfig, form: MatrixForm) -> DecoderModel:
        found, modules = self._tensors(every=form.quantization == "int8")
        files = _Files()
        weights = Weights(form.dtype, form.device, modules.keys(), {name: each.shape for name, each in found.items()})
        model, wanted = build(config, weights), weights.tensors
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
        with ThreadPoolExecutor(THREADS) as readers:
            direct = readers.map(lambda shard: self._load_shard(shard, wanted, modules, computed), self.shards)
            read_into(dict(zip(self.shards, direct, strict=True)))
        if missing := wanted.keys() | (computed - found.keys()):
            raise ModelLoadError(
                f"{self.folder}: {len(missing)} tensors that {self.config.architecture} needs are in none of its "
                f"{len(self.shards)} safetensors files, among them {min(missing)}"
            )

        def tensors_of(place: ComputedPlace | StackedPlace) -> list[torch.Tensor]:
            for name, shape in place.shapes.items():
                _check_shape(found[name], shape)
            return [files.tensor(found[name]) for name in place.shapes]

        for computed_place in weights.computed:
            computed_place.fill(*tensors_of(computed_place))
        of_stacks: dict[int, Linear] = {}
        for stacked in weights.stacked:
            linears = form.stack(stacked.linears, stacked.read(*tensors_of(stacked)))
            of_stacks.update(zip(map(id, stacked.linears), linears, strict=True))
        places = {id(place.linear): place for place in weights.places}

        def replaced(linear: Linear) -> Linear:
            if (place := places.get(id(linear))) is None:
                return of_stacks.get(id(linear), linear)
            return form.linear(self._parts(config, place, modules, files), linear.bias)

        model.map_linears(replaced)
        if form.quantization == "int8" and config.tied_embeddings:
            model.lm_head = form.linear([model.embed_tokens], None)
        weights.finish()
        return model

    def _tensors(self, every: bool) -> tuple[dict[str, _Stored], dict[str, dict[str, _Stored]]]:
        """All tensors, by name, and those of the modules whose weights are quantised, or of `every` layer."""
        found: dict[str, _Stored] = {}
        modules: dict[str, dict[str, _Stored]] = defaultdict(dict)
        quantized = set()
        for shard in self.shards:
            with _opened(shard) as tensors:
                for stored, name in self._names(tensors):
                    found[name] = _Stored.of(shard, tensors, stored)
                    module, suffix = module_and_suffix(name)
                    if suffix in SUFFIXES:
                        modules[module][suffix] = found[name]
                        if suffix == "weight" and tensors.get_slice(stored).get_dtype() not in _DENSE:
                            quantized.add(module)
        with _shape_errors():
            for module in (each for each in modules if each in quantized or is_quantized(modules[each])):
                refuse_embedding(module)
            if self.config.architecture == "GptOssForCausalLM":
                refuse_separate_experts(found)
        linear = re.compile(r"model\.layers\.\d+(\.\w+)+\.(\w+_proj|w[123])|lm_head")
        return found, {
            module: tensors
            for module, tensors in modules.items()
            if module in quantized or is_quantized(tensors) or (every and linear.fullmatch(module))
        }

    def _parts(
        self, config: ModelConfig, place: QuantizedPlace, modules: Mapping[str, Mapping[str, _Stored]], files: _Files
    ) -> list[QuantizedWeight | torch.Tensor]:
        """The parts of a matrix: dense ones in the checkpoint's dtype."""
        inputs = place.linear.weight.shape[1]
        weights: list[QuantizedWeight | torch.Tensor] = []
        for name, outputs in place.parts.items():
            tensors = files.module(modules.get(name, {}))
            weight = tensors.get("weight")
            if weight is not None and weight.dtype in _DTYPES.values() and ABSMAX not in tensors:
                if weight.shape != (outputs, inputs):
                    raise ModelLoadError(
                        f"{name}.weight has the shape {list(weight.shape)}, config.json makes it {[outputs, inputs]}"
                    )
                weights.append(weight)
                continue
            weights.append(read(self._format(config.quantization, name, tensors), name, tensors, (outputs, inputs)))
        return weights

    def _format(
        self, quantization: QuantizationConfig | None, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> WeightFormat:
        form = None if quantization is None else quantization.format_of(name)
        if form is None:
            raise ModelLoadError(
                f"{self.folder}: {name} is quantised ({', '.join(sorted(tensors)) or 'it has no tensors'}), which "
                "config.json's quantization_config does not say"
            )
        return form

    def _load_shard(
        self, shard: Path, wanted: dict[str, torch.Tensor], besides: Collection[str], computed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Fill the tensors that `shard` holds, and take them out of `wanted`. Returns those that `read_into` can fill.

        The modules `besides` and the tensors `computed` are read later. Biases of zeros, which AutoGPTQ writes for
        every matrix, are left out where the model has none, as are zeros of symmetric activations.
        """
        direct = {}
        with _opened(shard) as tensors:
            for stored, name in self._names(tensors):
                target = wanted.pop(name, None)
                if name in computed:
                    continue
                if target is None:
                    module, suffix = module_and_suffix(name)
                    is_zero = suffix in _ZEROS and not tensors.get_tensor(stored).float().any()
                    if module not in besides or not (suffix in SUFFIXES or is_zero):
                        self._refuse_unknown(name, shard)
                    continue
                _check_shape(_Stored.of(shard, tensors, stored), target.shape)
                if is_direct(target, tensors.get_slice(stored).get_dtype()):
                    direct[stored] = target
                else:
                    target.copy_(tensors.get_tensor(stored))
        return direct

    def _names(self, tensors: Any) -> Iterator[tuple[str, str]]:
        """Of each tensor in a file, its name there and that in a checkpoint of the language model alone.

        What other parts of a model with images or sound have is left out, and what predicts further tokens.
        """
        for stored in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if not isinstance(self.config, ModelConfig) and self.config.is_extra(stored):
                continue
            if not isinstance(self.config, ModelConfig) or not self.config.is_part:
                yield stored, f"model.{stored}" if stored.startswith(_WITHOUT_HEAD) else stored
            elif LANGUAGE_MODEL.match(stored):
                name = LANGUAGE_MODEL.sub("", stored)
                yield stored, name if name.startswith("lm_head.") else f"model.{name.removeprefix('model.')}"
            elif stored.startswith(_OWN_NAMES):
                yield stored, stored

    def _refuse_unknown(self, name: str, shard: Path) -> None:
        """Refuse a weight that the model has no place for: its results would be wrong. Some kinds are superfluous."""
        tied_head = name == "lm_head.weight" and isinstance(self.config, ModelConfig) and self.config.tied_embeddings
        if not tied_head and not SUPERFLUOUS.search(name):
            raise ModelLoadError(
                f"{shard.name} holds {name}, which {self.config.architecture} with this config.json has no place for "
                "(or which two files hold)"
            )


def _check_shape(stored: _Stored, expected: Sequence[int]) -> None:
    shard, name, shape = stored
    if shape != tuple(expected):
        raise ModelLoadError(f"{shard.name}: {name} has the shape {list(shape)}, config.json makes it {list(expected)}")


@contextmanager
def _shape_errors() -> Iterator[None]:
    """Raises `ModelLoadError` for the planner's errors."""
    try:
        yield
    except ShapeError as error:
        raise ModelLoadError(str(error)) from error


@contextmanager
def _opened(shard: Path) -> Iterator[Any]:
    """Raises `ModelLoadError`, also for a tensor that is read."""
    try:
        with safe_open(shard, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise _unreadable(shard, error) from error


def _unreadable(shard: Path, error: SafetensorError) -> ModelLoadError:
    return ModelLoadError(f"{shard} is not a readable safetensors file ({error}): fetch it again")


def _refuse_classifier(raw: Mapping[str, Any]) -> None:
    """Of a family that `is_encoder` does not know."""
    architectures = raw.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith(CLASSIFIER):
        raise ModelLoadError(
            f"{name} cannot be served: the server computes the scores of the model types "
            f"{', '.join([*FAMILIES, *ENCODERS])} alone, choose a checkpoint of one of these"
        )


def _is_for_embeddings(folder: Path, raw: Mapping[str, Any]) -> bool:
    """Whether a head that is missing is no damage: the model is named without one, or sentence-transformers' own."""
    bare = any(str(name).endswith("Model") for name in raw.get("architectures") or ())
    return bare or (folder / "modules.json").exists() or (folder / "1_Pooling").exists()


def _tensor_names(shards: Sequence[Path]) -> list[str]:
    names: list[str] = []
    for shard in shards:
        with _opened(shard) as tensors:
            names += tensors.keys()
    return names


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Raises `ModelLoadError` where there are no safetensors files, or not all that the index names."""
    if (folder / INDEX).exists():
        weight_map = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ModelLoadError(f"{folder / INDEX} has no weight_map")
        shards = tuple(folder / str(name) for name in sorted(set(weight_map.values())))
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder}: {INDEX} names {len(shards)} files, {', '.join(missing)} missing: fetch it again"
            )
        return shards
    if names := weight_names([file.name for file in folder.glob("*.safetensors")]):
        return tuple(folder / name for name in names)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run any code when read: "
            "convert them to safetensors"
        )
    if others := sorted(path.name for pattern in _OTHERS for path in folder.glob(pattern)):
        raise ModelLoadError(
            f"{folder} holds no *.safetensors file, only {', '.join(others[:3])}, which is not served: choose a "
            "repository of the same model with safetensors"
        )
    raise ModelLoadError(f"{folder} holds no *.safetensors file")
