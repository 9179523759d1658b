"""The calls to torch on a CUDA device. Stand-ins have the signatures of this torch's own classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kvbm.transfer.cuda.device import LOAD_PRIORITY, STORE_PRIORITY, TorchDevice, first_line

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Classes of `torch.cuda` and its current stream, without a device."""
    streams: list[mock.Mock] = []
    stream_class, event_class = torch.cuda.Stream, torch.cuda.Event

    def new_stream(device: torch.device, priority: int) -> mock.Mock:
        stream: mock.Mock = mock.create_autospec(stream_class, instance=True)
        stream.device_asked, stream.priority_asked, stream.cuda_stream = device, priority, 0x77
        streams.append(stream)
        return stream

    def new_event(blocking: bool = False) -> mock.Mock:
        event: mock.Mock = mock.create_autospec(event_class, instance=True)
        event.blocking_asked = blocking
        return event

    current = mock.create_autospec(stream_class, instance=True)
    active: list[str] = []
    context = mock.MagicMock()
    context.__enter__.side_effect = lambda *_: active.append("in")
    context.__exit__.side_effect = lambda *_: active.append("out")
    for name, value in {
        "Stream": new_stream,
        "Event": new_event,
        "current_stream": lambda: current,
        "device": mock.Mock(return_value=context),
        "stream": mock.Mock(return_value=context),
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, value)
    return SimpleNamespace(current=current, active=active, streams=streams)


def test_streams_of_our_own(cuda: SimpleNamespace) -> None:
    device = TorchDevice(DEVICE)
    assert (device.index, device.torch_device) == (1, DEVICE)
    store, load = device.new_stream(STORE_PRIORITY), device.new_stream(LOAD_PRIORITY)
    of_stores, of_loads = cuda.streams
    assert store.handle == load.handle == 0x77
    assert of_stores.device_asked == DEVICE
    assert of_loads.priority_asked < of_stores.priority_asked
    other = object()
    store.wait(other)
    of_stores.wait_event.assert_called_once_with(other)


def test_who_waits_for_an_event_of_ours_sleeps(cuda: SimpleNamespace) -> None:
    stream = TorchDevice(DEVICE).new_stream(STORE_PRIORITY)
    event = stream.record()
    assert event.blocking_asked
    event.record.assert_called_once_with(cuda.streams[0])


def test_work_is_begun_with_the_stream_as_the_current_one(cuda: SimpleNamespace) -> None:
    stream = TorchDevice(DEVICE).new_stream(STORE_PRIORITY)
    stream.run(lambda: cuda.active.append("begin"))
    assert cuda.active == ["in", "begin", "out"]
    torch.cuda.stream.assert_called_once_with(cuda.streams[0])


def test_marks_and_holds_are_on_the_callers_stream_of_that_device(cuda: SimpleNamespace) -> None:
    device = TorchDevice(DEVICE)
    mark = device.mark()
    assert mark is cuda.current.record_event.return_value
    device.hold(mark)
    cuda.current.wait_event.assert_called_once_with(mark)
    assert cuda.active == ["in", "out"] * 2
    assert {call.args for call in torch.cuda.device.call_args_list} == {(DEVICE,)}


def test_memory_is_made_outside_of_inference_mode(cuda: SimpleNamespace) -> None:
    device = TorchDevice(DEVICE)
    with mock.patch.object(torch, "empty", autospec=False) as empty, torch.inference_mode():
        empty.side_effect = lambda *_, **__: torch.is_inference_mode_enabled()
        assert device.pinned(3, 64) is False
        assert device.scratch(128) is False
    pinned, scratch = empty.call_args_list
    assert pinned == mock.call((3, 64), dtype=torch.uint8, pin_memory=True)
    assert scratch == mock.call(128, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("CUDA error: lost\nCompile with TORCH_USE_CUDA_DSA"), "CUDA error: lost"),
        (RuntimeError("\n\n  Expected a compiler\nat"), "Expected a compiler"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_error_is_told_in_one_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
