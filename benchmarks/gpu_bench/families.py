"""Every model family, quantised format, and adapters on the GPU: tokens compared with transformers on the CPU.

The checkpoints are small and random.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from gpu_bench.bench import Bench
from gpu_bench.sections import Findings
from llmservice_bench.results import Check
from llmservice_server.backend import choice
from llmservice_server.backend.cuda.kernels.jit import INTERPRETED
from llmservice_server.engine.config import EngineConfig, Implementation
from llmservice_server.engine.engine import Engine
from llmservice_server.runtime.startup import load_engine, model_runner
from llmservice_server.types.messages import GenerateRequest, LoadAdapter, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CASES_PER_PROCESS = 4
"""So that a lost CUDA context takes few others with it."""
_MOST_PROCESSES = 16


_LARGER = {  # for formats with groups of 128 inputs
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 128,
}  # fmt: skip
_MIXTURES: dict[str, Implementation] = {"qwen3-moe": "own", "olmoe": "transformers"}
_OF_MIXTURES = ("W4A16", "gptq, with zeros", "fp8 blocks")
_ROUNDED = ("fp8 dynamic", "fp8 static", "fp8, one scale", "fp8 blocks")
_ADAPTERS = ("", "one", "two", "three")  # the first: none
_SHORTFALL = 1e-3
"""Of the logit of a token that was chosen, against the largest, relative to the largest absolute one."""


@dataclass(frozen=True, slots=True)
class Case:
    """A family of `harness.checkpoints.families`, or a checkpoint of a format, as it is served."""

    name: str
    implementation: Implementation
    dtype: Literal["float32", "bfloat16"]
    settings: Mapping[str, Any]
    """Of the device."""
    prompts: tuple[int, ...]  # tokens
    output_tokens: int
    form: str | None = None  # of `harness.checkpoints.quantized`, "mxfp4", "adapters", or "adapters of experts"


def families(bench: Bench) -> Findings:
    """Each family in float32, whose tokens must be those of transformers; those with a model of our own in bfloat16."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from harness.checkpoints.families import FAMILIES, OTHERS

    known = [name for name, family in OTHERS.items() if family.model_type in CONFIG_MAPPING]  # to this transformers
    ways: list[tuple[str, Implementation]] = [(name, "own") for name in FAMILIES]
    ways += [(name, "transformers") for name in known]
    others = _others(bench)
    cases = [Case(name, code, "float32", *others) for name, code in ways]
    cases += [Case(name, code, "bfloat16", *others) for name, code in ways if code == "own"]
    cases = cases[: bench.sizes.num_families]
    rows = _computed(bench, cases)
    different = sum(row["dtype"] == "float32" and row.get("different tokens", 1) > 0 for row in rows)
    return Findings(
        rows, [*_checks("families", cases, rows), Check("families whose float32 tokens differ", "= 0", different)]
    )


def formats(bench: Bench) -> Findings:
    """Quantised models of our own and of transformers' code, and a model with adapters.

    In float32 tokens are compared with those of the dense model of the same weights. In bfloat16 the activations of fp8
    are rounded, which that model does not, so those figures have no bound.
    """
    from harness.checkpoints.quantized import FORMATS

    others = _others(bench)
    cases = [Case("qwen2", "own", "float32", *others, name) for name in FORMATS]
    cases += [Case("qwen2", "transformers", "float32", *others, name) for name in _OF_MIXTURES]
    cases += [Case(name, code, "float32", *others, form) for name, code in _MIXTURES.items() for form in _OF_MIXTURES]
    cases += [Case("gpt-oss", "own", "float32", *others, "mxfp4")]
    cases += [Case("qwen2", code, "float32", *others, "adapters") for code in ("own", "transformers")]
    cases += [Case(name, code, "float32", *others, "adapters of experts") for name, code in _MIXTURES.items()]
    cases += [Case("qwen2", "own", "bfloat16", *others, name) for name in _ROUNDED]
    if bench.sizes.num_families is not None:
        cases = [case for case in cases if case.form in ("awq", "adapters")][: 1 + bench.sizes.num_families]
    rows = _computed(bench, cases)
    short = max((row["shortfall"] for row in rows if row["dtype"] == "float32" and "shortfall" in row), default=1.0)
    what = "largest shortfall of a float32 token's logit with quantised weights or adapters"
    return Findings(rows, [*_checks("formats", cases, rows), Check(what, f"<= {_SHORTFALL}", short)])


def _others(bench: Bench) -> tuple[Mapping[str, Any], tuple[int, ...], int]:
    """A case's settings, prompts and number of tokens."""
    sizes = bench.sizes
    settings = {**bench.gpu.settings, "max_num_batched_tokens": min(64, sizes.max_num_batched_tokens)}
    return settings, sizes.family_prompts, sizes.family_tokens


