"""Adapters in an engine against the same model with merged weights, and those that are refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from harness.checkpoints.families import FAMILIES, OTHERS, Family, save
from harness.checkpoints.quantized import merged, write_expert_adapter, write_gpt_oss
from harness.engine_driver import serve
from llmservice_bench.batch_scheduler import AdmitsAll
from llmservice_planner.model.shape import ModelShape
from llmservice_server.backend.step_input import StepInput
from llmservice_server.engine.config import EngineConfig
from llmservice_server.engine.engine import Engine
from llmservice_server.models.lora import LowRank, SlotRows
from llmservice_server.runtime.adapters import Targets, read_adapter
from llmservice_server.runtime.startup import load_engine, model_runner, start
from llmservice_server.tiny.adapter import write_tiny_adapter
from llmservice_server.tiny.model import TinyModelSpec, write_tiny_model
from llmservice_server.types.errors import AdapterError
from llmservice_server.types.messages import AdapterReport, GenerateRequest, LoadAdapter, SamplingParams, UnloadAdapter

VOCAB = 512
LOGIT_TOLERANCE = 1e-4  # of the row's largest logit
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 8},
    "attention": {"rank": 4, "targets": ("q_proj", "v_proj", "o_proj")},
    "mlp": {"rank": 1, "targets": ("up_proj", "down_proj")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    spec = TinyModelSpec(layers=2, hidden_size=64, heads=4, kv_heads=2, vocab_size=VOCAB, max_position_embeddings=256)
    write_tiny_model(folder / "base", spec)
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        write_tiny_adapter(folder / name, folder / "base", seed=seed, std=0.3, **settings)
    return folder


def adapted_engine(folder: Path, **settings: Any) -> Engine:
    config = {"max_loras": 3, "max_lora_rank": 8} | settings
    engine = load_engine(EngineConfig(model=folder / "base", threads=1, **config))
    for name in ADAPTERS:
        assert load(engine, name, folder / name).error is None
    return engine


def load(engine: Engine, name: str, folder: Path, **settings: Any) -> AdapterReport:
    return change(engine, LoadAdapter(request_id=f"load {name}", name=name, folder=str(folder), **settings))


def change(engine: Engine, message: LoadAdapter | UnloadAdapter) -> AdapterReport:
    engine.change_adapter(message)
    while True:
        for report in engine.step().adapters:
            if report.request_id == message.request_id:
                return report


def request(name: str, prompt: list[int], adapter: str | None, max_tokens: int = 12) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0, adapter=adapter)


def prompt_of(length: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def is_greedy(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(dim=-1).tolist() == answer


@pytest.mark.parametrize("crowded", [False, True])
def test_answers_are_those_of_the_merged_models(folder: Path, crowded: bool) -> None:
    settings: dict[str, Any] = {"prefill_chunk_tokens": 11, "max_num_batched_tokens": 32}
    if crowded:
        settings |= {"kv_cache_memory_bytes": 14 * 2 * 2 * 16 * 2 * 16 * 4, "max_model_len": 160, "max_num_seqs": 6}
    engine = adapted_engine(folder, **settings)
    if crowded:
        engine.scheduler.admission = AdmitsAll(engine.pool.groups, 1)
    shared = prompt_of(40)
    prompts = {
        f"{name} {number}": (shared + prompt_of(3 + number), name) for name in (None, *ADAPTERS) for number in range(4)
    }
    answers = serve(engine, [request(key, prompt, name, 40) for key, (prompt, name) in prompts.items()])
    models = {name: merged(folder / "base", folder / name if name else None) for name in (None, *ADAPTERS)}
    for key, (prompt, name) in prompts.items():
        assert is_greedy(models[name], prompt, answers[key]), key
    slots, shape = model_runner(engine).adapters, ModelShape.from_folder(folder / "base")
    assert slots is not None
    assert slots.nbytes == 3 * shape.adapter_slot_bytes(8, "float32")  # as planned
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert (sum(stats.preemptions.values()) > 0) is crowded
    assert stats.blocks_held == 0


def test_a_prefix_is_shared_within_an_adapter_only(folder: Path) -> None:
    engine = adapted_engine(folder)
    prompt, hits = prompt_of(64), []
    for number, name in enumerate([None, "all", "mlp", "all", None]):
        before = engine.stats().prefix_hits
        serve(engine, [request(str(number), prompt, name)])
        hits.append(engine.stats().prefix_hits - before)
    assert [each > 0 for each in hits] == [False, False, False, True, True]


def test_a_new_version_answers_by_its_own_weights(folder: Path, tmp_path: Path) -> None:
    engine = adapted_engine(folder)
    before = load(engine, "all", folder / "all").adapters
    prompt = prompt_of(64)
    old = serve(engine, [request("old", prompt, "all")])["old"]
    assert is_greedy(merged(folder / "base", folder / "all"), prompt, old)
    report = load(engine, "all", folder / "attention")
    assert {each.name for each in report.adapters} == set(ADAPTERS)
    assert {each.version for each in report.adapters} != {each.version for each in before}
    new = serve(engine, [request("new", prompt, "all")])["new"]
    assert is_greedy(merged(folder / "base", folder / "attention"), prompt, new)


def test_with_one_slot_adapters_take_turns(folder: Path) -> None:
    engine = adapted_engine(folder, max_loras=1)
    prompt = prompt_of(30)
    names = [*ADAPTERS] * 3
    answers = serve(engine, [request(f"{name} {number}", prompt, name) for number, name in enumerate(names)])
    for number, name in enumerate(names):
        assert is_greedy(merged(folder / "base", folder / name if name else None), prompt, answers[f"{name} {number}"])


def test_an_adapter_unloaded_in_use_computes_to_the_end(folder: Path) -> None:
    engine = adapted_engine(folder)
    prompt = prompt_of(30)
    expected = serve(engine, [request("alone", prompt, "all", 20)])["alone"]
    engine.add(request("running", prompt, "all", 20))
    tokens = [token for _ in range(3) for output in engine.step().outputs for token in output.token_ids]
    engine.change_adapter(UnloadAdapter(request_id="unload", name="all"))
    engine.add(request("late", prompt, "all"))
    late = None
    while engine.has_work:
        for output in engine.step().outputs:
            if output.request_id == "running":
                tokens += output.token_ids
            else:
                late = output.error, output.error_status
    assert late == ("the adapter all is not loaded", 404)
    assert tokens == expected


@pytest.mark.parametrize(("loss", "status"), [("unloaded", 404), ("deleted", 500)])
def test_a_request_that_waits_for_a_lost_adapter_is_refused(
    folder: Path, tmp_path: Path, loss: str, status: int
) -> None:
    engine = adapted_engine(folder, max_loras=1)
    write_tiny_adapter(tmp_path / "lost", folder / "base", rank=4)
    load(engine, "lost", tmp_path / "lost")
    load(engine, "all", folder / "all")
    engine.add(request("running", prompt_of(30), "all", 20))
    engine.step()
    engine.add(request("waiting", prompt_of(30), "lost"))
    engine.step()
    if loss == "unloaded":
        engine.change_adapter(UnloadAdapter(request_id="unload", name="lost"))
    else:
        shutil.rmtree(tmp_path / "lost")
    ended = {}
    while engine.has_work:
        ended |= {output.request_id: output.error_status for output in engine.step().outputs if output.error}
    assert ended == {"waiting": status}


def test_a_pinned_adapter_is_never_evicted(folder: Path) -> None:
    engine = load_engine(EngineConfig(model=folder / "base", threads=1, max_loras=2, max_lora_rank=8))
    load(engine, "all", folder / "all", pinned=True)
    load(engine, "mlp", folder / "mlp")
    report = load(engine, "attention", folder / "attention")
    assert {each.name: each.state for each in report.adapters} == {
        "all": "loaded",
        "mlp": "evicted",
        "attention": "loaded",
    }
    assert "leave no slot of 2" in str(load(engine, "attention", folder / "attention", pinned=True).error)


def test_ranks_and_scales_by_name_are_those_of_peft(folder: Path, tmp_path: Path) -> None:
    """The first expression that is the end of a module's name counts; one with a circumflex is of a whole name."""
    write_tiny_adapter(tmp_path, folder / "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks, scales = {r"[0-9]\..*q_proj": 4, "(down|up)_proj": 3}, {"^model.layers.1.mlp.up_proj": 9.0, "^up_proj": 5.0}
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(config | {"r": 8, "rank_pattern": ranks, "alpha_pattern": scales})
    )
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    expected = {}
    for name in [name for name in tensors if "lora_A" in name]:
        rank = 4 if "q_proj" in name else 3 if "up_proj" in name or "down_proj" in name else 8
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[name][:rank].clone(), tensors[other][:, :rank].clone()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        expected[module] = tensors[other] * ((9.0 if "1.mlp.up_proj" in name else 16.0) / rank)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    engine = load_engine(EngineConfig(model=folder / "base", threads=1, max_loras=1, max_lora_rank=8))
    slots = model_runner(engine).adapters
    assert slots is not None
    _, read = read_adapter(tmp_path, Targets(slots.modules, 8), torch.float32)
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[module].up, up) for module, up in expected.items())
    assert load(engine, "by name", tmp_path).error is None


