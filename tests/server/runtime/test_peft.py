"""Adapters as PEFT makes and saves them, in an engine, against PEFT's own logits."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from harness.checkpoints.families import FAMILIES, OTHERS, save
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.config import EngineConfig
from llmservice_server.models.lora import SlotRows
from llmservice_server.models.transformers_model import renamed_module
from llmservice_server.runtime.startup import start
from llmservice_server.types.errors import AdapterError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # PEFT warns of much that is wanted here
LENGTH = 20
PROMPT = torch.randint(193, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
TOLERANCE = 1e-4  # of the row's largest logit
LLAMA = "llama3, grouped heads and its rope scaling"
ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
SETTINGS: dict[str, dict[str, Any]] = {
    "two matrices": {"target_modules": ["q_proj", "v_proj"]},
    "all linear layers": {"target_modules": "all-linear"},
    "the list that is in use everywhere": {"target_modules": [*ATTENTION, *MLP, "c_attn", "query_key_value"]},
    "an expression": {"target_modules": r".*layers\.[01]\..*(q_proj|up_proj)"},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True},
    "ranks of names": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"q_proj": 4, "model.layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "^model.layers.0.mlp.up_proj": 9},
    },
    "ranks of expressions": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {r".*\.q_proj": 4, r"layers\.\d+\.mlp\.(up_proj|down_proj)": 2},
    },
    "ranks of parameters": {
        "target_modules": ["up_proj"],
        "target_parameters": ["q_proj.weight", "o_proj.weight"],
        "rank_pattern": {"q_proj.weight": 4},
        "alpha_pattern": {"q_proj.weight": 3, "o_proj": 5, "up_proj": 9},
    },
    "some layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "without a module": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["up_proj"]},
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}
REFUSED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "changes biases": {"bias": "all"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "init_lora_weights is pissa": {"init_lora_weights": "pissa"},
    "init_lora_weights is olora": {"init_lora_weights": "olora"},
    "embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "rank is 32": {"r": 32},
}
EXPERTS = ("mixtral, sharded", "qwen3-moe", "gpt-oss, sinks and experts with biases", "olmoe", "glm4-moe")
CHOSEN = {
    *("qwen3, qk-norm and explicit head_dim", "gemma3, two kinds of rope", "phi3, fused matrices"),
    *("gpt2, learned positions and transposed matrices", "opt", "cohere2, layers without positions"),
}
LINEAR = {
    "phimoe": ATTENTION,
    "llama4": [*ATTENTION, *MLP],
    "longcat-flash": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
"""Of families of which PEFT cannot compute all linear layers (routers), or the server cannot adapt some (experts)."""
MODELS: dict[Path, PreTrainedModel] = {}
"""Of `base`, by folder."""
ALL_LINEAR = [pytest.param(family, marks=() if family in CHOSEN else pytest.mark.soak) for family in FAMILIES | OTHERS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a small checkpoint of a family."""
    root, folders = tmp_path_factory.mktemp("bases"), {}

    def of(family: str) -> Path:
        if family not in folders:
            folders[family] = root / str(len(folders))
            MODELS[folders[family]] = save((FAMILIES | OTHERS)[family], folders[family])
        return folders[family]

    return of


def write_adapter(base: Path, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """By PEFT, with random factors."""
    from peft import LoraConfig, get_peft_model  # takes seconds

    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 8, "lora_alpha": 16, **settings})
    torch.manual_seed(seed)
    model = get_peft_model(_load(base), config)
    with torch.no_grad():
        for name, factor in model.named_parameters():
            if "lora_" in name:
                factor.copy_(0.3 * torch.randn_like(factor))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


def peft_logits(base: Path, adapter: Path | None) -> torch.Tensor:
    from peft import PeftModel

    model = _load(base)
    with torch.inference_mode():
        adapted = model if adapter is None else PeftModel.from_pretrained(model, adapter).eval()
        return adapted(torch.tensor([PROMPT])).logits[0]


def _load(folder: Path) -> Any:
    """As it was saved: `from_pretrained` leaves Youtu's embedding of padding at zero."""
    return copy.deepcopy(MODELS[folder])


