from hypothesis import given
from hypothesis import strategies as st

from llmservice_server.engine.request import TokenHistory

TOKENS = st.lists(st.integers(0, 30), max_size=40)


@given(prompt=TOKENS, answer=TOKENS)
def test_the_prompts_tokens_stand_there_once_and_the_answers_as_often_as_they_came(
    prompt: list[int], answer: list[int]
) -> None:
    history = TokenHistory(prompt, max_tokens=len(answer))
    for token in answer:
        history.append(token)
    assert history.answer.tolist() == answer
    assert sorted(history.everything.tolist()) == sorted([*set(prompt), *answer])
