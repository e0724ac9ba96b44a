"""One client's thousand requests against a client that sends one at a time, with the real scheduler in simulated time.

A step takes what the planner's latency model says of an 8B model on an H100. Both have the lengths of the Azure
conversation trace. The same requests are served as those of one client, in the order in which they come.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from llmservice_server.engine.request import Request
from llmservice_server.engine.step_timer import step_batch
from llmservice_server.types.messages import GenerateRequest, SamplingParams
from scheduling.admission import MOST_TOKENS, continuous, drawn, llama_8b_on_h100
from scheduling.findings import Findings
from scheduling.transformers_scheduler import TOKEN

GREEDY, MODEST = "greedy", "modest"
BACKLOG = 1000
PAUSE_S = 0.5
"""Between an answer to the modest client and its next request."""


@dataclass(frozen=True, slots=True)
class Served:
    ttft_s: list[float]
    """Of the modest client's requests."""
    tokens_per_s: float
    """Of both, until the greedy client's last request has begun."""


def simulate(*, named: bool) -> Served:
    """`named`: the scheduler knows whose a request is."""
    scheduler, latency, lengths = continuous(), llama_8b_on_h100(), drawn(0)
    arrivals = [(0.0, number, GREEDY) for number in range(BACKLOG)] + [(0.0, BACKLOG, MODEST)]
    numbers = itertools.count(BACKLOG + 1)
    running: dict[Request, tuple[str, int]] = {}
    waiting, now, tokens, ttft_s = BACKLOG, 0.0, 0, []
    while waiting:
        while arrivals and arrivals[0][0] <= now:
            at_s, number, whose = heappop(arrivals)
            each = next(lengths)
            message = GenerateRequest(
                request_id=str(number),
                prompt_token_ids=[number] * each.prompt_tokens,
                sampling=SamplingParams(max_tokens=MOST_TOKENS),
                arrival_s=at_s,
                client=whose if named else None,
            )
            request = Request.of(message, number, 0, frozenset())
            running[request] = whose, each.output_tokens
            scheduler.add(request)
        plan = scheduler.schedule(now)
        scheduler.commit(plan)
        now += latency.seconds(step_batch(plan))
        for request in [share.request for share in plan.scheduled if share.samples]:
            whose, answer = running[request]
            tokens += 1
            if request.num_output_tokens == 0 and whose == MODEST:
                ttft_s.append(now - request.arrival_s)
            waiting -= request.num_output_tokens == 0 and whose == GREEDY
            request.append(TOKEN)
            if request.num_output_tokens >= answer:
                scheduler.finish(request)
                del running[request]
                if whose == MODEST:
                    heappush(arrivals, (now + PAUSE_S, next(numbers), MODEST))
    return Served(ttft_s, tokens / now)


def measure() -> Findings:
    findings = Findings()
    for name, served in (("in turn", simulate(named=True)), ("as one client", simulate(named=False))):
        p50, p99 = (float(np.quantile(served.ttft_s, q)) for q in (0.5, 0.99)) if served.ttft_s else (np.nan, np.nan)
        row = {"ttft_p50_s": p50, "ttft_p99_s": p99, "output_tokens_per_s": served.tokens_per_s}
        findings.rows.append({"served": name, "requests": len(served.ttft_s), **row})
        print(
            f"{BACKLOG} requests of another client, served {name:<16}{len(served.ttft_s):>5} requests, TTFT p50 / p99 "
            f"{p50:.2f} / {p99:.2f} s{served.tokens_per_s:>8.0f} tok/s",
            flush=True,
        )
    turn, one = findings.rows
    what = f"beside {BACKLOG} requests of another client, in turn ÷ as one client"
    findings.add_check(f"p50 TTFT {what}", "<= 0.05", turn["ttft_p50_s"] / one["ttft_p50_s"])
    findings.add_check(f"tokens/s {what}", ">= 0.95", turn["output_tokens_per_s"] / one["output_tokens_per_s"])
    return findings
