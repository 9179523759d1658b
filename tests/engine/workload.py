"""The requests that every variant of the engine tests must answer alike.

Random token ids, seeded. Conversations share long prefixes and come back with what was said before; some prompts fill
their last block exactly and are asked twice; some are shorter than a block; some are aborted on the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.model_runners import V1, chosen

BLOCK_TOKENS = 32
MODEL_TOKENS_MAX = 768
FIRST_TOKEN, LAST_TOKEN = 10, 4000
PREFIX_TOKENS = (320, 256, 200, 416)


@dataclass(frozen=True)
class Request:
    """One request. With a `parent` its prompt is the parent's prompt, the parent's answer, then `tokens`.

    `abort_after` steps with the request in flight it is aborted; its answer is not compared. `lora` is the directory
    of an adapter, and `hint` what its client says of its future.
    """

    name: str
    tokens: tuple[int, ...]
    output_count: int
    parent: str = ""
    abort_after: int | None = None
    salt: str = ""
    lora: str = ""
    hint: object = None


def random_tokens(source: random.Random, count: int) -> tuple[int, ...]:
    """Token ids that mean nothing and never end a text."""
    return tuple(source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))


def workload(seed: int = 1) -> list[Request]:
    """118 requests, 106 of which are compared, in an order in which a prefix comes back after others used the room.

    A third of them where V2 was chosen, whose steps take ten times as long here.
    """
    return _requests(seed, 24) if chosen() == V1 else small_workload(seed)


def small_workload(seed: int = 1) -> list[Request]:
    """39 requests of the same kinds, 35 of which are compared."""
    return _requests(seed, 8)


def some(count: int) -> int:
    """As many of what `count` times happens under the whole workload as can be asked for under this one."""
    return count if chosen() == V1 else count // 5


def _requests(seed: int, talks: int) -> list[Request]:
    """For 24 talks 12 prompts of whole blocks, 10 short ones and 12 that are aborted, for fewer fewer."""
    source = random.Random(seed)
    prefixes = [random_tokens(source, count) for count in PREFIX_TOKENS]
    first: list[Request] = []
    second: list[Request] = []
    third: list[Request] = []
    for i in range(talks):
        tokens = prefixes[i % len(prefixes)] + random_tokens(source, source.randint(5, 70))
        first.append(Request(f"talk{i}-1", tokens, source.randint(16, 40)))
        second.append(Request(f"talk{i}-2", random_tokens(source, 20), source.randint(16, 40), f"talk{i}-1"))
        third.append(Request(f"talk{i}-3", random_tokens(source, 9), source.randint(8, 32), f"talk{i}-2"))
    for i in range(talks // 2):
        tokens = random_tokens(source, BLOCK_TOKENS * source.randint(2, 9))
        first.append(Request(f"exact{i}-1", tokens, source.randint(4, 24)))
        third.append(Request(f"exact{i}-2", tokens, source.randint(4, 24)))
    for i in range(10 * talks // 24):
        second.append(Request(f"short{i}", random_tokens(source, source.randint(1, 31)), 40))
    for i in range(talks // 2):
        tokens = prefixes[i % len(prefixes)] + random_tokens(source, source.randint(40, 200))
        (second, third)[i % 2].append(Request(f"abort{i}", tokens, 40, abort_after=i))
    for wave in (first, second, third):
        source.shuffle(wave)
    return first + second + third


def again(requests: Iterable[Request], suffix: str) -> list[Request]:
    """The same requests under other names: what was asked before is asked once more."""
    return [
        replace(request, name=request.name + suffix, parent=request.parent and request.parent + suffix)
        for request in requests
    ]
