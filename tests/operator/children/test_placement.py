from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmservice_operator.children.placement import expected_placement
from llmservice_operator.sizing import Sized
from llmservice_planner.sizing.gpu import find_gpu

L4 = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}
TOLERATED = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
DISK = {"key": "disk", "operator": "Exists"}


def required(*terms: list[dict[str, Any]]) -> dict[str, Any]:
    listed = [{"matchExpressions": term} for term in terms]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": listed}}}


@pytest.fixture
def on_l4(sized: Sized) -> Sized:
    return replace(sized, device=find_gpu("l4"))


@pytest.mark.parametrize(
    ("scheduling", "affinity"),
    [
        ({}, required([L4])),
        ({"nodeSelector": {"zone": "a"}}, required([L4])),
        ({"affinity": required([ZONE], [DISK])}, required([ZONE, L4], [DISK, L4])),
        ({"affinity": {"podAffinity": {"x": []}}}, {"podAffinity": {"x": []}, **required([L4])}),
        ({"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-l4"}}, None),
        ({"nodeSelector": {"eks.amazonaws.com/instance-gpu-name": "l4"}}, None),
        ({"nodeSelector": {"karpenter.azure.com/sku-gpu-name": "A10"}}, None),
        ({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}}, None),
        (
            {"affinity": required([{"key": "node.kubernetes.io/instance-type", "operator": "Exists"}])},
            required([{"key": "node.kubernetes.io/instance-type", "operator": "Exists"}]),
        ),
    ],
)
def test_pods_go_to_nodes_with_the_card_unless_the_spec_chooses_them(
    scheduling: dict[str, Any], affinity: dict[str, Any] | None, service_of: Any, on_l4: Sized
) -> None:
    placement = expected_placement(service_of(scheduling=scheduling), on_l4)

    assert placement.get("affinity") == affinity
    assert placement.get("nodeSelector") == scheduling.get("nodeSelector")


def test_a_resource_claim_chooses_the_nodes_of_its_gpu(service_of: Any, on_l4: Sized) -> None:
    claims = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]}
    service = service_of(resources={"gpu": {"product": "l4", "resourceName": ""}}, podTemplate=claims)

    placement = expected_placement(service, on_l4)

    assert "affinity" not in placement
    assert placement["tolerations"] == [TOLERATED]


def test_a_gpu_with_several_product_names_has_all_their_labels(service_of: Any, sized: Sized) -> None:
    placement = expected_placement(service_of(), replace(sized, device=find_gpu("a100-40gb")))

    (term,) = placement["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [TOLERATED]),
        ([TOLERATED], [TOLERATED]),
        ([{"key": "team", "operator": "Exists"}], [{"key": "team", "operator": "Exists"}, TOLERATED]),
    ],
)
def test_the_cards_taint_is_tolerated_beside_those_that_the_spec_names(
    given: list[dict[str, Any]], expected: list[dict[str, Any]], service_of: Any, on_l4: Sized
) -> None:
    assert expected_placement(service_of(scheduling={"tolerations": given}), on_l4)["tolerations"] == expected


def test_amd_cards_have_their_own_label_and_taint(service_of: Any, sized: Sized) -> None:
    placement = expected_placement(service_of(), replace(sized, device=find_gpu("mi300x-192gb")))

    assert placement["tolerations"][0]["key"] == "amd.com/gpu"
    assert "amd.com/gpu.product-name" in str(placement["affinity"])


def test_without_a_card_any_node_will_do(service_of: Any, sized: Sized) -> None:
    assert expected_placement(service_of(), sized).keys() == {"topologySpreadConstraints"}


def test_pods_are_spread_over_nodes_by_default(service_of: Any, sized: Sized) -> None:
    (spread,) = expected_placement(service_of(), sized)["topologySpreadConstraints"]
    assert (spread["whenUnsatisfiable"], spread["topologyKey"]) == ("ScheduleAnyway", "kubernetes.io/hostname")

    own = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    service = service_of(scheduling={"topologySpreadConstraints": [own]})
    assert expected_placement(service, sized)["topologySpreadConstraints"] == [own]


def test_classes_are_passed_on(service_of: Any, sized: Sized) -> None:
    scheduling = {"priorityClassName": "high", "runtimeClassName": "nvidia"}

    assert scheduling.items() <= expected_placement(service_of(scheduling=scheduling), sized).items()
