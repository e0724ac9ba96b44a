"""Which requests ask for replicas: all of them, or those that are not in the batch lane."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from llmservice_operator.signals.load import Load, PodLoad

BatchMode = Literal["fill", "scale"]
"""fill: batch requests use what the others leave, and add no replicas. scale: they count like the others."""


def counted(load: Load, batch: BatchMode, target: float, max_num_seqs: int) -> Load:
    """The load that replicas are added for.

    Rates and quantiles are of all lanes: with batch requests in the window they say nothing about the others.
    `target` is the share of a pod's slots and KV cache up to which it is used without another being asked for.
    """
    if batch == "scale" or not load.batch:
        return load
    return replace(
        load,
        pods=tuple(_without_batch(pod, target, max_num_seqs) for pod in load.pods),
        arrivals_per_s=None,
        ttft_p50_s=None,
        ttft_p99_s=None,
        ttft_count=0.0,
    )


def _without_batch(pod: PodLoad, target: float, max_num_seqs: int) -> PodLoad:
    """A server that does not tell the lanes of what runs fills itself with batch requests while some wait and no other
    does: its pod counts as used to the target at most, which neither adds a replica nor frees one."""
    waiting = pod.waiting - pod.batch_waiting
    running, kv_usage = pod.running, pod.kv_usage
    if pod.batch_running is not None:
        running = pod.running - pod.batch_running
        kv_usage *= running / pod.running if pod.running else 1.0
    elif pod.batch_waiting and not waiting:
        running, kv_usage = min(running, target * max_num_seqs), min(kv_usage, target)
    return replace(pod, running=running, waiting=waiting, kv_usage=kv_usage, batch_waiting=0.0, batch_running=0.0)
