"""Two ranks, or two engines, at one host memory: each process maps it, page-locks it, and copies to and from it."""

from __future__ import annotations

import json
import os
import select
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from gpu_children import die_with_parent
from gpu_rig import PAGE, PREPARED_S, Rig, Sizes, Trial, mapped_arena, views
from kvbm.errors import KvbmError
from kvbm.transfer import Copier, DeviceCache
from kvbm.transfer.cuda.copier import CudaCopier

ANSWER_S = PREPARED_S + 30.0


def check_two_processes(trial: Trial) -> None:
    """Both prepare at once, without turns. Then each stores, and the other one loads what was stored."""
    result, sizes = trial.result, trial.sizes
    slots = sizes.untouched_bytes // sizes.block_bytes
    file = os.memfd_create("arena")
    os.ftruncate(file, slots * sizes.block_bytes)
    # Before this process has a context: one that is forked could not be used.
    other = Other.fork(lambda wire: serve(trial, file, slots, wire))
    begun_s = time.perf_counter()
    with side_of(trial.rig, sizes, file, slots) as side:
        result.begin("both prepare")
        other.begin("prepared")
        mine, theirs = side.prepared(), other.answer()
        result.add("two processes at one memory, both prepared after", time.perf_counter() - begun_s, "s")
        result.check("this process is prepared in time", mine)
        result.check("the other process is prepared in time", theirs)
        if isinstance(side.copier, CudaCopier) and not side.copier.locks.refusal:
            result.check("the other process could lock its pages too", other.ask("locked"))
        result.begin("this process stores, the other one loads")
        side.store(1)
        result.check("what this process stored the other one loads", other.ask("load", 1))
        result.begin("the other process stores, this one loads")
        result.check("the other process stored", other.ask("store", 2))
        result.check("what the other process stored this one loads", side.load(2))
    other.ask("close")
    os.close(file)


@dataclass
class Side:
    """One process's own cache, and its copier between that and the shared memory."""

    rig: Rig
    cache: DeviceCache
    copier: Copier
    pairs: list[tuple[int, int]]

    def prepared(self) -> bool:
        """Lock all pages, and wait for that."""
        return not isinstance(self.copier, CudaCopier) or self.copier.prepared(PREPARED_S)

    def locked(self) -> bool:
        """Whether nothing refused that."""
        return isinstance(self.copier, CudaCopier) and not self.copier.locks.refusal

    def store(self, seed: int) -> bool:
        """Store bytes that both processes can make."""
        self._kv.copy_(self._bytes(seed))
        self.copier.store(self.pairs)
        return True

    def load(self, seed: int) -> bool:
        """Load them, and compare."""
        self._kv.zero_()
        self.copier.load(self.pairs)
        self.rig.synchronize()
        return bool(torch.equal(self._kv.cpu(), self._bytes(seed)))

    @property
    def _kv(self) -> torch.Tensor:
        return self.cache.regions[0].device

    def _bytes(self, seed: int) -> torch.Tensor:
        words = self._kv
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 1 << 30, words.shape, generator=generator).to(words.dtype)


@contextmanager
def side_of(rig: Rig, sizes: Sizes, file: int, slots: int) -> Iterator[Side]:
    """This process's side of the memory behind `file`. Its blocks go to the last slots: those are locked last."""
    blocks = min(sizes.blocks, slots)
    cache = DeviceCache.from_tensors(views(rig, "LBNHC", sizes, blocks), blocks)
    arena = mapped_arena(file, slots, sizes.block_bytes)
    pairs = [(block, slots - 1 - block) for block in range(blocks)]
    with rig.copier(cache, arena, "auto", prepared=False) as copier:
        yield Side(rig, cache, copier, pairs)


def serve(trial: Trial, file: int, slots: int, wire: Wire) -> None:
    """The other process: do what is asked until it is told to close."""
    with side_of(trial.rig, trial.sizes, file, slots) as side:
        while (asked := wire.get())["what"] != "close":
            work = getattr(side, asked["what"])
            wire.put(work(asked["seed"]) if asked["seed"] else work())
    wire.put(True)


class Wire:
    """Lines of JSON between two processes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = (
            os.fdopen(reading, "rb", buffering=0),
            os.fdopen(writing, "wb", buffering=0),
        )

    def put(self, message: Any) -> None:
        self._writing.write(json.dumps(message).encode() + b"\n")

    def get(self) -> Any:
        """The next message. Raises KvbmError if none comes in time, or the other process has ended."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._reading], [], [], ANSWER_S)[0]:
                raise KvbmError(f"the other process has not answered in {ANSWER_S:g} s")
            more = self._reading.read(PAGE)
            if not more:
                raise KvbmError("the other process has ended")
            line += more
        return json.loads(line)


class Other:
    """The other process, as this one sees it. It is killed when this one ends."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    @classmethod
    def fork(cls, life: Callable[[Wire], None]) -> Other:
        """A process that does this alone."""
        to_it, from_it = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(to_it[1])
            os.close(from_it[0])
            _live(life, Wire(to_it[0], from_it[1]))
        os.close(to_it[0])
        os.close(from_it[1])
        return cls(Wire(from_it[0], to_it[1]))

    def ask(self, what: str, seed: int = 0) -> bool:
        """Have it do that, and wait for its answer. Raises KvbmError if it could not."""
        self.begin(what, seed)
        return self.answer()

    def begin(self, what: str, seed: int = 0) -> None:
        """Have it do that."""
        self._wire.put({"what": what, "seed": seed})

    def answer(self) -> bool:
        """What came of it. Raises KvbmError if it could not."""
        answer = self._wire.get()
        if isinstance(answer, str):
            raise KvbmError(f"in the other process: {answer}")
        return bool(answer)


def _live(life: Callable[[Wire], None], wire: Wire) -> NoReturn:
    code = 1
    try:
        die_with_parent()
        life(wire)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        wire.put(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)
