"""One SGLang engine in a process of its own, which does what its lines of JSON say. `engine_nursery` forks it.

The first line holds the engine's arguments; each following one is `{"call": NAME, …}`. Every line is answered by one:
`{"result": …}` or `{"error": WORDS}`.
"""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import sglang
from safetensors import safe_open
from sglang.srt.managers.io_struct import GenerateReqInput

FLUSH_TIMEOUT_S = 30.0


class Child:
    """The engine, and what can be asked of it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engine = sglang.Engine(**arguments)

    def generate(
        self, prompts: list[list[int]], tokens: int, together: bool = False, **request: Any
    ) -> list[dict[str, Any]]:
        """Greedy answers, one prompt after the other or all at once; `request` holds fields of SGLang's requests."""
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        return [answer for batch in batches for answer in self._answers(batch, tokens, request)]

    def _answers(
        self, prompts: list[list[int]], tokens: int, request: dict[str, Any]
    ) -> list[dict[str, Any]]:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        fields = GenerateReqInput(input_ids=prompts, sampling_params=sampling, **request)
        begun_s = time.perf_counter()
        answers = self._wait(self._engine.tokenizer_manager.generate_request(fields, None).__anext__())
        taken_s = time.perf_counter() - begun_s
        return [
            {
                "tokens": answer["output_ids"],
                "cached": answer["meta_info"]["cached_tokens"],
                "from": answer["meta_info"].get("cached_tokens_details") or {},
                "finish": answer["meta_info"]["finish_reason"],
                "seconds": taken_s,
            }
            for answer in answers
        ]

    def _wait(self, awaitable: Any) -> Any:
        return self._engine.loop.run_until_complete(awaitable)

    def flush(self) -> bool:
        """Forget the KV on the device and in SGLang's host pool, once idle; what a storage keeps stays."""
        flushed = self._wait(self._engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S))
        return bool(flushed.success)

    def attach(self, **arguments: Any) -> tuple[bool, str]:
        """Attach a storage at run time."""
        answer = self._wait(self._engine.tokenizer_manager.attach_hicache_storage(**arguments))
        return answer.success, answer.message

    def detach(self) -> tuple[bool, str]:
        """Detach the storage."""
        answer = self._wait(self._engine.tokenizer_manager.detach_hicache_storage())
        return answer.success, answer.message

    def clear(self) -> bool:
        """Clear the storage."""
        return bool(self._wait(self._engine.tokenizer_manager.clear_hicache_storage()).success)

    def load_weights(self, path: str) -> tuple[bool, str]:
        """Other weights, from a file, while the engine runs."""
        answer = self._engine.update_weights_from_disk(path)
        return bool(answer[0]), str(answer[1])

    def scale_weight(self, weight: str, factor: float, path: str) -> tuple[bool, str]:
        """One weight of the model at `path` times a factor, handed over in memory."""
        with safe_open(str(Path(path) / "model.safetensors"), framework="pt") as file:
            scaled = file.get_tensor(weight) * factor
        self._engine.begin_weight_update()
        answer = self._engine.update_weights_from_tensor([(weight, scaled)])
        self._engine.end_weight_update()
        return bool(answer[0]), str(answer[1])

    def end(self) -> None:
        """Shut the engine down."""
        self._engine.shutdown()


def answer(reader: TextIO, writer: TextIO) -> None:
    """Serve lines until one says `end`, or there are no more."""
    child: Child | None = None
    for line in reader:
        words = json.loads(line)
        name = words.pop("call", "start")
        answered: dict[str, Any]
        try:
            if child is None:
                child, result = Child(words), None
            else:
                result = getattr(child, name)(**words)
            answered = {"result": result}
        except Exception:
            answered = {"error": traceback.format_exc()}
        writer.write(json.dumps(answered) + "\n")
        writer.flush()
        if name == "end":
            return
    if child is not None:
        child.end()
