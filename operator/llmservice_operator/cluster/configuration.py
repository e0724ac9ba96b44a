"""Where the API server is, and how to prove who we are: what the generated client reads it from, and no more."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config


async def load_configuration(context: str | None = None) -> Any:
    """KUBECONFIG where it is set, else the pod's service account, else ~/.kube/config; raises ConfigException.

    A named context is looked for in the file.
    """
    configuration = kubernetes_client.Configuration()
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG") and not context:
        kubernetes_config.load_incluster_config(  # type: ignore[no-untyped-call]
            client_configuration=configuration
        )
    else:
        await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=os.environ.get("KUBECONFIG"), context=context, client_configuration=configuration
        )
    # By itself the client would ask netrc and the environment before every request, each in a thread of its own.
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.connection_pool_maxsize = 0  # watches keep theirs; how many requests there are, the queue decides
    configuration.proxy = configuration.proxy or _environment_proxy(configuration.host)
    return configuration


def _environment_proxy(url: str) -> str | None:
    """The proxy that HTTPS_PROXY or HTTP_PROXY names for a URL, unless NO_PROXY excepts its host."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return None
    return getproxies().get(parts.scheme)
