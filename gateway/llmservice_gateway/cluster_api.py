"""The Kubernetes API, as far as a reflector needs it.

The official client gives credentials and TLS; objects stay the dicts that the API sent: the client's
models refuse fields that they do not know.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import aiohttp
from kubernetes.aio import client, config


class KubernetesAPI:
    """One connection pool to the API server that KUBECONFIG, or else the pod's service account, names."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)

    @classmethod
    async def connect(cls) -> KubernetesAPI:
        """Load the credentials: KUBECONFIG, else the service account of the pod, else ~/.kube/config.

        Raises:
            kubernetes.aio.config.ConfigException: there are none, or they cannot be used.
        """
        configuration = client.Configuration()
        kubeconfig = os.environ.get("KUBECONFIG")
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration
            )
        # Each Watch creates a client of its own. With this CA instead of the system's, that takes 0.5 ms and not 35 ms.
        client.Configuration.set_default(configuration)
        return cls(configuration)

    async def __aenter__(self) -> KubernetesAPI:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, path: str, query: dict[str, str], timeout_s: float) -> Any:
        """The response to a GET, its body unread.

        Raises:
            kubernetes.aio.client.ApiException: its status is not 200; the reason is what the API server wrote.
        """
        request = await self._client.param_serialize(
            "GET",
            path,
            query_params=list(query.items()),
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        answer = await self._client.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=timeout_s))
        if answer.status != 200:
            reason = (await answer.response.read()).decode(errors="replace")[:500]
            raise client.ApiException(status=answer.status, reason=reason)
        return answer.response
