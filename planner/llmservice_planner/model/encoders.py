"""Encoder families: models that read a whole text at once. They have no KV cache and generate nothing.

As in `families.py`, a key missing in config.json means the default of Hugging Face transformers' configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmservice_planner.model.families import find_family

SENTENCES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""What sentence-transformers says of an encoder's inputs: the first file that is there and not empty."""
TOKENIZER = "tokenizer_config.json"
"""Says how long they are where the former do not. All are beside the keys of config.json, under these names."""
MODULES = "modules.json"
"""What a model of sentence-transformers consists of."""
ENCODER_BATCH = 64
"""Inputs that the server computes at once, at most."""


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One `model_type`. The layout is BERT's except for these fields."""

    name: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of config.json's keys, by the common ones."""
    positions_after_padding: bool = False
    """Positions count from the padding token's id + 1 on, so that the model knows fewer than config.json says."""
    learned_positions: bool = True
    token_types: bool = True
    pooler: bool = True
    qkv_bias: bool = True
    output_biases: bool = True
    """Of the attention's output and the MLP, where config.json says nothing of them."""
    norm_biases: bool = True
    gated_mlp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSizes:
    """The figures of one config.json that the parameters are counted from."""

    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    positions: int
    token_types: int
    embedding_size: int | None
    relative_positions: int
    """Entries of the table of relative positions (MPNet)."""


_BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "pad_token_id": 1}
_ALL = (
    EncoderFamily("bert", _BERT),
    EncoderFamily("roberta", {**_ROBERTA, "vocab_size": 50265}, positions_after_padding=True),
    EncoderFamily("xlm-roberta", _ROBERTA, positions_after_padding=True),
    EncoderFamily("camembert", _ROBERTA, positions_after_padding=True),
    EncoderFamily(
        "distilbert",
        {
            "vocab_size": 30522,
            "dim": 768,
            "n_layers": 6,
            "n_heads": 12,
            "hidden_dim": 3072,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
        },
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
        },
        token_types=False,
        pooler=False,
    ),
    EncoderFamily(
        "electra",
        {**_BERT, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        pooler=False,
    ),
    EncoderFamily(
        "mpnet",
        {**_ROBERTA, "vocab_size": 30527, "relative_attention_num_buckets": 32},
        positions_after_padding=True,
        token_types=False,
    ),
    EncoderFamily(
        "modernbert",
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "pad_token_id": 50283,
        },
        learned_positions=False,
        token_types=False,
        pooler=False,
        qkv_bias=False,
        output_biases=False,
        norm_biases=False,
        gated_mlp=True,
    ),
    EncoderFamily(  # as published it has GPT-2's keys, which transformers does not read either: the defaults hold
        "nomic_bert",
        {**_BERT, "vocab_size": 30528, "max_position_embeddings": 2048},
        learned_positions=False,
        pooler=False,
        qkv_bias=False,
        output_biases=False,
        gated_mlp=True,
    ),
    EncoderFamily(
        "gte",
        {
            **_ROBERTA,
            "vocab_size": 250048,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
        },
        learned_positions=False,
        pooler=False,
        gated_mlp=True,
    ),
)

ENCODERS: Mapping[str, EncoderFamily] = {family.name: family for family in _ALL}
"""By `model_type`."""


CLASSIFIER = "ForSequenceClassification"
"""What the names of architectures end with that score a text, or a pair of texts, instead of generating."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is an encoder's, or of a decoder that was trained to embed or to score.

    These are EmbeddingGemma, and rerankers such as Qwen3's; they generate nothing, and need no KV cache.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str):
        return False
    is_bidirectional = model_type == "gemma3_text" and config.get("use_bidirectional_attention") is True
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    scores = str(first).endswith(CLASSIFIER) and find_family(model_type) is not None
    return is_bidirectional or scores or model_type in ENCODERS


def without_config(where: str, modules: object) -> str:
    """Why a checkpoint without config.json is not served. `modules`: its modules.json; None: it has none."""
    if modules is None:
        return f"{where} holds no config.json: expected a checkpoint in Hugging Face's format"
    entries = [each for each in modules if isinstance(each, Mapping)] if isinstance(modules, list) else []
    kinds = [(str(each.get("type")).rpartition(".")[2], each.get("path")) for each in entries]
    named = ", ".join(f"{kind} in {path}" if path else kind for kind, path in kinds)
    return (
        f"{where} holds no config.json: by its {MODULES} it is a model of sentence-transformers "
        f"({named or 'without modules'}), of which only those with a Transformer beside config.json are served, "
        "choose another checkpoint"
    )


def count_parameters(family: EncoderFamily, sizes: EncoderSizes) -> int:
    """All parameters of the encoder and its pooler; a cross-encoder's head is about as large as the pooler."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    biases = family.output_biases
    norm = hidden * (1 + family.norm_biases)
    attention = 4 * hidden * hidden + 3 * hidden * family.qkv_bias + hidden * biases
    mlp = (3 if family.gated_mlp else 2) * hidden * inner + hidden * biases
    mlp += inner * biases * (not family.gated_mlp)
    layers = sizes.layers * (attention + mlp + 2 * norm)  # ModernBERT's first layer lacks one, its output has one
    pooler = (hidden * hidden + hidden) * family.pooler
    return _embeddings(family, sizes) + layers + pooler


def _embeddings(family: EncoderFamily, sizes: EncoderSizes) -> int:
    width = sizes.embedding_size or sizes.hidden_size
    rows = sizes.vocab_size + sizes.positions * family.learned_positions + sizes.token_types * family.token_types
    norm = width * (1 + family.norm_biases)
    projection = (width + 1) * sizes.hidden_size if width != sizes.hidden_size else 0
    return rows * width + norm + projection + sizes.relative_positions
