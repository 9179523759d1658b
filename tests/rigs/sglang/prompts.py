"""What the tests under SGLang ask: prompts of random tokens, and how much of each can be found again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rigs.sglang.engine_process import Answer
from rigs.sglang.modes import PAGE_TOKENS

PROMPTS = 6
PROMPT_TOKENS = 400
PAGES = PROMPT_TOKENS // PAGE_TOKENS
"""Pages that one prompt fills, all of which are stored."""
HIT_TOKENS = PROMPT_TOKENS - PAGE_TOKENS
"""What of a prompt of whole pages can be found: an engine computes at least one token."""
ROUNDS = 3
FIRST_TOKEN, LAST_TOKEN = 10, 4000


def prompts(seed: int = 0, count: int = PROMPTS, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Prompts without a common beginning."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)] for _ in range(count)]


def texts(answers: Sequence[Answer]) -> list[list[int]]:
    """The tokens of each answer."""
    return [answer.tokens for answer in answers]


def different(answers: Sequence[Answer], reference: Sequence[Sequence[int]]) -> int:
    """How many answers are not those of the reference, which may be shorter and is then repeated."""
    return sum(answer.tokens != list(reference[i % len(reference)]) for i, answer in enumerate(answers))
