"""`maxNumSeqs` from measured KV blocks: corrected in a rollout that takes place anyway, never by one of its own.

The record of what the pods were given is an annotation of their Deployment, outside the pod template.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import get_args

from llmservice_operator.api import labels
from llmservice_operator.api.spec import LLMServiceSpec, Manifest
from llmservice_operator.sizing import Given, Sized, sizing_request
from llmservice_planner.sizing.plan import LimitedBy, Plan, max_num_seqs_with

_TOLERANCE = 0.03
"""A difference by no more than this share, or by one sequence, is no reason for another number: measured blocks vary
a little from start to start, and are rounded down."""


def given_of(deployment: Manifest | None) -> Given | None:
    """None without a valid record: a server that sizes itself has none, nor has a Deployment of an earlier operator."""
    annotations = (deployment or {}).get("metadata", {}).get("annotations") or {}
    try:
        given = Given(**json.loads(annotations.get(labels.SIZING, "")))
        numbers = (given.max_num_seqs, given.predicted, given.blocks or 0)
    except (ValueError, TypeError, RecursionError):
        return None
    valid = all(type(number) is int and number >= 0 for number in numbers) and given.max_num_seqs > 0
    return given if valid and given.limited_by in get_args(LimitedBy) else None


def record_of(spec: LLMServiceSpec, sized: Sized) -> str | None:
    """The annotation of a Deployment that is made with `sized`; None where nothing is ever corrected."""
    plan = _correctable(sized)
    if plan is None:
        return None
    made = sized.given or Given(plan.max_num_seqs, plan.limited_by, plan.max_num_seqs, _settings(spec, sized, plan))
    return json.dumps({name: value for name, value in asdict(made).items() if value is not None}, sort_keys=True)


def as_given(spec: LLMServiceSpec, predicted: Sized, given: Given | None) -> Sized:
    """`predicted`, with the number that the pods were given where an earlier rollout corrected that prediction."""
    plan = _correctable(predicted)
    if plan is None or given is None or spec.engine.max_num_seqs != "auto":
        return predicted
    if given.blocks is None or given.predicted != plan.max_num_seqs:
        return predicted
    return _with(predicted, plan, given) if given.settings == _settings(spec, predicted, plan) else predicted


def corrected(spec: LLMServiceSpec, predicted: Sized, given: Given | None, blocks: int | None) -> Sized:
    """What new pods are given, by the usable `blocks` that pods measured which were given `given`."""
    plan, base = _correctable(predicted), as_given(spec, predicted, given)
    if plan is None or given is None or spec.engine.max_num_seqs != "auto":
        return base
    settings = _settings(spec, predicted, plan)
    found = max_num_seqs_now(spec, base, blocks, given.max_num_seqs) if given.settings == settings else None
    if found is None or not blocks or found[0] == base.max_num_seqs:
        return base
    if found[0] == plan.max_num_seqs:
        return predicted
    return _with(predicted, plan, Given(*found, plan.max_num_seqs, settings, blocks))


def max_num_seqs_now(
    spec: LLMServiceSpec, sized: Sized, blocks: int | None, num_seqs: int | None = None
) -> tuple[int, LimitedBy] | None:
    """What `maxNumSeqs` would be now, and why: the present number where measured blocks would hardly change it.

    None where nothing is measured or predicted. `num_seqs`: of the pods that measured, if not as in `sized`.
    """
    plan, shape = _correctable(sized), sized.model.shape
    if plan is None or shape is None or not blocks:
        return None
    request = sizing_request(spec, sized.model, shape, sized.device)
    most, limited_by = max_num_seqs_with(request, blocks, num_seqs or plan.max_num_seqs)
    if not most or abs(most - plan.max_num_seqs) <= max(1, _TOLERANCE * plan.max_num_seqs):
        return plan.max_num_seqs, plan.limited_by
    return most, limited_by


def _correctable(sized: Sized) -> Plan | None:
    """The plan of a service that the operator sizes and whose model has a KV cache."""
    return sized.plan if sized.plan is not None and not sized.self_sized and sized.plan.kv_bytes_per_token else None


def _with(predicted: Sized, plan: Plan, given: Given) -> Sized:
    line = (
        f"measured: max_num_seqs {given.max_num_seqs} in place of {given.predicted}, limited by {given.limited_by}, as"
        f" pods measured {given.blocks or 0:,} KV blocks"
    )
    explanation = (*plan.explanation, line)
    made = replace(plan, max_num_seqs=given.max_num_seqs, limited_by=given.limited_by, explanation=explanation)
    return replace(predicted, plan=made, max_num_seqs=given.max_num_seqs, given=given)


def _settings(spec: LLMServiceSpec, sized: Sized, plan: Plan) -> str:
    """The model, the GPU and whatever else changes how many blocks fit, or what one holds."""
    parts = (
        spec.model.identity,
        spec.model.dtype,
        spec.model.quantization,
        sized.device.name,
        sized.device.memory_bytes,
        plan.kv_bytes_per_token,
        plan.max_model_len,
        plan.max_num_batched_tokens,
        spec.engine.gpu_memory_utilization,
        spec.engine.kv_cache_dtype,
        spec.engine.block_size,
        spec.max_loras,
        spec.engine.max_lora_rank,
        *(("loraExperts",) if spec.engine.lora_experts else ()),
        spec.pod_template.extra_args,
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]