@pytest.mark.parametrize(
    "family",
    [
        "mixtral, sharded",
        "qwen3-moe",
        "gpt-oss, sinks and experts with biases",
        "gpt-oss in mxfp4",
        "olmoe",
        "glm4-moe",
    ],
)
def test_adapters_of_experts_are_as_merged(tmp_path: Path, family: str) -> None:
    if family == "gpt-oss in mxfp4":
        folder, exact = write_gpt_oss(tmp_path)
        base = merged(exact, None)
    else:
        folder = tmp_path / "base"
        base = save((FAMILIES | OTHERS)[family], folder)
    models = [base]
    for rank, name in ((4, "stacked"), (8, "each")):
        models.append(write_expert_adapter(tmp_path / name, base, stacked=name == "stacked", rank=rank))
    settings = {"max_loras": 2, "max_lora_rank": 8, "max_model_len": 64, "dtype": "float32"}
    started = start(EngineConfig(model=folder, threads=1, lora_experts=True, **settings))
    assert started.adapters is not None
    runner, prompt = started.runner, prompt_of(20, 193)
    for slot, name in enumerate(("stacked", "each")):
        started.adapters.put(slot, started.adapters.read(str(tmp_path / name)).result())
    rows = [SlotRows(slot, slice(20 * (slot + 1), 20 * (slot + 2))) for slot in range(2)]
    step = StepInput.of([(0, 20, [2 * number + 1, 2 * number + 2]) for number in range(3)], prompt * 3)
    with torch.inference_mode():
        hidden = runner.forward(step, rows)
        logits = runner.model.logits(hidden).view(3, 20, -1)
        for model, ours in zip(models, logits, strict=True):
            expected = model(torch.tensor([prompt])).logits[0]
            assert float(((ours - expected).abs().amax(-1) / expected.abs().amax(-1)).max()) < LOGIT_TOLERANCE
    without = load_engine(EngineConfig(model=folder, threads=1, **settings))
    for name in ("stacked", "each"):
        message = str(load(without, name, tmp_path / name).error)
        assert "start the server with --lora-experts (spec.engine.loraExperts), by which each slot takes" in message


