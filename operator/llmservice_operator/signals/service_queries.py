"""The PromQL that shows a service's signals: what `status.autoscaling.signals` names beside each figure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmservice_operator.monitoring.promql import string
from llmservice_operator.signals import scrape


@dataclass(frozen=True, slots=True)
class ServiceQueries:
    """Queries over all pods of one service, whatever they are called at the moment."""

    namespace: str
    name: str
    window_s: float

    @property
    def selector(self) -> str:
        """The label matchers; a Deployment's pods are called NAME-HASH-RANDOM, long names run into the hash."""
        pods = re.escape(self.name).replace("\\-", "-") + "-[a-z0-9]+(-[a-z0-9]+)?"
        return f"{{namespace={string(self.namespace)},pod=~{string(pods)}}}"

    def waiting(self) -> str:
        return f"sum({scrape.WAITING}{self.selector}) / count({scrape.RUNNING}{self.selector})"

    def utilization(self, max_num_seqs: int) -> str:
        return f"avg({scrape.RUNNING}{self.selector}) / {max_num_seqs}"

    def kv_cache(self) -> str:
        return f"avg({scrape.KV_USAGE}{self.selector})"

    def arrivals(self) -> str:
        """What left, what was refused, and what is held more than before."""
        window, chosen = f"[{max(1, round(self.window_s))}s]", self.selector
        left = f"sum(rate({scrape.FINISHED}{chosen}{window}))"
        refused = f"(sum(rate({scrape.REJECTED}{chosen}{window})) or vector(0))"
        gauges = (scrape.RUNNING, scrape.WAITING)
        held = " + ".join(f"(sum(deriv({gauge}{chosen}{window})) or vector(0))" for gauge in gauges)
        return f"({left} + {refused} + {held}) / count({scrape.RUNNING}{chosen})"

    def ttft_p99(self) -> str:
        window = f"[{max(1, round(self.window_s))}s]"
        return f"histogram_quantile(0.99, sum by (le) (rate({scrape.TTFT_BUCKET}{self.selector}{window})))"
