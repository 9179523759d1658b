"""The window: which requests are looked up while others wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm.leader.window import Window


@pytest.fixture
def window() -> Window:
    found = Window()
    found.capacity = 10
    return found


def test_requests_enter_until_the_window_is_full_and_then_in_order(window: Window) -> None:
    window.enter("a", 6)
    assert not window.has_room("new", 5)
    window.wait("b", 5)
    window.wait("c", 1)
    assert window.next_waiting() is None, "b is first, and has no room: c must not overtake it"
    window.found("a", 2)
    assert window.next_waiting() == "b"
    window.enter("b", 5)
    assert (window.held_blocks, window.waits("b"), window.next_waiting()) == (7, False, "c")


def test_one_request_is_let_in_whatever_its_length(window: Window) -> None:
    assert window.has_room("new", 1000)
    window.enter("a", 1000)
    assert not window.has_room("new", 1)
    window.begin("a")
    assert window.has_room("new", 1000), "a load that runs cannot be given up, and must not stop all others"
    window.leave("a")
    assert window.held_blocks == 0


def test_without_a_bound_nothing_waits() -> None:
    window = Window()
    window.enter("a", 1 << 30)
    assert window.has_room("new", 1 << 30)


def test_a_request_that_the_engine_would_run_next_takes_the_room_of_one_that_it_passes_over(
    window: Window,
) -> None:
    window.enter("old", 6)
    window.enter("young", 4)
    window.wait("urgent", 3)
    assert window.asked_about("urgent") == [], "the engine may ask about the others in the same round"
    assert window.asked_about("urgent") == ["young"], "the youngest of those that it never asked about"


def test_requests_that_the_engine_asks_about_keep_their_room(window: Window) -> None:
    window.enter("a", 6)
    window.enter("b", 4)
    window.wait("c", 3)
    for _ in range(3):
        assert [window.asked_about(request) for request in "abc"] == [[], [], []]
    assert window.asked_about("a") == []
    assert window.asked_about("c") == ["b"], "the engine went past b"


def test_short_requests_do_not_overtake_a_long_one_for_ever(window: Window) -> None:
    """Each of them is asked about in every round until it is loaded, so none is displaced."""
    window.enter("short 0", 5)
    window.wait("long", 9)
    entered: list[str] = []
    for number in range(1, 5):
        window.asked_about("long")
        window.asked_about(f"short {number - 1}")
        assert not window.has_room("long", 9)
        if window.has_room(f"short {number}", 5):
            window.enter(f"short {number}", 5)
            entered.append(f"short {number}")
        else:
            window.wait(f"short {number}", 5)
    assert entered == ["short 1"], "the engine had asked about the long one only once by then"
    for request in ("short 0", "short 1"):
        window.begin(request)
        window.leave(request)
    assert window.next_waiting() == "long", "though others have waited too"
    window.enter("long", 9)
    window.begin("long")
    assert window.next_waiting() == "short 2"


def test_the_next_to_enter_holds_up_nobody_once_the_engine_asks_about_others(window: Window) -> None:
    window.enter("open", 9)
    window.wait("passed over", 9)
    for _ in range(2):
        window.asked_about("passed over")
        window.asked_about("open")
    window.wait("urgent", 2)
    window.leave("open")
    window.asked_about("urgent")
    assert not window.has_room("urgent", 2)
    window.asked_about("urgent")
    assert window.has_room("urgent", 2)


def test_a_request_that_ends_while_its_load_runs_leaves_no_note(window: Window) -> None:
    window.enter("a", 5)
    window.asked_about("a")
    window.begin("a")
    window.leave("a")
    assert window._asked_at == {}


def test_what_is_being_loaded_is_never_displaced(window: Window) -> None:
    window.enter("a", 9)
    window.begin("a")
    window.enter("b", 1)
    window.wait("c", 5)
    window.asked_about("c")
    assert window.asked_about("c") == ["b"]


def test_unknown_requests_leave_nothing_behind(window: Window) -> None:
    assert window.asked_about("x") == []
    window.leave("x")
    window.found("x", 3)
    window.begin("x")
    window.forget("x")
    assert (len(window), window.held_blocks) == (0, 0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["arrive", "ask", "found", "begin", "leave", "forget"]), st.integers(0, 5)),
    max_size=80,
)


@given(STEPS, st.integers(1, 20))
def test_whoever_asks_again_and_again_gets_in(steps: list[tuple[str, int]], capacity: int) -> None:
    """From any state: as long as the engine asks about one request alone, it is let in by the second question."""
    window, lengths = Window(), (1, 2, 5, 9, 20, 40)
    window.capacity = capacity
    for step, number in steps:
        request, blocks = str(number), lengths[number]
        if step == "arrive":
            if window.has_room(request, blocks):
                window.enter(request, blocks)
            else:
                window.wait(request, blocks)
        elif step == "ask":
            for displaced in window.asked_about(request):
                window.leave(displaced)
                window.wait(displaced, 1)
        elif step == "found":
            window.found(request, blocks // 2)
        else:
            getattr(window, step)(request)
        assert window.held_blocks == sum(window._open.values()) + sum(window._loading.values())
    window.wait("next", 3)
    for displaced in (*window.asked_about("next"), *window.asked_about("next")):
        window.leave(displaced)
    assert window.has_room("next", 3)


def test_what_waits_behind_the_next_one_is_passed_over(window: Window) -> None:
    window.enter("open", 9)
    for request in ("a", "b"):
        window.wait(request, 9)
    for _ in range(2):
        for request in ("a", "b"):
            window.asked_about(request)
    assert not window.passes_over("a"), "it is the next: it may take the room of another"
    assert window.asked_about("a") == ["open"]
    assert window.passes_over("b")
    assert not window.passes_over("b"), "the engine goes past the one in front"
    assert not window.passes_over("unknown")


def test_asking_about_a_lookup_keeps_its_room_also_when_nothing_else_is_done(window: Window) -> None:
    window.enter("a", 9)
    window.wait("b", 3)
    for _ in range(3):
        assert window.asked_about("b") == []
        assert window.passes_over("a")


def test_a_lookup_that_is_repeated_keeps_its_place(window: Window) -> None:
    for request in ("a", "b", "c"):
        window.enter(request, 2)
    window.enter("a", 3)
    assert window.next_open(2) == ["a", "b"]
    assert window.held_blocks == 7


def test_the_queue_moves_when_a_request_goes_on(window: Window) -> None:
    window.enter("a", 2)
    window.enter("b", 2)
    assert not window.take_moved()
    window.begin("a")
    assert window.take_moved()
    assert not window.take_moved()
    window.forget("b")
    assert window.take_moved()
