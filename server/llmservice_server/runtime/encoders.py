"""Encoders and cross-encoders by transformers' classes: loaded, batched like embeddings, without a KV cache."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from llmservice_planner.model import encoders
from llmservice_planner.model.encoders import CLASSIFIER, ENCODER_BATCH
from llmservice_planner.model.shape import ModelShape
from llmservice_planner.sizing.explanation import format_bytes
from llmservice_planner.sizing.overhead import activation_bytes
from llmservice_server.backend.torch.memory import available_cpu_bytes
from llmservice_server.engine.config import EngineConfig
from llmservice_server.runtime.embeddings import BatchEmbedder
from llmservice_server.runtime.memory import usable_bytes
from llmservice_server.runtime.startup import check_context, choose_device, with_step_tokens
from llmservice_server.runtime.vector_format import VectorFormat, pool
from llmservice_server.runtime.weight_files import weight_files
from llmservice_server.types.checkpoint_config import architectures, as_load_errors, read_json_object
from llmservice_server.types.errors import ConfigError, ModelLoadError, OutOfMemoryError, first_line
from llmservice_server.types.messages import (
    Embedded,
    GenerateRequest,
    LoadAdapter,
    Output,
    Ready,
    Stats,
    StepOutputs,
    Task,
    UnloadAdapter,
)

_LOG = logging.getLogger(__name__)
_WARM_UP_TOKENS = 16
_EMBEDS = ("Model", "ForMaskedLM", "ForPreTraining")
"""What the names of architectures end with whose encoder gives embeddings; heads of pre-training are left out."""


def is_encoder(folder: Path) -> bool:
    """Whether config.json names an encoder family. Raises `ModelLoadError` where it is no JSON object."""
    path = folder / "config.json"
    return path.is_file() and encoders.is_encoder(read_json_object(path))


def encoder_task(named: Sequence[str]) -> Task:
    """Of the architectures' names. Raises `ModelLoadError` where the head computes something else."""
    name = named[0] if named else "Model"
    if name.endswith(CLASSIFIER):
        return "score"
    if name.endswith(_EMBEDS) and not name.endswith("LMHeadModel"):
        return "embed"
    raise ModelLoadError(
        f"config.json: architectures is {name}, expected an encoder for embeddings (BertModel, XLMRobertaModel, "
        f"BertForMaskedLM, …) or a cross-encoder (Bert{CLASSIFIER}, …): choose such a checkpoint"
    )


class EncoderModel:
    """Implements `VectorModel`: pooled states, or the logits of a cross-encoder."""

    def __init__(self, model: Any, vector_format: VectorFormat | None) -> None:
        """`vector_format`: None for a cross-encoder."""
        self._model = model
        self._format = vector_format
        padding = model.config.pad_token_id
        self._has_padding = padding is not None and padding >= 0
        self._padding = padding if self._has_padding else 0
        self._has_token_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1
        self.takes_pairs = vector_format is None

    @property
    def size(self) -> int:
        """Numbers in a vector; 1 for a cross-encoder."""
        return 1 if self._format is None else self._format.size

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        lengths = [len(ids) for ids in inputs]
        given = {"input_ids": self._padded(inputs, self._padding)}
        given["attention_mask"] = self._padded([[1] * length for length in lengths], 0)
        if type_ids and self._has_token_types:
            given["token_type_ids"] = self._padded(type_ids, 0)
        if self._format is None and not self._has_padding and hasattr(self._model, "score"):
            states = pool(self._model.base_model(**given).last_hidden_state, lengths, "last")
            return self._model.score(states.to(self._model.dtype)).float().cpu()  # type: ignore[no-any-return]
        output = self._model(**given)
        if self._format is None:
            logits: torch.Tensor = output.logits.float().cpu()
            return logits
        return self._format.vectors(output.last_hidden_state, lengths).cpu()

    def embed_by_piece(
        self, inputs: Sequence[Sequence[int]], rows: int | None = None, type_ids: Sequence[Sequence[int]] = ()
    ) -> Iterator[torch.Tensor | None]:
        """In one piece: nothing generates beside it."""
        yield self.embed(inputs, type_ids)

    def _padded(self, rows: Sequence[Sequence[int]], padding: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*row, *([padding] * (longest - len(row)))] for row in rows], device=self._model.device)


