"""Many users in conversations of several rounds, as LMBenchmark's multi-round QA sends them: time to first token.

The client has the shape of that benchmark: every user has a prompt of its own behind a system prompt that all share,
asks again at a fixed pace, and waits for its last answer first; a user who is through is replaced by a new one, and the
first users begin in the middle of their conversations. Engines take turns, each in a process of its own:

    python -m benchmarks.conversations [--users 10,16] [--rate 1.2,2.4] [--only plain,kvbm-host,native-host] [--turns 3]

The tiers are large enough for all conversations of one run, the device cache is not. Where the engine cannot compute
the first rounds as fast as they come, every figure is that of a queue: ask for fewer tokens then (`--user-tokens`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from benchmarks.engine import (
    BLOCK_TOKENS,
    Scenario,
    add_engine_arguments,
    end_with_children,
    in_own_process,
    passed_on,
    prepare_environment,
)
from benchmarks.ttft import SCENARIOS, TITLES, WIDTH, scenario
from kvbm.present.tables import plain_table, save_json
from kvbm.testing.tiny_model import SHAPES, Size, make_model

TOKENS_ABOVE = 4000
"""Tokens of prompts are numbers from 10 up to this."""
QUESTION_TOKENS = 20
DRAIN_S_MAX = 120.0
BUDGETS = {"kvbm-host": 0.9, "kvbm-disk": 1.0}
"""Mean and p95 against vLLM's own offloading from host memory."""
PASSED_ON = (
    *("users", "rate", "rounds", "seconds", "shared-tokens", "user-tokens", "answer-tokens", "max-model-len"),
    *("max-num-seqs", "device-blocks", "host-blocks", "disk-blocks", "tight-blocks"),
)
"""The options of a measurement in a process of its own."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the users do. Tokens are counts, `rate` is requests a second of all users together."""

    users: int
    rounds: int
    rate: float
    shared_tokens: int
    user_tokens: int
    answer_tokens: int
    seconds: float

    @property
    def pause_s(self) -> float:
        """Between two requests of one user."""
        return self.users / self.rate

    @property
    def joining_s(self) -> float:
        """Between two users who join: each stays for `rounds` requests."""
        return self.pause_s * (self.rounds - 1) / self.users


@dataclass(slots=True)
class User:
    """One conversation: its number, its tokens so far, how many rounds were asked, and when the last one was due."""

    number: int
    tokens: list[int]
    asked: int
    last_s: float
    waits: bool = False


@dataclass(slots=True)
class Sent:
    """One request: when it was sent after the start, its prompt's length, what was cached, and the first token."""

    sent_s: float
    prompt_tokens: int
    first_s: float = 0.0
    cached_tokens: int = 0