def check(base: Path, adapters: list[Path], served: list[Path] | None = None, **settings: Any) -> None:
    """The base and some adapters in one step have PEFT's logits, and no two of them are the same.

    `served` takes the place of the adapters that PEFT reads.
    """
    config = {"max_loras": len(adapters), "max_lora_rank": 16, "max_model_len": 64, "dtype": "float32"} | settings
    started = start(EngineConfig(model=base, threads=1, **config))
    assert started.adapters is not None
    assert started.runner.adapters is not None
    for slot, adapter in enumerate(served or adapters):
        started.adapters.put(slot, started.adapters.read(str(adapter)).result())
    rows = [SlotRows(slot, slice(LENGTH * (slot + 1), LENGTH * (slot + 2))) for slot in range(len(adapters))]
    blocks = [(0, LENGTH, [2 * number + 1, 2 * number + 2]) for number in range(len(rows) + 1)]
    with torch.inference_mode(), started.runner.adapters.applied(rows):
        step = started.runner.forward(StepInput.of(blocks, PROMPT * len(blocks)), rows)
        logits = started.runner.model.logits(step).view(len(blocks), LENGTH, -1)
    expected = [peft_logits(base, adapter) for adapter in (None, *adapters)]
    for ours, theirs in zip(logits, expected, strict=True):
        assert _difference(ours[:, : theirs.shape[1]], theirs) < TOLERANCE
    assert all(_difference(expected[0], theirs) > 100 * TOLERANCE for theirs in expected[1:])


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).abs().amax(-1) / other.abs().amax(-1)).max())


@pytest.mark.parametrize("implementation", ["own", "transformers"])
def test_base_and_three_adapters_in_one_step_have_pefts_logits(base: Any, tmp_path: Path, implementation: str) -> None:
    targets = {"all": "all-linear", "attention": ATTENTION, "mlp": MLP}
    adapters = [
        write_adapter(base(LLAMA), tmp_path / name, seed, target_modules=modules, r=4 * (seed + 1))
        for seed, (name, modules) in enumerate(targets.items())
    ]
    check(base(LLAMA), adapters, implementation=implementation)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_peft_can_be_set_to_gives_its_logits(base: Any, tmp_path: Path, name: str) -> None:
    check(base(LLAMA), [write_adapter(base(LLAMA), tmp_path, **SETTINGS[name])])


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_more_than_two_factors_is_refused_by_name(base: Any, tmp_path: Path, words: str) -> None:
    adapter = write_adapter(base(LLAMA), tmp_path, **{"target_modules": ["q_proj"], **REFUSED[words]})
    with pytest.raises(AdapterError, match=words):
        check(base(LLAMA), [adapter])


@pytest.mark.parametrize("family", ALL_LINEAR)
def test_all_linear_layers_of_a_family(base: Any, tmp_path: Path, family: str) -> None:
    """They include routers and experts, whose factors want memory of their own."""
    targets = LINEAR.get(family.partition(",")[0], "all-linear")
    adapter = write_adapter(base(family), tmp_path, target_modules=targets)
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        with_experts = any(".experts." in name for name in file.keys())  # noqa: SIM118 - no mapping
    check(base(family), [adapter], lora_experts=with_experts)


@pytest.mark.parametrize(
    "family",
    ["granite-moe", "exaone, names of its own", "sarvam-moe, queries, keys and values in one matrix"],
)
def test_modules_may_have_the_checkpoints_names(base: Any, tmp_path: Path, family: str) -> None:
    """As of adapters that were trained with a model's own code, or with transformers 4."""
    folder = base(family)
    router = {"target_parameters": ["router.weight"]} if family == "granite-moe" else {}
    adapter = write_adapter(folder, tmp_path / "adapter", target_modules=ATTENTION, **router)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = [name.removesuffix(".weight") for name in file.keys()]  # noqa: SIM118 - no mapping
    renamed, path = renamed_module(MODELS[folder]), adapter / "adapter_model.safetensors"
    factors, expected = load_file(path), dict[str, torch.Tensor]()
    for module in stored:
        names = [f"base_model.model.{each}" for each in renamed(module)]
        if f"{names[0]}.lora_A.weight" in factors:
            ups = [factors.pop(f"{name}.lora_B.weight") for name in names]
            down, *_ = (factors.pop(f"{name}.lora_A.weight") for name in names)
            expected |= {f"{name}.lora_A.weight": down for name in names}
            expected |= {f"{name}.lora_B.weight": up for name, up in zip(names, ups, strict=True)}
            factors[f"base_model.model.{module}.lora_A.weight"] = down
            factors[f"base_model.model.{module}.lora_B.weight"] = torch.cat(ups)
    assert factors.keys() != expected.keys()
    save_file({name: factor.clone() for name, factor in expected.items()}, path)
    as_named = shutil.copytree(adapter, tmp_path / "as the checkpoint names them")
    save_file(factors, as_named / "adapter_model.safetensors")
    check(folder, [adapter], served=[as_named])


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_as_peft_saves_them(base: Any, tmp_path: Path, family: str) -> None:
    """For mixtures PEFT makes parameters of names such as up_proj, with twice the rank where two are one tensor."""
    modules = ["q_proj", "w1", "w2", "w3"] if family.startswith("mixtral") else [*ATTENTION, *MLP]
    check(base(family), [write_adapter(base(family), tmp_path, target_modules=modules)], lora_experts=True)
