"""A client of a vLLM server over HTTP: readiness, tokens, streamed chat, metrics pages.

Only the standard library, one connection per request, a timeout on every read. Called from one thread; every call
blocks until the answer is complete.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


LIKELIEST = 20
"""vLLM's limit, unless its operator raises it."""


class RequestError(RuntimeError):
    """A request failed: refused, timed out, or answered with an error. Names the method, the path and the cause."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed chat completion. Times in seconds from sending the request."""

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int


Likelihoods = tuple[dict[int, float], ...]
"""Natural logarithms of the probabilities of each step's `LIKELIEST` tokens."""


class Client:
    """Talks to one server."""

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s

    @contextlib.contextmanager
    def _send(
        self, method: str, path: str, body: Any, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                reason = response.read(2000).decode(errors="replace")
                raise RequestError(f"{method} {path}: HTTP {response.status}: {reason}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{method} {path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether the server answers its health check. Raises RequestError while it does not listen yet."""
        with self._send("GET", "/health", None, 2.0):
            return True

    def page(self, path: str = "/metrics") -> str:
        """A page as text."""
        with self._send("GET", path, None, min(self._timeout_s, 20.0)) as response:
            return response.read().decode(errors="replace")

    def token_ids(self, model: str, text: str) -> list[int]:
        """`text` as the model's tokens, without special ones."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        with self._send("POST", "/tokenize", body, self._timeout_s) as response:
            return [int(token) for token in json.load(response)["tokens"]]

    def text_of(self, model: str, token_ids: list[int]) -> str:
        """Tokens as text."""
        with self._send(
            "POST", "/detokenize", {"model": model, "tokens": token_ids}, self._timeout_s
        ) as response:
            return str(json.load(response)["prompt"])

    def chat(self, model: str, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        """A greedy chat completion of exactly `max_tokens` tokens, streamed.

        The time to first token ends with the first chunk that carries a token, not with the one that names the role.
        """
        body = {"messages": messages, "return_token_ids": True}
        return self._streamed("/v1/chat/completions", model, body, max_tokens)

    def likelihoods(
        self, model: str, messages: list[dict[str, str]], count: int, salt: str
    ) -> tuple[tuple[int, ...], Likelihoods]:
        """The tokens of `chat` and their likelihoods, computed without cached blocks: none has this `salt`."""
        body = _greedy(model, count) | {
            "messages": messages,
            "cache_salt": salt,
            "logprobs": True,
            "top_logprobs": LIKELIEST,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # as `token_id:N`
        }
        with self._send("POST", "/v1/chat/completions", body, self._timeout_s) as response:
            choice = json.load(response)["choices"][0]
        steps = [step["top_logprobs"] for step in choice["logprobs"]["content"]]
        likelihoods = (
            {int(top["token"].partition(":")[2]): float(top["logprob"]) for top in step} for step in steps
        )
        return tuple(choice["token_ids"]), tuple(likelihoods)

    def complete(self, model: str, tokens: Sequence[int], max_tokens: int) -> Answer:
        """A greedy completion of exactly `max_tokens` tokens after these, streamed."""
        return self._streamed("/v1/completions", model, {"prompt": list(tokens)}, max_tokens)

    def _streamed(self, path: str, model: str, body: dict[str, Any], max_tokens: int) -> Answer:
        greedy = _greedy(model, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        sent = time.perf_counter()
        ttft_s: float | None = None
        pieces: list[str] = []
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        with self._send("POST", path, greedy | body, self._timeout_s) as response:
            for event in _events(response):
                if "error" in event:
                    raise RequestError(f"POST {path}: {event['error']}")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    new_tokens = choice.get("token_ids") or ()
                    if ttft_s is None and (piece or new_tokens):
                        ttft_s = time.perf_counter() - sent
                    pieces.append(piece)
                    tokens.extend(new_tokens)
        if ttft_s is None:
            raise RequestError(f"POST {path}: the stream ended without a token")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(pieces),
            token_ids=tuple(tokens),
            ttft_s=ttft_s,
            total_s=time.perf_counter() - sent,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
        )


def _greedy(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": max_tokens, "temperature": 0.0, "seed": 0, "ignore_eos": True}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream, up to its end mark."""
    for raw in response:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