class Users:
    """The users' timetable: pure, driven by a clock that starts at 0."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.seed = seed
        self.present: list[User] = []
        self._created = 0
        self._joined_s = 0.0
        self._shared = _tokens(f"{seed}-shared", load.shared_tokens)
        # As if users had been joining for a whole conversation before the start.
        for number in range(self.load.users):
            offset_s = (self.load.users - number) * self.load.joining_s
            passed = int(offset_s / self.load.pause_s) + 1
            self._join(passed, (passed - 1) * self.load.pause_s - offset_s)

    def due(self, now_s: float) -> Iterator[User]:
        """Users whose next request is due, a user who has none left being replaced by a new one."""
        if now_s - self._joined_s > self.load.joining_s:
            self._joined_s = now_s
            self._join(0, now_s - self.load.pause_s)
        self.present = [user for user in self.present if user.waits or user.asked < self.load.rounds]
        for user in self.present:
            if not user.waits and now_s - user.last_s >= self.load.pause_s:
                user.last_s, user.waits = now_s, True
                user.asked += 1
                user.tokens += _tokens(f"{self.seed}-{user.number}-{user.asked}", QUESTION_TOKENS)
                yield user

    def _join(self, asked: int, last_s: float) -> None:
        number, self._created = self._created, self._created + 1
        own = _tokens(f"{self.seed}-{number}", self.load.user_tokens)
        self.present.append(User(number, [*self._shared, *own], asked, last_s))


def _tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, TOKENS_ABOVE) for _ in range(count)]


async def serve(engine: Any, load: Load, seed: int) -> list[Sent]:
    """Run the load against an `AsyncLLM`; every request, answered.

    Raises RuntimeError when some are not answered `DRAIN_S_MAX` after the last was sent, and what a request raised.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=load.answer_tokens, temperature=0.0, ignore_eos=True)
    users, sent, tasks = Users(load, seed), list[Sent](), list[asyncio.Task[None]]()
    start_s = time.perf_counter()

    async def ask(user: User, number: int) -> None:
        begun_s = time.perf_counter()
        row = Sent(begun_s - start_s, len(user.tokens))
        answer: list[int] = []
        async for output in engine.generate({"prompt_token_ids": list(user.tokens)}, sampling, str(number)):
            if not row.first_s:
                row.first_s = time.perf_counter() - begun_s
                row.cached_tokens = int(output.num_cached_tokens or 0)
            answer = list(output.outputs[0].token_ids)
        user.tokens += answer
        user.waits = False
        sent.append(row)

    number = 0
    while (now_s := time.perf_counter() - start_s) < load.seconds:
        for user in users.due(now_s):
            number += 1
            tasks.append(asyncio.create_task(ask(user, number)))
        await asyncio.sleep(0.02)
    answered, unanswered = await asyncio.wait(tasks, timeout=DRAIN_S_MAX) if tasks else (set(), set())
    for task in answered:
        task.result()
    if unanswered:
        raise RuntimeError(f"{len(unanswered)} of {len(tasks)} requests were not answered")
    return sent


async def measure(model: str, chosen: Scenario, options: argparse.Namespace) -> list[Sent]:
    """One engine under one load."""
    prepare_environment(chosen)
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {}
    if chosen.transfer_config is not None:
        arguments["kv_transfer_config"] = chosen.transfer_config
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=2048,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=options.device_blocks,
            **arguments,
        )
    )
    try:
        warm = {"prompt_token_ids": _tokens("warm", 3000)}
        async for _ in engine.generate(warm, SamplingParams(max_tokens=4, ignore_eos=True), "warm"):
            pass
        return await serve(engine, load_of(options), options.turn)
    finally:
        engine.shutdown()


def load_of(options: argparse.Namespace) -> Load:
    """The load that was asked for."""
    return Load(
        options.users[0],
        options.rounds,
        options.rate[0],
        options.shared_tokens,
        options.user_tokens,
        options.answer_tokens,
        options.seconds,
    )


def set_up(options: argparse.Namespace, block_bytes: int, scratch: Path) -> Scenario:
    """The engine of this process, its tiers of the asked sizes."""
    on_disk = options.scenario in ("kvbm-disk", "native-fs")
    roomy = options.disk_blocks if on_disk else options.host_blocks
    return scenario(options.scenario, roomy, options.tight_blocks, block_bytes, scratch)


def render(rows: list[dict[str, Any]], users: int, rate: float) -> Table:
    """The table: times in seconds, and against vLLM's own host tier, where the budget is on both ratios."""
    title = f"Conversations of {users} users, {rate:g} requests/s: time to first token, against vLLM's own"
    columns = ("engine", "budget", "requests", "mean s", "p50 s", "p95 s", "cached", "mean ×", "p95 ×")
    table = plain_table(columns, words={"engine"}, title=title)
    peer = next((row for row in rows if row["scenario"] == "native-host"), None)
    for row in rows:
        ratios = [f"{row[key] / peer[key]:.2f}" if peer else "–" for key in ("mean_s", "p95_s")]
        times = [f"{row[key]:.3f}" for key in ("mean_s", "p50_s", "p95_s")]
        budget = BUDGETS.get(row["scenario"])
        cells = [f"≤ {budget} ×" if budget else "–", f"{row['requests']:g}", *times, f"{row['cached']:.0%}"]
        table.add_row(TITLES[row["scenario"]], *cells, *ratios)
    return table


