"""While the engine captures a CUDA graph: nothing that threads of ours do may end the capture.

The engine captures in the mode that forbids every thread what might be unsafe; a thread that relaxed its own mode is
exempt. The model complains of every such call by another one.
"""

from __future__ import annotations

import threading

import pytest

from kvbm.testing.kv_views import SLOTS
from kvbm.transfer.cuda import page_lock, staging
from rigs.cuda_bench import Bench, check_loads, check_stores, new_bench, wait_for_lock_call
from rigs.cuda_model import DEADLINE_S, PAGE, Model


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several locks, and a buffer of a few slots."""
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(staging, "STAGING_BYTES_MAX", 6 * PAGE)


def on_another_thread(work: object, name: str = "kvbm-mover", adopt: Bench | None = None) -> None:
    """Run it to its end on a thread as ours are; raises what it raised."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            if adopt is not None:
                adopt.copier.adopt_thread()
            assert callable(work)
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_preparing_ends_no_capture() -> None:
    model = Model()
    model.lock_gate = threading.Semaphore(0)
    bench = new_bench(model)
    wait_for_lock_call(model, 1)
    model.capturing = True
    model.lock_gate.release(SLOTS)
    bench.prepared()
    assert model.unsafe_calls["cuMemHostRegister"] == -(-SLOTS // 2)
    model.capturing = False
    bench.close()


def test_a_copier_made_and_closed_by_the_copying_thread_ends_no_capture() -> None:
    """A manager that comes later, or anew: the memory is mapped when the engine has long begun."""
    model = Model()
    model.capturing = True
    made: list[Bench] = []
    on_another_thread(lambda: made.append(new_bench(model).prepared()))
    on_another_thread(made[0].copier.close)
    assert model.unsafe_calls["cuMemHostUnregister"] == -(-SLOTS // 2)
    assert model.complaints == []
    assert model.locked == {}


@pytest.mark.parametrize("refused", [False, True], ids=["locked", "staged"])
def test_copying_ends_no_capture(refused: bool) -> None:
    model = Model()
    model.refuse_locks_from = 0 if refused else None
    bench = new_bench(model).prepared()
    model.capturing = True
    on_another_thread(lambda: check_stores(bench), adopt=bench)
    on_another_thread(lambda: check_loads(bench), adopt=bench)
    copying = []
    on_another_thread(lambda: copying.append(bench.copier.begin_store([(0, 0)])), adopt=bench)
    on_another_thread(copying[0].wait, adopt=bench)
    on_another_thread(copying[0].done, adopt=bench)
    assert model.unsafe_calls["cudaEventSynchronize" if refused else "cudaEventQuery"] > 0
    assert model.complaints == []
    model.capturing = False
    bench.close()


def test_the_engines_own_thread_keeps_its_mode() -> None:
    model = Model()
    bench = new_bench(model).prepared()
    assert model.relax(False) is False
    bench.close()
    assert model.relax(False) is False


def test_a_thread_that_was_not_adopted_would_end_it() -> None:
    """The other tests rest on this: the model notices."""
    model = Model()
    bench = new_bench(model).prepared()
    model.capturing = True
    with pytest.raises(AssertionError, match="cudaEventQuery by kvbm-mover ends the engine's capture"):
        on_another_thread(lambda: bench.copier.begin_store([(0, 0)]).wait())
    model.complaints.clear()
    model.capturing = False
    bench.close()
