"""The validating webhook: kopf's server asks the reviewer, and kubectl shows its answer at once.

The chart owns the webhook's configuration, with `failurePolicy: Ignore`: while no operator answers, an apply works all
the same, and a pass reports what the webhook would have denied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import kopf

from llmservice_operator.api.resource import GROUP, PLURAL, VERSION
from llmservice_operator.api.spec import Manifest
from llmservice_operator.framework.certificate import Certificate
from llmservice_operator.review import Review

logger = logging.getLogger(__name__)

PATH = PLURAL
"""Of the webhook's URL; kopf takes it as the handler's id."""
_REVIEW_S = 4.0
"""The chart lets the API server wait for 5 s."""
_DENIED = 422
_RELOAD_S = 5.0

Reviewing = Callable[[Manifest, Manifest | None], Awaitable[Review]]


def register_admission(
    registry: kopf.OperatorRegistry,
    settings: kopf.OperatorSettings,
    certificate: Certificate,
    address: tuple[str, int],
    review: Reviewing,
) -> None:
    """Serve at `address` with the certificate, once there is one; a changed one is loaded within seconds."""

    async def serve(answer: Any) -> AsyncIterator[Any]:
        await certificate.ready.wait()
        host, port = address
        server = kopf.WebhookServer(
            addr=host,
            port=port,
            certfile=certificate.certificate_file,
            pkeyfile=certificate.key_file,
            file_check_interval=_RELOAD_S,
        )
        async for client_config in server(answer):
            yield client_config

    settings.admission.server = serve

    @kopf.on.validate(
        group=GROUP, version=VERSION, plural=PLURAL, id=PATH, operations=["CREATE", "UPDATE"], registry=registry
    )
    async def validate(*, body: kopf.Body, warnings: list[str], **more: Any) -> None:
        before = more["old"]
        try:
            async with asyncio.timeout(_REVIEW_S):
                verdict = await review(dict(body), None if before is None else dict(before))
        except TimeoutError:
            warnings.append("the operator did not review this in time: its conditions will report what is wrong")
            return
        except Exception:
            logger.exception("a review failed, the object is admitted")
            return
        warnings.extend(verdict.warnings)
        if verdict.denied is not None:
            raise kopf.AdmissionError(verdict.denied, code=_DENIED)
