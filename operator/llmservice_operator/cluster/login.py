"""The credentials that kopf's watches use: those of the operator's own client, read anew at every login."""

from __future__ import annotations

from typing import Any

import kopf

from llmservice_operator.cluster.kube_client import load_configuration

_PRIORITY = 10


async def login(**_: Any) -> kopf.ConnectionInfo:
    """Where the API server is and how to prove who we are."""
    configuration = await load_configuration()
    header = await configuration.get_api_key_with_prefix("BearerToken") or ""
    scheme, _separator, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        proxy_url=configuration.proxy or None,
        trust_env=True,
        priority=_PRIORITY,
    )
