"""The live routing table, from reflectors of services and pods, and its balancer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from operator import or_
from typing import Any

from llmservice_gateway.reflector import KubernetesAPI, Reflector
from llmservice_gateway.routing.adapters import AdapterPoll
from llmservice_gateway.routing.balancer import Balancer
from llmservice_gateway.routing.routes import RoutedPod, RoutedService, RouteTable, build_table

logger = logging.getLogger(__name__)

POD_SELECTOR = "app.kubernetes.io/name=llmservice,app.kubernetes.io/component=server"


class Routing:
    """Follows the LLMServices and server pods of the given namespaces (none given: of the whole cluster)."""

    def __init__(self, api: KubernetesAPI, namespaces: Sequence[str] = ()) -> None:
        self.table = RouteTable()
        self.balancer = Balancer()
        self.changed: Callable[[], None] = lambda: None
        """Called after each change of the table."""
        self._adapters = AdapterPoll(lambda: self.table.adapted, self._rebuild)
        self._services = [
            Reflector(
                api, f"/apis/serving.llmservice.io/v1alpha1{scope}/llmservices", RoutedService.parse, self._rebuild
            )
            for scope in _scopes(namespaces)
        ]
        self._pods = [
            Reflector(api, f"/api/v1{scope}/pods", RoutedPod.parse, self._rebuild, POD_SELECTOR)
            for scope in _scopes(namespaces)
        ]

    @property
    def synced(self) -> bool:
        """Whether all services and pods have been listed at least once, of the namespaces that may be read.

        One that was deleted with its RoleBinding does not hold up the others; while nothing may be read, that is wrong.
        """
        both = list(zip(self._services, self._pods, strict=True))
        read = [all(one.synced.is_set() for one in place) for place in both]
        left_out = [all(one.is_refused for one in place) for place in both]
        return any(read) and all(map(or_, read, left_out))

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())
            group.create_task(self._adapters.run())

    @property
    def _reflectors(self) -> list[Reflector[Any]]:
        return [*self._services, *self._pods]

    def _rebuild(self) -> None:
        services = chain.from_iterable(reflector.objects() for reflector in self._services)
        pods = chain.from_iterable(reflector.objects() for reflector in self._pods)
        self.table = build_table(services, pods, self._adapters.reported)
        routes = list(chain.from_iterable(self.table.routes.values()))
        self.balancer.forget_all_but({backend.uid for route in routes for backend in route.backends})
        for route in routes:
            self.balancer.rebalance(route.backends, time.monotonic())
        self.changed()
        logger.debug("routes: %s", {route.served_name: len(route.backends) for route in routes})


def _scopes(namespaces: Sequence[str]) -> list[str]:
    return [f"/namespaces/{namespace}" for namespace in namespaces] or [""]
