from __future__ import annotations

import pytest
import torch

from llmservice_server.sampling.logprobs import Logprobs


def test_each_row_tells_its_token_and_its_own_number_of_likeliest() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    told = Logprobs.of(logits, torch.tensor([4, 0, 19]), 20).as_messages([4, 0, 19], [0, 3, 20])
    reference = logits.double() - logits.double().exp().sum(-1, keepdim=True).log()
    for row, entry in enumerate(told):
        assert entry.logprob == pytest.approx(float(reference[row, entry.token_id]), abs=1e-5)
        ranked = reference[row].argsort(descending=True).tolist()
        assert [token for token, _ in entry.top] == ranked[: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(
            [float(reference[row, token]) for token, _ in entry.top], abs=1e-5
        )
    assert [entry.token_id for entry in told] == [4, 0, 19]
    assert [len(entry.top) for entry in told] == [0, 3, 20]


def test_no_more_are_told_than_the_vocabulary_has() -> None:
    [entry] = Logprobs.of(torch.zeros(1, 3), torch.tensor([1]), 20).as_messages([1], [20])
    assert len(entry.top) == 3