def _checks(what: str, cases: Sequence[Case], rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    return [
        Check(f"{what} computed in time", f"= {len(cases)}", len(rows)),
        Check(f"{what} that fail", "= 0", sum("error" in row for row in rows)),
        Check(f"{what} that need a fallback", "= 0", sum(bool(row.get("fallbacks")) for row in rows)),
    ]


def _computed(bench: Bench, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The rows of the cases that are computed in time, by several processes."""
    bench.clear()
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1, -(-len(cases) // _CASES_PER_PROCESS))
    rows: list[dict[str, Any]] = []
    ends_s = time.monotonic() + bench.sizes.families_s
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=_CASES_PER_PROCESS) as pool:
        results = pool.imap_unordered(_row, cases)
        while len(rows) < len(cases):
            try:
                rows.append(results.next(max(0.0, ends_s - time.monotonic())))
            except multiprocessing.TimeoutError:  # also if a process has died with its case
                break
    return rows


def _row(case: Case) -> dict[str, Any]:
    started_s = time.perf_counter()
    row = {"part": "family", "family": case.name, "code": case.implementation, "dtype": case.dtype}
    row |= {"format": case.form} if case.form else {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            row |= _compared(case, Path(folder))
    except Exception as error:  # the other families must run nevertheless
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    return row | {"s": time.perf_counter() - started_s}


def _compared(case: Case, folder: Path) -> dict[str, Any]:
    if INTERPRETED:
        import harness.gpu.triton_interpreter  # noqa: F401 - twice as fast as Triton's own

    torch.set_num_threads(1)
    choice.in_child = _here  # another process would import torch for each case
    served, references = _written(case, folder)
    slots = {"max_loras": len(references) - 1, "max_lora_rank": 8, "lora_experts": "experts" in str(case.form)}
    config = EngineConfig(
        model=served,
        implementation=case.implementation,
        dtype=case.dtype,
        max_num_seqs=8,
        max_model_len=256,
        prefill_chunk_tokens=19,
        **{**case.settings, "kv_cache_memory_bytes": 64 << 20, **(slots if len(references) > 1 else {})},
    )
    engine = load_engine(config)
    for name in references:
        if name:
            _load_adapter(engine, name, folder / name)
    vocab_size = next(iter(references.values())).config.vocab_size
    requests = {
        f"{length} {name}": (name, _prompt(length, vocab_size)) for length in case.prompts for name in references
    }
    answers, different, shortfall = _serve(engine, requests, case.output_tokens), 0, 0.0
    for request_id, (name, prompt) in requests.items():
        answer = torch.tensor(answers[request_id])
        with torch.inference_mode():
            tokens = torch.cat((torch.tensor(prompt), answer[:-1]))
            logits = references[name](tokens[None], use_cache=False).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, answer[:, None]).squeeze(1)
        different += int((logits.argmax(dim=-1) != answer).sum())
        shortfall = max(shortfall, float(((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max()))
    runner = model_runner(engine)
    return {
        "different tokens": different,
        "shortfall": shortfall,
        "attention": type(runner.attention).__name__,
        "graphs": runner.decode_path is not None,
        "fallbacks": "; ".join(f"{part}: {why}" for part, why in engine.ready.fallbacks.items()),
    }


def _written(case: Case, folder: Path) -> tuple[Path, dict[str, PreTrainedModel]]:
    """The checkpoint that is served, and what answers must be like: by adapter, or of the only model."""
    from safetensors.torch import load_file

    from harness.checkpoints.families import FAMILIES, OTHERS, save
    from harness.checkpoints.quantized import (
        FORMATS,
        dense_tensors,
        merged,
        write,
        write_both,
        write_expert_adapter,
        write_gpt_oss,
    )
    from llmservice_server.tiny.adapter import write_tiny_adapter

    if case.form is None:
        reference = save((FAMILIES | OTHERS)[case.name], folder)
        reference.set_attn_implementation("eager")  # sdpa ignores the bounds of scores
        return folder, {"": reference}
    if case.form == "adapters":
        base = write(folder / "base", dense_tensors())
        for seed, name in enumerate(_ADAPTERS[1:]):
            write_tiny_adapter(folder / name, base, seed=seed)
        return base, {name: merged(base, folder / name if name else None) for name in _ADAPTERS}
    if case.form == "adapters of experts":
        model = save((FAMILIES | OTHERS)[case.name], folder / "base")
        stacked = write_expert_adapter(folder / "stacked", model, stacked=True, rank=4)
        each = write_expert_adapter(folder / "each", model, stacked=False, rank=8)
        return folder / "base", {"": model, "stacked": stacked, "each": each}
    if case.form == "mxfp4":
        quantized, exact = write_gpt_oss(folder)
    elif case.name in _MIXTURES:
        save((FAMILIES | OTHERS)[case.name], folder / "plain", **_LARGER)
        config = json.loads((folder / "plain" / "config.json").read_text())
        quantized, exact = write_both(
            folder, FORMATS[case.form], load_file(folder / "plain" / "model.safetensors"), **config
        )
    else:
        quantized, exact = write_both(folder, FORMATS[case.form])
    return quantized, {"": merged(exact, None)}


def _here(work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    return work(*arguments, **settings)


def _prompt(length: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def _load_adapter(engine: Engine, name: str, folder: Path) -> None:
    engine.change_adapter(LoadAdapter(request_id=name, name=name, folder=str(folder)))
    while True:
        for report in engine.step().adapters:
            if report.error is not None:
                raise ValueError(report.error)
            return


def _serve(engine: Engine, requests: Mapping[str, tuple[str, list[int]]], output_tokens: int) -> dict[str, list[int]]:
    """The answers to prompts, each with the name of its adapter."""
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    for request_id, (adapter, prompt) in requests.items():
        engine.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_s=0.0,
                adapter=adapter or None,
            )
        )
    answers: dict[str, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error}")
            answers[output.request_id] += output.token_ids
    return answers
