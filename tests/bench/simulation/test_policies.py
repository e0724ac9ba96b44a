import pytest

from llmservice_bench.simulation.policies import PolicyError, Service, make_policy


@pytest.mark.parametrize("name", ["builtin", "hpa", "keda", "kpa", "llmd", "static:3"])
def test_each_policy_is_made_by_its_name(service: Service, name: str) -> None:
    assert make_policy(name, service).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hpaa", "there is no policy 'hpaa': expected one of builtin, hpa, keda, kpa, llmd, static:N, clairvoyant"),
        ("static", "'static': expected static:N with a number of replicas, such as static:4"),
        ("static:x", "'static:x': expected static:N with a number of replicas, such as static:4"),
        ("hpa:target=0", "hpa: target is '0', expected a number above 0"),
        ("hpa:metric=cpu", "hpa: metric is 'cpu', expected one of in_flight, waiting, running, kv_usage"),
        ("kpa:window=3", "'kpa:window=3': kpa has no option window"),
    ],
)
def test_what_is_wrong_with_a_policy_is_said_in_a_sentence(service: Service, text: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy(text, service)
    assert str(error.value) == message


def test_targets_are_shares_of_the_requests_that_a_replica_runs_at_once(service: Service) -> None:
    assert service.slots == min(service.sized.plan.max_num_seqs, service.sized.plan.expected_sequences)
    assert make_policy("hpa", service)._target == pytest.approx(0.8 * service.slots)  # type: ignore[attr-defined]
    assert make_policy("kpa", service)._target == pytest.approx(0.7 * service.slots)  # type: ignore[attr-defined]
