"""What a client may do: its key, the models of that key, its limits, and the proof of it for the pods."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from llmservice_gateway.access.keys import Key, Keyring
from llmservice_gateway.access.limits import RENEWAL_S, Limiter, LimitError, Reservation
from llmservice_gateway.access.signing import Signer
from llmservice_gateway.metrics import GatewayMetrics
from llmservice_gateway.openai_error import GatewayError, unavailable
from llmservice_gateway.routing.demand import Demand, Usage
from llmservice_gateway.routing.routes import Backend, Route

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


@dataclass(slots=True)
class Admission:
    """A request that its key's limits allow."""

    _key: Key
    _reservation: Reservation
    _signer: Signer | None
    _metrics: GatewayMetrics
    _model: str

    @property
    def headers(self) -> Mapping[str, str]:
        """For the response: x-ratelimit-*."""
        return self._reservation.headers

    def pod_headers(self, backend: Backend) -> Mapping[str, str]:
        """For the request to this pod, made at each attempt: the token is short-lived, and for one service."""
        if self._signer is None:
            return {}
        return self._signer.headers(backend.service, self._key.name, self._key.policy.lane)

    async def settle(self, usage: Usage | None) -> None:
        """The request has ended; `usage` is None where no pod reported one, then it counts as reserved."""
        if usage is not None:
            counter, name = self._metrics.key_tokens, self._key.name
            counter.labels(name, self._model, "prompt").inc(usage.prompt)
            counter.labels(name, self._model, "cached").inc(usage.cached)
            counter.labels(name, self._model, "completion").inc(usage.completion)
        await self._reservation.settle(None if usage is None else usage.prompt + usage.completion)


class Access:
    """The gateway's answer to who may use what, and how much. Its errors are GatewayErrors."""

    def __init__(
        self, keyring: Keyring, limiter: Limiter, metrics: GatewayMetrics, signer: Signer | None = None
    ) -> None:
        self._keyring = keyring
        self._limiter = limiter
        self._metrics = metrics
        self._signer = signer
        if limiter.has_redis:
            metrics.limits_shared.set_function(lambda: float(limiter.counts_together))

    @property
    def unready(self) -> str | None:
        """Why no request should be sent here yet; None: they may be."""
        return None if self._keyring.synced else "the API keys have not been read yet"

    async def run(self) -> None:
        """Follow the keys and renew what requests hold, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keyring.run())
            group.create_task(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            await self._limiter.renew()

    def identify(self, headers: Mapping[str, str]) -> Key:
        """The key of a request. Raises 401, and 503 until the keys have been read."""
        if self.unready is not None:
            raise unavailable(f"The gateway is starting: {self.unready}. Retry shortly.", "not_ready")
        scheme, _, presented = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not presented:
            message = "You didn't provide an API key: send it in the header Authorization: Bearer KEY."
            raise GatewayError(401, message, "invalid_api_key", headers=_CHALLENGE)
        key = self._keyring.find(presented.strip())
        if key is None:
            raise GatewayError(401, "Incorrect API key provided.", "invalid_api_key", headers=_CHALLENGE)
        return key

    def may_use(self, key: Key, route: Route) -> bool:
        """Whether the key may use the model; /v1/models lists only those."""
        return key.policy.allows(route.namespace, route.served_name)

    async def admit(self, key: Key, model: str, route: Route, demand: Demand) -> Admission:
        """Raises 403 or 429, with headers."""
        if not self.may_use(key, route):
            message = f"The API key {key.name} may not use the model `{model}`: GET /v1/models lists those that it may."
            raise GatewayError(403, message, "model_not_allowed", "model")
        if (why := self._limiter.why_unusable(key)) is not None:
            raise GatewayError(403, f"The API key {key.name} cannot be used: {why}.", "key_not_usable")
        answer = demand.output_tokens if demand.max_output_tokens is None else demand.max_output_tokens
        try:
            reservation = await self._limiter.admit(key, demand.prompt_tokens + answer)
        except LimitError as error:
            self._metrics.key_refusals.labels(key.name, error.reason).inc()
            raise
        return Admission(key, reservation, self._signer, self._metrics, model)

    def answered(self, key: Key, model: str, code: str) -> None:
        """A request has been answered with this status, or refused."""
        self._metrics.key_requests.labels(key.name, model, code).inc()
