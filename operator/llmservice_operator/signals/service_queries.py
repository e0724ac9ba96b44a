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
    counts_batch: bool = True
    """Whether requests of the batch lane ask for replicas."""

    @property
    def selector(self) -> str:
        """The label matchers; a Deployment's pods are called NAME-HASH-RANDOM, long names run into the hash."""
        return f"{{{self._pods}}}"

    @property
    def _pods(self) -> str:
        pods = re.escape(self.name).replace("\\-", "-") + "-[a-z0-9]+(-[a-z0-9]+)?"
        return f"namespace={string(self.namespace)},pod=~{string(pods)}"

    @property
    def _counted(self) -> str:
        """Series without a lane match, too."""
        return self.selector if self.counts_batch else f"{{{self._pods},lane!={string(scrape.BATCH)}}}"

    @property
    def _replicas(self) -> str:
        return f"count(count by (pod) ({scrape.RUNNING}{self.selector}))"

    def waiting(self) -> str:
        return f"sum({scrape.WAITING}{self._counted}) / {self._replicas}"

    def utilization(self, max_num_seqs: int) -> str:
        return f"sum({scrape.RUNNING}{self._counted}) / {self._replicas} / {max_num_seqs}"

    def kv_cache(self) -> str:
        return f"avg({scrape.KV_USAGE}{self.selector})"

    def arrivals(self) -> str:
        """What left, what was refused, and what is held more than before."""
        window, chosen = f"[{max(1, round(self.window_s))}s]", self.selector
        left = f"sum(rate({scrape.FINISHED}{chosen}{window}))"
        refused = f"(sum(rate({scrape.REJECTED}{chosen}{window})) or vector(0))"
        gauges = (scrape.RUNNING, scrape.WAITING)
        held = " + ".join(f"(sum(deriv({gauge}{chosen}{window})) or vector(0))" for gauge in gauges)
        return f"({left} + {refused} + {held}) / {self._replicas}"

    def ttft_p99(self) -> str:
        window = f"[{max(1, round(self.window_s))}s]"
        return f"histogram_quantile(0.99, sum by (le) (rate({scrape.TTFT_BUCKET}{self.selector}{window})))"
