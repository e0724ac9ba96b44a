"""Reviews of specs before they are stored, with the messages of the conditions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.api.model_spec import ModelSource
from llmservice_operator.cluster.kube_client import KubeClient
from llmservice_operator.grants import Grants
from llmservice_operator.locations import Figures, Model, ModelSourceError
from llmservice_operator.review import Review, Reviewer
from llmservice_operator.sizing import SizingProblem, size

JSON = "application/json"
SERVICES = "/api/v1/namespaces/team-a/services"
TOO_LONG = {"maxNumSeqs": 8, "maxModelLen": 9_000_000}


@pytest.fixture
def reviewer(kube: KubeClient, model: Model) -> Reviewer:
    async def read(source: ModelSource, known: Figures | None) -> Model:
        assert source.uri
        return model

    return Reviewer(kube, read, "img:1", Grants(kube))


async def test_a_spec_that_fits_is_allowed_without_warnings(reviewer: Reviewer, manifest_of: Any) -> None:
    assert await reviewer.review(manifest_of(), None) == Review()


async def test_a_spec_that_does_not_fit_is_denied_with_the_conditions_message(
    reviewer: Reviewer, manifest_of: Any, service_of: Any, model: Model
) -> None:
    problem = size(service_of(engine=TOO_LONG).spec, model)
    assert isinstance(problem, SizingProblem)

    review = await reviewer.review(manifest_of(engine=TOO_LONG), None)

    assert review.denied == f"SizingValid would be False: {problem.reason}: {problem.message}"


async def test_a_spec_that_only_another_version_of_the_crd_allows_is_denied(
    reviewer: Reviewer, manifest_of: Any
) -> None:
    review = await reviewer.review(manifest_of(replicas="many"), None)

    assert review.denied is not None
    assert review.denied.startswith("InvalidSpec: spec.replicas: ")


async def test_a_wrong_field_is_denied_when_it_is_written_and_other_changes_are_allowed_beside_it(
    reviewer: Reviewer, manifest_of: Any
) -> None:
    """A time zone is checked by no rule of the CRD."""
    hours = {"days": ["Mon"], "start": "08:00", "end": "18:00", "timeZone": "Europe/Nowhere", "minReplicas": 2}
    wrong = {"maxReplicas": 4, "schedule": [hours]}

    review = await reviewer.review(manifest_of(autoscaling=wrong), manifest_of(autoscaling={"maxReplicas": 4}))

    assert review.denied is not None
    assert review.denied.startswith("InvalidSpec: spec.autoscaling.schedule.0.timeZone: ")
    edited = manifest_of(autoscaling=wrong, drainTimeout="20s")
    assert await reviewer.review(edited, manifest_of(autoscaling=wrong)) == Review()


async def test_other_changes_are_allowed_though_the_spec_no_longer_fits(reviewer: Reviewer, manifest_of: Any) -> None:
    before = manifest_of(engine=TOO_LONG)
    labelled = {**before, "metadata": {**before["metadata"], "labels": {"team": "ml"}}}
    leaving = manifest_of(engine={**TOO_LONG, "maxNumSeqs": 4})
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert await reviewer.review(labelled, before) == Review()
    assert await reviewer.review(leaving, before) == Review()
    assert (await reviewer.review(manifest_of(engine={**TOO_LONG, "maxNumSeqs": 4}), before)).denied
    assert (await reviewer.review(manifest_of(engine=TOO_LONG, workload="batch"), before)).denied


@pytest.mark.parametrize("lasting", [True, False])
async def test_a_model_that_can_not_be_read_is_a_warning(lasting: bool, reviewer: Reviewer, manifest_of: Any) -> None:
    async def read(source: ModelSource, known: Figures | None) -> Model:
        raise ModelSourceError("ModelNotFound", "there is no such model", lasting=lasting)

    review = await replace(reviewer, read_model=read).review(manifest_of(), None)

    assert review == Review(warnings=("SizingValid is not known yet: ModelNotFound: there is no such model",))


async def test_a_source_that_can_never_be_served_is_denied(reviewer: Reviewer, manifest_of: Any) -> None:
    async def read(*_: object) -> Model:
        raise ModelSourceError("FileModelsDisabled", "file:// is off")

    review = await replace(reviewer, read_model=read).review(manifest_of(), None)

    assert review.denied == "SizingValid would be False: FileModelsDisabled: file:// is off"


async def test_an_unresponsive_hub_does_not_delay_an_apply(
    reviewer: Reviewer, manifest_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmservice_operator.review._READ_S", 0.01)

    async def read(source: ModelSource, known: Figures | None) -> Model:
        await asyncio.Event().wait()
        raise AssertionError

    review = await replace(reviewer, read_model=read).review(manifest_of(), None)

    assert review.denied is None
    assert "ModelUnreachable" in review.warnings[0]


async def test_a_secret_or_a_variable_that_is_not_granted_is_denied(reviewer: Reviewer, manifest_of: Any) -> None:
    named = manifest_of(podTemplate={"envFrom": [{"secretRef": {"name": "db"}}]})
    proxied = manifest_of(podTemplate={"env": [{"name": "HTTPS_PROXY", "value": "http://mine"}]})

    for before in (None, manifest_of()):
        denied = (await reviewer.review(named, before)).denied
        assert denied is not None
        assert denied.startswith("Ready would be False: SecretNotAllowed: spec.podTemplate.envFrom[0].secretRef names")
        denied = (await reviewer.review(proxied, before)).denied
        assert denied is not None
        assert denied.startswith("Ready would be False: EnvNotAllowed: spec.podTemplate.env sets HTTPS_PROXY")
    scaled = {**named, "spec": {**named["spec"], "replicas": 0}}
    assert await reviewer.review(scaled, named) == Review(), "what was there before can be scaled down"


async def test_a_used_name_is_denied_unless_it_is_being_deleted(
    reviewer: Reviewer, kube: KubeClient, manifest_of: Any
) -> None:
    metadata: dict[str, Any] = {"name": "tiny-pods", "namespace": "team-a"}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": [{"port": 80}]}}
    await kube.request("POST", SERVICES, body=theirs, content_type=JSON)

    review = await reviewer.review(manifest_of(), None)

    assert review.denied is not None
    assert review.denied.startswith("Ready would be False: NameConflict: a Service called tiny-pods is there already")
    assert await reviewer.review(manifest_of(replicas=2), manifest_of()) == Review(), "it was made before"
    await kube.request("DELETE", f"{SERVICES}/tiny-pods")
    reference = {"apiVersion": "serving.llmservice.io/v1alpha1", "kind": "LLMService", "name": "tiny", "uid": "gone"}
    await kube.request(
        "POST", SERVICES, body={**theirs, "metadata": {**metadata, "ownerReferences": [reference]}}, content_type=JSON
    )

    assert await reviewer.review(manifest_of(), None) == Review()
