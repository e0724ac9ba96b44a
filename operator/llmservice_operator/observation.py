"""A service's world, as the cache shows it at the beginning of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from llmservice_operator.api import duration
from llmservice_operator.api.resource import LLMService
from llmservice_operator.api.spec import Manifest
from llmservice_operator.pods.pod import Pod
from llmservice_operator.status.invalid_spec import InvalidSpecError

_DEFAULT_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The service's world at the beginning of a pass."""

    service: LLMService
    raw_status: Manifest
    deployment: Manifest | None
    pods: list[Pod]
    now: float
    """In seconds since 1970, as Kubernetes' timestamps."""
    asked: Manifest | None = None
    """The Deployment at the end of the pass."""
    steady_s: float = 0.0
    """`now` on a monotonic clock: how long something lasts does not change with a clock that is set."""

    @property
    def current(self) -> int:
        """Replicas that the Deployment is asked for."""
        return int((self.deployment or {}).get("spec", {}).get("replicas", 0))

    @property
    def window_s(self) -> float:
        """How far back the signals look."""
        autoscaling = self.service.spec.autoscaling
        return duration.seconds(autoscaling.metrics.window) if autoscaling else _DEFAULT_WINDOW_S

    @property
    def serving(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.serves]


def parsed(manifest: Manifest) -> LLMService:
    """A status that somebody broke is written anew, it must not stop the service; raises InvalidSpecError."""
    try:
        return LLMService.model_validate(manifest)
    except ValidationError:
        pass
    try:
        return LLMService.model_validate({key: value for key, value in manifest.items() if key != "status"})
    except ValidationError as error:
        raise InvalidSpecError(manifest, error) from error