class EncoderEngine:
    """What the engine process drives for a model that generates nothing: embeddings only."""

    def __init__(self, embedder: BatchEmbedder, ready: Ready) -> None:
        self.embedder = embedder
        self.ready = ready
        self._refused: list[Output] = []

    def wait_s(self) -> float:
        """Seconds until `step` has something to do, unless a message arrives."""
        return 0.0 if self._refused else math.inf

    def add(self, message: GenerateRequest) -> None:
        """Answered with an error: the HTTP process refuses such requests before."""
        problem = "this model is an encoder and generates nothing: use /v1/embeddings or /v1/rerank"
        self._refused.append(
            Output(request_id=message.request_id, finish_reason="error", error=problem, error_status=400)
        )

    def embed(self, step_s: float | None) -> list[Embedded]:
        """Compute a batch, which no step of generating requests bounds."""
        return self.embedder.step(time.monotonic(), None, step_s)

    def change_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Encoders have no adapters, and their servers send none."""

    def abort(self, request_ids: Sequence[str], finished: bool = False) -> None:
        """No request runs for longer than a step."""

    def step(self) -> StepOutputs:
        outputs, self._refused = self._refused, []
        return StepOutputs(outputs=outputs, stats=self.stats())

    def stats(self) -> Stats:
        """Inputs that wait count as waiting requests, by which a service is scaled."""
        return Stats(
            num_running={},
            num_waiting={"interactive": self.embedder.num_waiting},
            blocks_free=0,
            blocks_held=0,
            blocks_cached=0,
            preemptions={},
            prefix_queries=0,
            prefix_hits=0,
            batch_size=0,
            iteration_tokens=0,
            num_admissible=self.ready.max_num_seqs,
        )


def load_encoder(config: EngineConfig) -> EncoderEngine:
    """An encoder that is ready to serve. Raises `StartError` with what is wrong, expected and to be done."""
    if config.max_loras:
        raise ConfigError("max_loras is for models that generate, and this one is an encoder: leave it out")
    began_s = time.monotonic()
    folder, shape = config.model, _shape(config.model)
    longest = _longest(shape, config)
    task = encoder_task(architectures(read_json_object(folder / "config.json")))
    vector_format = VectorFormat.of(folder, config.pooling, shape.hidden_size) if task == "embed" else None
    device = choose_device(config)
    dtype = shape.dtype if config.dtype == "auto" else config.dtype
    batch_tokens = max(longest, with_step_tokens(config, device).step_tokens)
    memory_bytes = _memory_bytes(config, shape, device, dtype, batch_tokens)
    try:
        loaded = _load(folder, task, getattr(torch, dtype)).to(device)
        dense = [] if vector_format is None else [*vector_format.modules.to(device).parameters()]
        memory_bytes["weights"] = sum(each.nbytes for each in (*loaded.parameters(), *dense))
        model = EncoderModel(loaded, vector_format)
        _warm_up(model, longest if device.type == "cuda" else min(_WARM_UP_TOKENS, longest), batch_tokens, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights and a step of {batch_tokens} tokens do not fit into the device's "
            f"{format_bytes(memory_bytes['total'])}: use a smaller model or lower max_num_batched_tokens"
        ) from error
    batch_size = min(config.max_num_seqs or ENCODER_BATCH, batch_tokens)
    embedder = BatchEmbedder(
        model,
        lambda: _recover(device),
        vocab_size=shape.vocab_size,
        max_tokens=longest,
        max_batch_tokens=batch_tokens,
        window_s=config.embedding_window_s,
        max_batch_size=batch_size,
    )
    ready = Ready(
        max_model_len=longest,
        max_num_seqs=batch_size,
        block_size=config.block_size,
        num_blocks=0,
        max_request_tokens=0,
        embedding_size=model.size,
        max_embedding_tokens=longest,
        task=task,
        architecture=type(loaded).__name__,
        model_code="transformers",
        prefix_caching=False,
        memory_bytes=memory_bytes,
        load_s=time.monotonic() - began_s,
    )
    what = "scores of pairs" if vector_format is None else f"embeddings, pooling {vector_format.pooling}"
    weights = format_bytes(memory_bytes["weights"])
    _LOG.info(
        "%s on %s in %s: %s, weights %s, no KV cache, inputs of %d tokens, batches of %d",
        type(loaded).__name__,
        device,
        dtype,
        what,
        weights,
        longest,
        batch_size,
    )
    return EncoderEngine(embedder, ready)


def _shape(folder: Path) -> ModelShape:
    with as_load_errors():
        shape = ModelShape.from_folder(folder)
    if shape.quantization:
        raise ModelLoadError(
            f"config.json: the checkpoint is quantised ({shape.quantization}), expected float32, bfloat16 or float16: "
            "choose the unquantised checkpoint"
        )
    return shape


def _longest(shape: ModelShape, config: EngineConfig) -> int:
    """Tokens of one input."""
    context = shape.max_position_embeddings or 1
    check_context(config, context)
    return config.max_model_len or shape.default_model_len or context


def _memory_bytes(
    config: EngineConfig, shape: ModelShape, device: torch.device, dtype: str, batch_tokens: int
) -> dict[str, int]:
    """By kind, as `Ready` reports it; the activations are the planner's estimate. Raises `OutOfMemoryError`."""
    on_gpu = device.type == "cuda"
    available = torch.cuda.mem_get_info(device)[0] if on_gpu else available_cpu_bytes()
    total, processes = usable_bytes(config, available, shares_memory=not on_gpu)
    weights = sum(file.stat().st_size for file in weight_files(config.model))
    activations = activation_bytes(shape, 1, dtype, batch_tokens)
    needed = weights + activations + processes
    if needed > total:
        raise OutOfMemoryError(
            f"the weights of {format_bytes(weights)} and a step of {batch_tokens} tokens need {format_bytes(needed)}, "
            f"but only {format_bytes(total)} of memory can be used: use a smaller model or more memory"
        )
    return {"weights": weights, "kv_cache": 0, "activations": activations, "graphs": 0, "total": total}


