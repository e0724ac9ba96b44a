"""The policies by name, as `--policy` and `--compare` take them: NAME or NAME:OPTION=VALUE:…."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmservice_bench.simulation.builtin import BuiltIn
from llmservice_bench.simulation.hpa import METRICS, HorizontalPodAutoscaler, Keda
from llmservice_bench.simulation.knative import UTILIZATION, KnativePodAutoscaler
from llmservice_bench.simulation.llmd import Hardware, WorkloadVariantAutoscaler
from llmservice_bench.simulation.observation import Bounds, Observation, Policy
from llmservice_operator.scaling.decision import Decision
from llmservice_operator.scaling.from_manifest import SizedService
from llmservice_operator.scaling.policy import TARGET_UTILIZATION
from llmservice_planner.sizing.latency import LatencyModel

CLAIRVOYANT = "clairvoyant"
NAMES = ("builtin", "hpa", "keda", "kpa", "llmd", "static:N", CLAIRVOYANT)


class PolicyError(ValueError):
    """A policy that is not there, or options that it does not have; the message names what is."""


class Static:
    """So many replicas."""

    interval_s = 15.0
    jitter = 0.0
    wakes = False

    def __init__(self, replicas: int) -> None:
        self.name = f"static:{replicas}"
        self._replicas = replicas

    def decide(self, seen: Observation) -> Decision:
        return Decision(self._replicas, self._replicas, (f"static: always {self._replicas}",))


@dataclass(frozen=True, slots=True)
class Service:
    """What policies are made for."""

    sized: SizedService
    latency: LatencyModel

    @property
    def bounds(self) -> Bounds:
        """Of `spec.autoscaling`; without it the replicas of the spec."""
        policy = self.sized.policy
        if policy is None:
            return Bounds(self.sized.replicas, self.sized.replicas)
        return Bounds(policy.min_replicas, policy.max_replicas)

    @property
    def slots(self) -> int:
        """Typical requests that a replica runs at once."""
        plan = self.sized.plan
        return max(1, min(plan.max_num_seqs, plan.expected_sequences))


@dataclass(slots=True)
class Options:
    """`target=12:metric=waiting`; each is taken once, and what is left is an error."""

    name: str
    values: dict[str, str]

    def number(self, key: str, default: float) -> float:
        text = self.values.pop(key, None)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise PolicyError(f"{self.name}: {key} is {text!r}, expected a number above 0")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        text = self.values.pop(key, choices[0])
        if text not in choices:
            raise PolicyError(f"{self.name}: {key} is {text!r}, expected one of {', '.join(choices)}")
        return text


def make_policy(text: str, service: Service) -> Policy:
    """Raises PolicyError. The clairvoyant policy is made by a search, see `clairvoyant`."""
    name, _, rest = text.partition(":")
    if name == "static":
        if not rest.isdecimal():
            raise PolicyError(f"{text!r}: expected static:N with a number of replicas, such as static:4")
        return Static(int(rest))
    if name not in _MAKERS:
        raise PolicyError(f"there is no policy {text!r}: expected one of {', '.join(NAMES)}")
    pairs = [pair.partition("=") for pair in rest.split(":") if pair]
    options = Options(name, {key: value for key, _, value in pairs})
    policy = _MAKERS[name](service, options)
    if options.values:
        raise PolicyError(f"{text!r}: {name} has no option {', '.join(options.values)}")
    return policy


def _builtin(service: Service, _options: Options) -> Policy:
    return BuiltIn(service.sized)


def _hpa(service: Service, options: Options) -> Policy:
    metric = options.choice("metric", tuple(METRICS))
    full = {"waiting": 4 / TARGET_UTILIZATION, "kv_usage": 1.0}.get(metric, float(service.slots))
    target = options.number("target", TARGET_UTILIZATION * full)
    return HorizontalPodAutoscaler(service.bounds, target, metric, options.number("stabilization", 300.0))


def _keda(service: Service, options: Options) -> Policy:
    target = options.number("target", TARGET_UTILIZATION * service.slots)
    return Keda(service.bounds, target, options.number("cooldown", 300.0))


def _kpa(service: Service, options: Options) -> Policy:
    return KnativePodAutoscaler(service.bounds, options.number("target", UTILIZATION * service.slots))


def _llmd(service: Service, _options: Options) -> Policy:
    slo = service.sized.slo
    hardware = Hardware.of(service.latency)
    return WorkloadVariantAutoscaler(service.bounds, hardware, slo.ttft_p99_s, slo.itl_p99_s, service.slots)


_MAKERS: dict[str, Callable[[Service, Options], Policy]] = {
    "builtin": _builtin,
    "hpa": _hpa,
    "keda": _keda,
    "kpa": _kpa,
    "llmd": _llmd,
}
