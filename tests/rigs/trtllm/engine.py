"""The double: TensorRT-LLM's iteration around the real connector, on a toy model whose KV can be checked.

One `iterate` makes the calls in the engine's order: match, allocation, metadata, each
rank's load, forward pass and save, then the requests that end, then `get_finished` of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rigs.trtllm.allocator import Allocator
from rigs.trtllm.model import BLOCK_TOKENS
from rigs.trtllm.package import RequestData, SchedulerOutput
from rigs.trtllm.ranks import Rank, RankProcess, Spec, Work, connector_module, llm_args

ITERATIONS_MAX = 4000
PLACEHOLDER = 999
"""A token that stands for an image."""


@dataclass(eq=False)
class Request:
    """A prompt to be continued by `max_tokens`. The C++ half of the real one has the names without `py_`."""

    request_id: int
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_lora_path: str | None = None
    priorities: list[int] | None = None
    multimodal_positions: list[int] | None = None
    multimodal_lengths: list[int] | None = None
    multimodal_hashes: list[list[int]] | None = None
    py_multimodal_data: dict[str, Any] | None = None
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    computed: int = 0
    """How many tokens have their KV."""
    on_device: int = 0
    promised: int = 0
    told_tokens: int = 0
    told_blocks: int = 0
    runs: int = 0
    done: bool = False

    @property
    def cache_salt_id(self) -> int | None:
        return None if self.cache_salt is None else sum(map(ord, self.cache_salt)) + 1

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def shaped(self) -> list[int]:
        """What shapes the KV of each token beside it: the adapter, and the media that it stands for."""
        found = [(self.lora_task_id or 0) * 31] * len(self.tokens)
        named = zip(
            self.multimodal_positions or (),
            self.multimodal_lengths or (),
            self.multimodal_hashes or (),
            strict=True,
        )
        for start, length, content in named:
            for position in range(start, start + length):
                found[position] += sum(content)
        if self.py_multimodal_data:
            found = [
                each + 77 * (token == PLACEHOLDER) for each, token in zip(found, self.tokens, strict=True)
            ]
        return found

    @property
    def extra(self) -> tuple[object, ...]:
        """What the device's cache keeps apart."""
        return self.cache_salt, self.lora_task_id, str(self.multimodal_hashes), str(self.py_multimodal_data)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Engine:
    """Serves requests, `batch` at a time, in chunks of `chunk` tokens. `connected` is False for the reference."""

    def __init__(
        self, spec: Spec, connected: bool = True, batch: int = 2, chunk: int = 0, graph: bool = True
    ) -> None:
        self.spec = spec
        self.blocks = Allocator(spec.device_blocks, spec.partial_reuse)
        self._batch, self._chunk, self._graph = batch, chunk, graph
        self.module = connector_module(spec.version) if connected else None
        # The others first: the first rank's constructor must not wait for them either.
        self.others = [RankProcess(spec, rank, connected) for rank in range(1, spec.ranks)]
        self.leader = (
            self.module.DynamoKVBMConnectorLeader(llm_args(spec, 0)) if self.module is not None else None
        )
        self.first = Rank(spec, 0, self.module)
        for other in self.others:
            assert other.answer() == "ready"
        if self.leader is not None:
            self.leader.wait_for_initialization()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # Requests that ended while their blocks were read, and those that each rank has given back.
        self.saving: dict[int, Request] = {}
        self._given_back: list[set[int]] = [set() for _ in range(spec.ranks)]
        self._new_saving: list[int] = []
        self._known: set[int] = set()
        self.computed_tokens = self.device_tokens = self.loaded_tokens = 0
        self.iterations = 0
        self.pause: Callable[[], None] = lambda: None
        """Between iterations: those of the toy model are shorter than any real one's."""

    # ---- what a test says

    def serve(self, *requests: Request) -> list[list[int]]:
        """Run these to their ends; what each of them generated."""
        for request in requests:
            request.tokens = request.tokens or list(request.prompt)
            self.waiting.append(request)
        while self.waiting or self.running:
            self.iterate()
        return [request.output for request in requests]

    def submit(self, request: Request) -> None:
        """The request comes; `iterate` serves it."""
        request.tokens = list(request.prompt)
        self.waiting.append(request)

    def iterate(self) -> None:
        """One iteration."""
        self.iterations += 1
        assert self.iterations < ITERATIONS_MAX, "the engine makes no progress"
        admitted = [self._admit() for _ in range(self._batch - len(self.running))]
        self.running += [request for request in admitted if request is not None]
        works, output = [], SchedulerOutput()
        for request in self.running:
            end = len(request.tokens)
            if self._chunk:
                end = min(end, request.computed + self._chunk)
            kind = output.cached_requests if request.request_id in self._known else output.new_requests
            kind.append(self._data(request, end))
            self._known.add(request.request_id)
            works.append(
                Work(list(request.table), list(request.tokens), request.computed, end, request.shaped)
            )
            self.computed_tokens += end - request.computed
        if self.running:
            metadata = self.leader.build_connector_meta(output) if self.leader is not None else None
            assert metadata is None or type(metadata) is bytes, "it is pickled and broadcast"
            tokens = self._forward(metadata, works)
            for request, work, token in zip(list(self.running), works, tokens, strict=True):
                self._advance(request, work.end, token)
        self._collect()
        self.pause()

    def preempt(self, request: Request) -> None:
        """Take the request's blocks; it runs again from the start."""
        self.running.remove(request)
        self._end(request)
        self._again(request)

    def reset(self, request: Request) -> None:
        """As the second manager does it: the allocation dies, and the request is a new one."""
        self.running.remove(request)
        self.leader.request_reset(request)
        self.blocks.give_back(request.table)
        self._known.discard(request.request_id)
        request.told_tokens = request.told_blocks = 0
        self._again(request)

    def abort(self, request: Request) -> None:
        """The client has gone."""
        if request in self.running:
            self.running.remove(request)
            self._end(request)
        else:
            self.waiting.remove(request)

    def close(self) -> None:
        for other in self.others:
            other.close()
        self.first.close()
        if self.leader is not None:
            self.leader.close()

    # ---- an iteration

    def _admit(self) -> Request | None:
        """The next request, if there are blocks for all of its tokens."""
        if not self.waiting:
            return None
        request = self.waiting[0]
        extra = request.extra
        found, alike, source = self.blocks.match(request.tokens, extra)
        count = -(-(len(request.prompt) + request.max_tokens) // BLOCK_TOKENS) - len(found)
        in_use = sum(block in self.blocks._free for block in found)
        if self.blocks.free - in_use < count:
            return None
        self.waiting.popleft()
        on_device = len(found) * BLOCK_TOKENS + alike
        promised = 0
        if self.leader is not None:
            promised, waits = self.leader.get_num_new_matched_tokens(request, on_device)
            assert not waits
            assert on_device + promised < len(request.tokens), "one token at least is computed"
        request.table = self.blocks.take(found, count)
        if alike:
            self._copy(source, request.table[len(found)])
        request.on_device, request.promised = on_device, promised
        request.computed = on_device + promised
        request.runs += 1
        self.device_tokens += on_device
        self.loaded_tokens += promised
        if self.leader is not None:
            self.leader.update_state_after_alloc(request, list(request.table))
        return request

    def _copy(self, source: int, target: int) -> None:
        for other in self.others:
            other.ask("copy_block", source, target)
        self.first.copy_block(source, target)
        for other in self.others:
            other.answer()

    def _data(self, request: Request, end: int) -> RequestData:
        first = request.computed == request.on_device + request.promised and request.told_tokens == 0
        position = request.computed - (request.promised if first else 0)
        new_blocks = request.table[request.told_blocks :]
        priorities = None
        if request.priorities is not None:
            known = [*request.priorities, *([request.priorities[-1]] * len(request.table))]
            priorities = known[request.told_blocks : request.told_blocks + len(new_blocks)]
        data = RequestData(
            request.request_id,
            request.tokens[request.told_tokens :],
            new_blocks,
            position,
            end - request.computed,
            priorities=priorities,
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=[new_blocks] if self.spec.layout_groups else [],
        )
        request.told_tokens, request.told_blocks = len(request.tokens), len(request.table)
        return data

    def _forward(self, metadata: object, works: list[Work]) -> list[int]:
        for other in self.others:
            other.ask("step", metadata, works, self._graph)
        tokens = self.first.step(metadata, works, self._graph)
        for other in self.others:
            other.answer()
        return tokens

    def _advance(self, request: Request, end: int, token: int) -> None:
        extra = request.extra
        for block in range(request.computed // BLOCK_TOKENS, end // BLOCK_TOKENS):
            self.blocks.fill(request.table[block], request.tokens[: (block + 1) * BLOCK_TOKENS], extra)
        request.computed = end
        if end < len(request.tokens):
            return  # a chunk of its prompt
        request.tokens.append(token)
        if len(request.output) >= request.max_tokens:
            request.done = True
            self.running.remove(request)
            self._end(request)

    def _end(self, request: Request) -> None:
        table = list(request.table)
        if self.leader is not None and self.leader.request_finished(request, table):
            held = Request(request.request_id, [], 0, table=table)
            self.saving[request.request_id] = held
            self._new_saving.append(request.request_id)
        else:
            self.blocks.give_back(table)

    def _again(self, request: Request) -> None:
        request.table, request.computed, request.promised = [], 0, 0
        self.waiting.appendleft(request)

    def _collect(self) -> None:
        """Blocks that every rank has given back are free."""
        ended, self._new_saving = self._new_saving, []
        for other in self.others:
            other.ask("finished", ended)
        answers = [self.first.finished(ended), *(other.answer() for other in self.others)]
        for rank, answer in enumerate(answers):
            assert set(answer) <= set(self.saving), "only ids that were handed in may come back"
            self._given_back[rank].update(answer)
        for number in set.intersection(*self._given_back):
            self.blocks.give_back(self.saving.pop(number).table)
            for given in self._given_back:
                given.discard(number)


def reference(spec: Spec, requests: Sequence[Request]) -> list[list[int]]:
    """What these requests generate on an engine that never evicts and has no connector."""
    roomy = spec._replace(device_blocks=2048, ranks=1, partial_reuse=False)
    engine = Engine(roomy, connected=False, batch=1)
    copies = [Request(**{name: getattr(each, name) for name in _ASKED}) for each in requests]
    return engine.serve(*copies)


_ASKED = (
    "request_id",
    "prompt",
    "max_tokens",
    "cache_salt",
    "lora_task_id",
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
    "py_multimodal_data",
)