def summarise(name: str, turns: list[list[list[float]]]) -> dict[str, Any]:
    """One row of an engine: the median over its turns of each figure."""
    figures = []
    for turn in turns:
        times = sorted(first_s for _, _, first_s, _ in turn)
        cached = sum(row[3] for row in turn) / sum(row[1] for row in turn)
        figures.append(
            {
                "requests": len(times),
                "mean_s": statistics.fmean(times),
                "p50_s": statistics.median(times),
                "p95_s": times[min(len(times) - 1, int(0.95 * len(times)))],
                "cached": cached,
            }
        )
    return {"scenario": name, **{key: statistics.median(f[key] for f in figures) for key in figures[0]}}


def main() -> int:
    """The whole benchmark; exit status 0 when it could be measured, whatever the numbers say."""
    options = _arguments()
    end_with_children()
    console = Console(stderr=True)
    size = cast("Size", options.size)
    block_bytes = SHAPES[size].kv_bytes_per_token(options.dtype) * BLOCK_TOKENS
    options.output.mkdir(parents=True, exist_ok=True)
    model = str(
        make_model(options.output.absolute() / "models" / f"{size}-{options.dtype}", size, options.dtype)
    )
    if options.scenario:
        with tempfile.TemporaryDirectory(prefix="conversations-", dir=options.output.absolute()) as scratch:
            sent = asyncio.run(measure(model, set_up(options, block_bytes, Path(scratch)), options))
        rows = [[row.sent_s, row.prompt_tokens, row.first_s, row.cached_tokens] for row in sent]
        Path(options.result).write_text(json.dumps(rows))
        return 0
    loads, tables = [], []
    for users, rate in zip(options.users, options.rate, strict=True):
        measured = take_turns(options, users, rate, console)
        rows = [summarise(name, turns) for name, turns in measured.items()]
        loads.append({"users": users, "rate": rate, "rows": rows, "requests": measured})
        tables.append(render(rows, users, rate))
        save_json(loads, options.output / "conversations.json")
    Console(width=max(WIDTH, Console().width)).print(*tables)
    return 0


def take_turns(
    options: argparse.Namespace, users: int, rate: float, console: Console
) -> dict[str, list[list[list[float]]]]:
    """The requests of each engine's turns under one load."""
    measured: dict[str, list[list[list[float]]]] = {name: [] for name in options.only}
    for turn in range(options.turns):
        for name in options.only if turn % 2 == 0 else reversed(options.only):
            chosen = {key: getattr(options, key.replace("-", "_")) for key in PASSED_ON}
            chosen |= {"users": users, "rate": rate}
            arguments = passed_on(options, **chosen, scenario=name, turn=turn)
            measured[name].append(in_own_process("benchmarks.conversations", arguments, options.timeout))
            row = summarise(name, measured[name][-1:])
            console.print(f"turn {turn + 1}, {name}: mean {row['mean_s']:.3f} s, p95 {row['p95_s']:.3f} s")
    return measured


def _numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[int | float, ...]]:
    return lambda text: tuple(map(kind, text.split(",")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.set_defaults(size="demo")
    parser.add_argument("--users", type=_numbers(int), default=(10, 16), help="in conversation at a time")
    parser.add_argument(
        "--rate",
        type=_numbers(float),
        default=(1.2, 2.4),
        help="requests a second of all users, for each --users",
    )
    parser.add_argument("--rounds", type=int, default=8, help="of one conversation")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of one run")
    parser.add_argument("--shared-tokens", type=int, default=500, help="of the prompt that all users share")
    parser.add_argument("--user-tokens", type=int, default=3000, help="of each user's own prompt")
    parser.add_argument("--answer-tokens", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--device-blocks", type=int, default=90)
    parser.add_argument("--host-blocks", type=int, default=600)
    parser.add_argument("--disk-blocks", type=int, default=800)
    parser.add_argument("--tight-blocks", type=int, default=100, help="host memory above a disk")
    parser.add_argument("--turns", type=int, default=3, help="how often the engines take turns")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(name for name in SCENARIOS if name in text.split(",")),
        default=("plain", "kvbm-host", "kvbm-disk", "native-host"),
        help="comma-separated: " + ", ".join(SCENARIOS),
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if len(options.users) != len(options.rate):
        parser.error(f"--users has {len(options.users)} numbers and --rate {len(options.rate)}: one each")
    return options


if __name__ == "__main__":
    sys.exit(main())
