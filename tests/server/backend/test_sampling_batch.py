from collections import Counter

import numpy as np

from llmservice_server.backend.sampling_batch import stream_states, uniforms


def splitmix64(seed: int, position: int) -> float:
    """In Python integers: seeded outputs stay the same in later versions."""
    mask = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = mix((seed & mask) ^ gamma)
    return (mix((state + gamma * (position + 1)) & mask) >> 11) / (1 << 53)


def test_uniforms_are_evenly_distributed_and_repeatable() -> None:
    seeds = [seed for seed in range(-50, 50) for _ in range(100)]
    places = np.tile(np.arange(100), 100)
    numbers = uniforms(stream_states(seeds), places).tolist()
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    tenths = Counter(int(number * 10) for number in numbers)
    assert all(900 < tenths[tenth] < 1100 for tenth in range(10))
    assert uniforms(stream_states(seeds), places).tolist() == numbers


def test_a_number_depends_on_its_seed_and_position_only() -> None:
    together = uniforms(stream_states([7, -1, 2**64 - 1, 9]), np.array([0, 5, 5, 1000]))
    assert together[1] == together[2]  # the same 64 bits
    assert together[3] == uniforms(stream_states([9]), np.array([1000]))[0]
    assert together.tolist() == [splitmix64(*place) for place in ((7, 0), (-1, 5), (-1, 5), (9, 1000))]
