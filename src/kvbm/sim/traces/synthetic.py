"""Made-up conversations for tests, examples and a first look: no file needed, the same on every machine.

Applications with a system prompt each, popular ones far more than others (Zipf); conversations arrive as a Poisson
process; every turn asks for the whole history and some new text, after a pause that is mostly short and sometimes
very long (log-normal). Some turns edit an earlier message and branch off there.
"""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass
from itertools import accumulate

from kvbm.sim.traces.trace import Trace, TraceBuilder


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The shape of the conversations; lengths are means, in tokens.

    `applications`: system prompts. `turns`: of a conversation (geometric). `pause_s`: median between an answer and
    the next turn; `pause_spread`: standard deviation of its logarithm. `edits`: share of turns that go back.
    """

    conversations: int = 400
    conversations_per_s: float = 0.2
    applications: int = 8
    system_tokens: int = 1500
    turns: float = 5.0
    question_tokens: int = 300
    answer_tokens: int = 250
    pause_s: float = 45.0
    pause_spread: float = 1.3
    edits: float = 0.05
    tokens_per_s: float = 40.0
    block_tokens: int = 64


def chats(
    shape: ChatShape = ChatShape(), seed: int = 0, time_scale: float = 1.0, limit: int | None = None
) -> Trace:
    """A trace of such conversations. The same arguments give the same trace; the last two as in `TraceBuilder`."""
    chance = random.Random(seed)
    builder = TraceBuilder("synthetic", shape.block_tokens)
    popularity = list(accumulate(1.0 / rank for rank in range(1, shape.applications + 1)))
    now_s = 0.0
    for conversation in range(shape.conversations):
        now_s += chance.expovariate(shape.conversations_per_s)
        application = chance.choices(range(shape.applications), cum_weights=popularity)[0]
        _converse(builder, shape, chance, conversation, application, now_s)
    return builder.build(time_scale, limit)


def _converse(
    builder: TraceBuilder,
    shape: ChatShape,
    chance: random.Random,
    conversation: int,
    application: int,
    now_s: float,
) -> None:
    """Add the requests of one conversation."""
    system_tokens = max(
        shape.block_tokens, round(shape.system_tokens * (0.5 + application / shape.applications))
    )
    history = _History(shape.block_tokens, application, conversation, system_tokens)
    ends: list[int] = []
    while True:
        if ends and chance.random() < shape.edits:
            history.go_back(chance.choice(ends))
        ends = [end for end in ends if end <= history.tokens] + [history.tokens]
        history.grow(1 + round(chance.expovariate(1 / shape.question_tokens)))
        output_tokens = 1 + round(chance.expovariate(1 / shape.answer_tokens))
        seconds = output_tokens / shape.tokens_per_s
        builder.add(now_s, history.blocks(), history.tokens, output_tokens, seconds)
        history.grow(output_tokens)
        if chance.random() < 1.0 / shape.turns:
            return
        now_s += seconds + shape.pause_s * math.exp(shape.pause_spread * chance.gauss(0.0, 1.0))


class _History:
    """The tokens of a conversation so far, as names of the full blocks that they fill."""

    def __init__(self, block_tokens: int, application: int, conversation: int, system_tokens: int) -> None:
        self._block_tokens = block_tokens
        # Negative names are shared by all conversations of an application; a version of the rest has names of its own.
        self._names = array("q", (-1 - (application << 32 | i) for i in range(system_tokens // block_tokens)))
        self._next_name = conversation << 32
        self.tokens = system_tokens

    def grow(self, tokens: int) -> None:
        """Append so many tokens that nobody has written before."""
        self.tokens += tokens
        while (len(self._names) + 1) * self._block_tokens <= self.tokens:
            self._names.append(self._next_name)
            self._next_name += 1

    def go_back(self, tokens: int) -> None:
        """Drop all but the first so many tokens."""
        self.tokens = tokens
        del self._names[tokens // self._block_tokens :]

    def blocks(self) -> array[int]:
        """Names of the full blocks."""
        return self._names[:]