def _load(folder: Path, task: Task, dtype: torch.dtype) -> Any:
    """transformers' model with the checkpoint's weights. Raises `ModelLoadError`."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    from llmservice_server.models.transformers_config import silence_transformers

    silence_transformers()
    only_here = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **only_here)
    except Exception as error:  # the library validates by exceptions of many kinds
        raise ModelLoadError(f"{folder / 'config.json'} cannot be used ({first_line(error)}): correct it") from error
    if task == "score" and config.num_labels != 1:
        raise ModelLoadError(
            f"config.json: the classifier has {config.num_labels} labels, expected 1: a cross-encoder scores a pair of "
            "texts with one number, choose a checkpoint for reranking"
        )
    if getattr(config, "is_decoder", False):
        raise ModelLoadError("config.json: is_decoder is true, expected an encoder: choose another checkpoint")
    kind = AutoModelForSequenceClassification if task == "score" else AutoModel
    try:
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by their names
            output_loading_info=True,
            **only_here,
        )
    except torch.OutOfMemoryError:
        raise
    except SafetensorError as error:
        raise ModelLoadError(
            f"{folder} holds an unreadable safetensors file ({error}): delete it and fetch it again"
        ) from error
    except Exception as error:  # the layers check their sizes by exceptions of many kinds
        raise ModelLoadError(f"{folder} cannot be loaded ({first_line(error)}): fetch it again") from error
    _check_weights(folder, model, info)
    if task == "embed" and hasattr(model, "pooler"):
        model.pooler = None  # its output is not read
    return model.eval()


def _check_weights(folder: Path, model: Any, info: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` where a tensor is missing or has another shape, or the model has no place for it."""
    name, base = type(model).__name__, model.base_model
    unread = "pooler." if base is model else ()  # of embeddings
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(unread))
    parts = {child for child, _ in base.named_children()} - {"pooler"}
    unknown = sorted(key for key in info["unexpected_keys"] if _belongs_to(key, base.base_model_prefix, parts))
    if (info["mismatched_keys"] or missing or unknown) and "auto_map" in read_json_object(folder / "config.json"):
        raise ModelLoadError(
            "config.json: auto_map names code that comes with the checkpoint, which is never executed, and its weights "
            f"are not those of transformers' {name}: choose a checkpoint that needs no code of its own"
        )
    for key, found, expected in sorted(info["mismatched_keys"]):
        raise ModelLoadError(
            f"{folder}: {key} has the shape {list(found)}, config.json makes it {list(expected)}: they do not belong "
            "together, fetch both again"
        )
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} tensors that {name} needs are in none of its safetensors files, among them "
            f"{missing[0]}: fetch it again, or correct config.json"
        )
    if unknown:
        raise ModelLoadError(
            f"{folder} holds {unknown[0]}, which {name} with this config.json has no place for: correct config.json"
        )


def _belongs_to(key: str, prefix: str, parts: set[str]) -> bool:
    """Whether a tensor is part of the encoder itself, not of another head. Buffers of positions are superfluous."""
    return key.removeprefix(f"{prefix}.").partition(".")[0] in parts and not key.endswith("position_ids")


def _warm_up(model: EncoderModel, length: int, batch_tokens: int, device: torch.device) -> None:
    """On a GPU a whole step, which shows at once whether it fits. Raises `ModelLoadError`."""
    rows = max(1, batch_tokens // length) if device.type == "cuda" else 1
    try:
        vectors = model.embed([[0] * length] * rows)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # transformers does not check a config.json as a whole
        raise ModelLoadError(
            f"config.json: the model cannot compute a step ({first_line(error)}): correct it, or choose another model"
        ) from error
    if not torch.isfinite(vectors).all():
        raise ModelLoadError(
            "the model's states are not finite in its first step, so it could answer nothing: look for NaN and "
            "infinity in the checkpoint's weights, or try another --dtype"
        )


def _recover(device: torch.device) -> None:
    """Make the device usable after an exception. Raises RuntimeError where it is lost."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
