"""The requests: long documents, each with several short questions, in an order with short and long gaps.

Pure: nothing here starts anything or reads a clock. The documents are modules of the Python standard library, so
nothing is downloaded, and they are cut to a length in tokens of whatever model is served.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import msgspec

ORDER_SEED = 0
DOCUMENTS = ("argparse", "inspect", "typing", "tarfile", "subprocess", "doctest", "mailbox", "pickle")
WARM_UP_DOCUMENT = "threading"
SYSTEM_PROMPT = "Answer questions about this Python module.\n\n"
QUESTIONS = (
    "Which classes does it define?",
    "What would you test first?",
    "Name one function that could be shorter, and say why.",
    "Which errors can a caller expect?",
    "Is it safe to use from two threads?",
    "Explain the first function to a newcomer.",
    "What does it import, and what for?",
    "Which names are public?",
)
# The chat template and the longest question fit in here, with room for tokenizers that need more.
QUESTION_TOKENS_MAX = 120


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request: a question about a document. `seen` tells whether an earlier request had the same document."""

    document: int
    question: int
    seen: bool


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one experiment and the sizes that follow from them. Counts in engine blocks, rounded up."""

    document_count: int
    request_count: int
    prefix_tokens: int
    max_tokens: int
    block_tokens: int

    @property
    def request_blocks(self) -> int:
        """Blocks that one request takes at most."""
        return -(-(self.prefix_tokens + QUESTION_TOKENS_MAX + self.max_tokens) // self.block_tokens)

    @property
    def max_model_len(self) -> int:
        """Tokens that one request may have."""
        return self.request_blocks * self.block_tokens

    @property
    def device_blocks(self) -> int:
        """A device cache for one request at a time: the null block, the request, and two to breathe."""
        return self.request_blocks + 3

    @property
    def working_set_blocks(self) -> int:
        """Blocks that keep everything that the requests and the warm-up make."""
        prefix_blocks = self.prefix_tokens // self.block_tokens
        tail_blocks = self.request_blocks - prefix_blocks
        return (self.document_count + 1) * prefix_blocks + (self.request_count + 2) * tail_blocks

    @property
    def small_host_blocks(self) -> int:
        """A host tier below the working set: about two and a half requests."""
        return self.request_blocks * 5 // 2


def schedule(document_count: int, request_count: int, seed: int = ORDER_SEED) -> tuple[Ask, ...]:
    """The requests in order. Documents are asked about equally often, and never twice in a row if it can be helped.

    The order mixes short and long gaps between two questions about one document, so a small host tier serves some
    of them and the disk the others. The same arguments always give the same order.

    Raises ValueError when a count is out of range.
    """
    if not 0 < document_count <= len(DOCUMENTS):
        raise ValueError(f"document_count={document_count}: expected 1 to {len(DOCUMENTS)}")
    if request_count < document_count:
        raise ValueError(f"request_count={request_count}: expected at least document_count={document_count}")
    rng = random.Random(seed)
    left = [request_count // document_count] * document_count
    for document in range(request_count % document_count):
        left[document] += 1
    asks: list[Ask] = []
    asked = [0] * document_count
    last = -1
    for _ in range(request_count):
        weights = [0 if document == last else count for document, count in enumerate(left)]
        if not any(weights):
            weights = left
        last = rng.choices(range(document_count), weights)[0]
        asks.append(Ask(document=last, question=asked[last] % len(QUESTIONS), seen=asked[last] > 0))
        asked[last] += 1
        left[last] -= 1
    return tuple(asks)


def document_text(name: str) -> str:
    """The source of a module of the standard library."""
    return (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")


def messages(prefix: str, question: int) -> list[dict[str, str]]:
    """A chat: the document as the system's word, then a short question."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT + prefix},
        {"role": "user", "content": QUESTIONS[question % len(QUESTIONS)]},
    ]
