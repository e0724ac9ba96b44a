"""Text of a wanted number of tokens, for a tokenizer that only the server knows.

The server says in `usage` how many tokens a prompt had: two prompts of known word counts give tokens per word and the
template's share, and from then on words are counted out instead of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

WORDS = tuple(Path(__file__).with_name("prompt_words.txt").read_text(encoding="utf-8").split())
PROBE_WORDS = (32, 160)


@dataclass(frozen=True, slots=True)
class WordRate:
    """`tokens = fixed + per_word · words`, as measured on the server's own tokenizer."""

    fixed: float
    per_word: float

    @classmethod
    def fitted(cls, few: int, many: int) -> WordRate:
        """From the token counts of prompts of `PROBE_WORDS` words.

        Raises:
            ValueError: the longer prompt did not count more tokens: the server's usage cannot be trusted.
        """
        if many <= few:
            raise ValueError(
                f"the server counted {few} and {many} tokens for {PROBE_WORDS[0]} and {PROBE_WORDS[1]} words"
            )
        per_word = (many - few) / (PROBE_WORDS[1] - PROBE_WORDS[0])
        return cls(max(0.0, few - per_word * PROBE_WORDS[0]), per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


def make_prompt(num_words: int, rng: np.random.Generator) -> str:
    """Random words, so that no prompt is another's prefix and a prefix cache finds nothing by accident."""
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=num_words))