HUNYUAN = Family("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "pad_token_id": 0})


@pytest.mark.parametrize(
    ("family", "part", "dtype"),
    [
        (OTHERS["glm-4.7-flash, latent attention"], "kv_b_proj", "float32"),
        (OTHERS["olmoe"], "mlp.gate", "float32"),
        (HUNYUAN, "mlp.gate.wg", "bfloat16"),  # these stay in float32
    ],
)
@torch.inference_mode()
def test_what_transformers_multiplies_with_is_changed_by_row_as_by_range(
    tmp_path: Path, family: Family, part: str, dtype: str
) -> None:
    save(family, tmp_path)
    settings = {"max_loras": 3, "max_lora_rank": 4, "max_model_len": 64, "dtype": dtype}
    runner = start(EngineConfig(model=tmp_path, threads=1, **settings)).runner
    slots = runner.adapters
    assert slots is not None
    random = torch.Generator().manual_seed(0)
    for slot, rank in ((0, 4), (2, 3)):
        sizes = {name: size for name, size in slots.modules.items() if name.endswith(part)}
        factors = {
            name: LowRank(*(torch.randn(*size, generator=random) for size in ((rank, inputs), (outputs, rank))))
            for name, (outputs, inputs) in sizes.items()
        }
        slots.put(slot, slots.pack(factors))
    step = StepInput.of([(0, 20, [2 * number + 1, 2 * number + 2]) for number in range(3)], prompt_of(20, 193) * 3)
    base = runner.forward(step).view(3, 20, -1)
    by_range = runner.forward(step, [SlotRows(0, slice(20, 40)), SlotRows(2, slice(40, 60))]).view(3, 20, -1)
    with slots.by_row(torch.tensor([-1, 0, 2], dtype=torch.int32).repeat_interleave(20)):
        by_row = runner.forward(step).view(3, 20, -1)
    torch.testing.assert_close(by_row, by_range, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(by_range[0], base[0])
    assert all(not torch.allclose(changed, base[0], rtol=0.01) for changed in by_range[1:])


Tensors = dict[str, torch.Tensor]
DOWN = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def _replace(tensors: Tensors, tensor: torch.Tensor) -> None:
    tensors[DOWN] = tensor


def test_a_copy_of_the_base_s_head_is_left_out(folder: Path, tmp_path: Path) -> None:
    """PEFT adds it where the head is a target."""
    write_tiny_adapter(tmp_path, folder / "base", targets=("lm_head",))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for rows, message in ((VOCAB, "None"), (VOCAB + 1, "lm_head.base_layer.weight has the shape [513, 64], expected")):
        head = {"base_model.model.lm_head.base_layer.weight": torch.zeros(rows, 64)}
        bias = {"base_model.model.lm_head.base_layer.bias": torch.zeros(VOCAB)}  # of Phi's
        save_file(tensors | head | bias, tmp_path / "adapter_model.safetensors")
        assert message in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    ("message", "config", "change_tensors"),
    [
        ("the adapter's rank is 16, expected at most --max-lora-rank 8: raise it", {"r": 16}, None),
        ("lora_A.weight has the rank 8, adapter_config.json has 4", {"r": 4}, None),
        ("use_dora is set, which is not supported", {"use_dora": True}, None),
        ("alora_invocation_tokens is set, which is not supported", {"alora_invocation_tokens": [1]}, None),
        ("use_bdlora is set, which is not supported", {"use_bdlora": {"nblocks": 2}}, None),
        ("kasa_config is set, which is not supported", {"kasa_config": {"beta": 0.1}}, None),
        ("pissa_niter_4: such an adapter changes the base's", {"init_lora_weights": "pissa_niter_4"}, None),
        ("olora: such an adapter changes the base's", {"init_lora_weights": "olora"}, None),
        ("loftq: such an adapter changes the base's", {"init_lora_weights": "loftq"}, None),
        ("rank is 64, expected at most --max-lora-rank 8", {"rank_pattern": {"q_proj": 64}}, None),
        ("rank_pattern is {'(q+)+': 4}, expected names of modules", {"rank_pattern": {"(q+)+": 4}}, None),
        ("[0-9]+ or (a|b), not .*.*.*.*.*q", {"alpha_pattern": {5 * ".*" + "q": 4}}, None),
        ("[0-9]+ or (a|b), not [9-0]", {"alpha_pattern": {"[9-0]": 4}}, None),
        ("the adapter changes biases, expected bias: none", {"bias": "all"}, None),
        ("peft_type is IA3, expected LORA", {"peft_type": "IA3"}, None),
        ("adapter_config.json: r is 'eight', expected a valid integer", {"r": "eight"}, None),
        (
            "has the shape [8, 96], this model and the rank 8 make it [8, 176]: the adapter is for another model",
            {},
            lambda tensors: _replace(tensors, torch.zeros(8, 96)),
        ),
        (
            "has the shape [8], expected rows and columns: fetch the adapter again",
            {},
            lambda tensors: _replace(tensors, torch.zeros(8)),
        ),
        (
            (
                "has no linear layer model.layers.9.mlp.down_proj that adapters can change (it has down_proj, "
                "gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj): train without it, unless the adapter"
            ),
            {},
            lambda tensors: tensors.update({DOWN.replace("0", "9"): tensors.pop(DOWN)}),
        ),
        ("holds one of the two factors of model.layers.0.mlp.down_proj", {}, lambda tensors: tensors.pop(DOWN)),
        ("is I8, expected one of BF16, F16, F32", {}, lambda tensors: _replace(tensors, tensors[DOWN].to(torch.int8))),
        ("holds numbers that are not finite", {}, lambda tensors: tensors[DOWN].fill_(float("nan"))),
        (
            "which is no factor of a linear layer",
            {},
            lambda tensors: tensors.update({"head.weight": tensors.pop(DOWN)}),
        ),
    ],
)
def test_bad_adapters_are_refused(
    folder: Path,
    tmp_path: Path,
    message: str,
    config: dict[str, Any],
    change_tensors: Callable[[Tensors], object] | None,
) -> None:
    write_tiny_adapter(tmp_path, folder / "base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change_tensors is not None:
        tensors = load_file(tmp_path / "adapter_model.safetensors")
        change_tensors(tensors)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert message in refusal(folder, tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"target_modules": ["q_proj", "query_key_value"]},  # a usual list, for models of several families
        {"target_parameters": ["gate_up_proj"], "exclude_modules": ["mlp"]},
    ],
)
def test_settings_that_decide_nothing_after_training_are_accepted(
    folder: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    write_tiny_adapter(tmp_path, folder / "base")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    assert refusal(folder, tmp_path) == "None"


def refusal(folder: Path, adapter: Path) -> str:
    engine = load_engine(EngineConfig(model=folder / "base", threads=1, max_loras=1, max_lora_rank=8))
    return str(load(engine, "bad", adapter).error)


def test_a_truncated_file_is_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_adapter(tmp_path, folder / "base")
    path = tmp_path / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "adapter_model.safetensors is no whole safetensors file (its tensors are at bytes" in refusal(
        folder, tmp_path
    )
    path.write_bytes(whole[:100])
    assert "adapter_model.safetensors is no safetensors file (its header should have" in refusal(folder, tmp_path)


class Listening(dict[str, tuple[int, int]]):
    """Modules of a model that call `asked` when one is looked up, in the midst of reading."""

    asked: Callable[[], object] = staticmethod(lambda: None)

    def __getitem__(self, name: str) -> tuple[int, int]:
        self.asked()
        return super().__getitem__(name)


def test_an_adapter_is_what_was_read_when_its_files_are_overwritten(folder: Path, tmp_path: Path) -> None:
    """In place, as cp does it."""
    write_tiny_adapter(tmp_path, folder / "base", targets=("q_proj", "v_proj"))
    path = tmp_path / "adapter_model.safetensors"
    whole = path.read_bytes()
    tensors = load_tensors(whole)
    rows = {name: len(tensor) for name, tensor in tensors.items() if "lora_B" in name}
    modules = Listening(
        {name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"): (rows[name], 64) for name in rows}
    )
    targets = Targets(modules, 8)
    version, read = read_adapter(tmp_path, targets, torch.float32)
    path.write_bytes(bytes(len(whole)))
    assert all(torch.equal(read[name].down, tensors[f"base_model.model.{name}.lora_A.weight"]) for name in modules)
    path.write_bytes(whole)
    assert read_adapter(tmp_path, targets, torch.float32)[0] == version
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert read_adapter(tmp_path, targets, torch.float32)[0] != version
    modules.asked = lambda: os.utime(path, (1, 1))
    with pytest.raises(AdapterError, match="was changed while it was read: load the adapter again"):
        read_adapter(tmp_path, targets, torch.float32)


def test_a_pickle_is_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_adapter(tmp_path, folder / "base")
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "as a pickle (adapter_model.bin), which can run any code when read" in refusal(folder, tmp_path)


def test_a_missing_folder_or_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is not a folder"):
        read_adapter(tmp_path / "none", Targets({}, 8), torch.float32)
    write_tiny_adapter(tmp_path, folder / "base")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match=r"adapter_config.json is missing"):
        read_adapter(tmp_path, Targets({}, 8), torch.float32)
    os.mkfifo(tmp_path / "adapter_config.json")  # opening it waits for a writer
    with pytest.raises(AdapterError, match=r"adapter_config.json is no file"):
        read_adapter(tmp_path, Targets({}, 8), torch.float32)


def test_without_slots_every_adapter_is_refused(folder: Path) -> None:
    engine = load_engine(EngineConfig(model=folder / "base", threads=1))
    assert "start it with --max-loras" in str(load(engine, "all", folder / "all").error)
