"""A GPU in a forked child, what of it travels by pickle, and whose a workspace is."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inputs import Inputs, chain, request
from standin_lab import LAUNCH_FAILURE, OUT_OF_MEMORY, StandIn

import hipfire_kernels as hk
from hipfire_kernels.dispatch import calls
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.running.devices.gpu import GpuDevice


def in_forked_child(asked: Callable[[], Any]) -> str:
    """What a child says to a question: its answer, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(asked())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)  # what atexit and pytest would do is the parent's
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


REFUSED = (
    "DeviceError: {vendor} devices were opened before this process was forked, and no GPU driver survives that; start "
    "processes with multiprocessing's 'spawn' or 'forkserver', or open the first device in the child"
)


def test_a_gpu_in_a_forked_child_is_a_clear_error(gpu0: GpuDevice, stub: StandIn) -> None:
    inputs = Inputs.make()
    arrays, stream, event = inputs.on(gpu0), gpu0.stream(), gpu0.event()
    positions, new = gpu0.to_device(chain(200)), gpu0.to_device(np.zeros((8, 2, 128), np.float32))
    with gpu0.capture(stream) as graph:
        hk.attend(*arrays, positions, ctx=200, stream=stream)
    questions: list[Callable[[], Any]] = [
        lambda: hk.attend(*arrays, chain(200)),
        lambda: hk.attend(*arrays, positions, ctx=200),
        lambda: hk.kv_write(new, new, *arrays[1:], positions),
        lambda: gpu0.empty((4,), np.float32),
        lambda: gpu0.to_device(chain(200)),
        lambda: gpu0.to_host(positions),
        lambda: gpu0.write(positions, chain(200)),
        gpu0.synchronize,
        gpu0.stream,
        gpu0.event,
        gpu0.describe,
        stream.synchronize,
        lambda: event.record(),
        graph.launch,
        lambda: gpu0.capture(stream).__enter__(),
        lambda: hk.device(stub.name(1)).to_device(chain(200)),
        lambda: hk.device(stub.name(0)).synchronize(),
        lambda: hk.device(stub.name(3)).synchronize(),  # which nobody had opened
    ]
    for number, asked in enumerate(questions):
        assert in_forked_child(asked) == REFUSED.format(vendor=stub.face.vendor), number
    assert np.array_equal(gpu0.to_host(positions), chain(200))  # the parent's is as it was


def test_auto_does_not_turn_to_the_host_in_a_forked_child(gpu0: GpuDevice, stub: StandIn) -> None:
    """Where no driver counts its devices any more."""

    def auto() -> Any:
        stub.fail("count", LAUNCH_FAILURE)
        return hk.device("auto")

    assert in_forked_child(auto) == repr(gpu0)
    assert in_forked_child(lambda: hk.devices()[0]) == repr(gpu0.name)


def test_the_host_serves_a_forked_child(gpu0: GpuDevice) -> None:
    inputs = Inputs.make()
    want = inputs.wanted(chain(200)).tobytes()
    hk.attend(*inputs.on(gpu0), chain(200))  # its plan is kept: the child must not free what it holds
    assert in_forked_child(lambda: (inputs.wanted(chain(200)).tobytes() == want, len(calls._plans))) == "(True, 1)"


def test_what_a_child_drops_is_not_given_back_to_the_driver(gpu0: GpuDevice, stub: StandIn) -> None:
    kept: list[Any] = [gpu0.to_device(chain(200)), gpu0.stream(), gpu0.event()]
    kept[1].synchronize()

    def drop() -> list[int]:
        kept.clear()
        return [stub.calls(call) - n for call, n in before.items()]

    before = {call: stub.calls(call) for call in ("activate", "free", "stream_destroy", "event_destroy")}
    assert in_forked_child(drop) == "[0, 0, 0, 0]"


@pytest.mark.parametrize("what", ["device", "array", "stream", "event", "plan"])
def test_nothing_of_a_gpu_travels(what: str, gpu0: GpuDevice) -> None:
    made = {
        "device": lambda: gpu0,
        "array": lambda: gpu0.to_device(chain(200)),
        "stream": gpu0.stream,
        "event": gpu0.event,
        "plan": lambda: hk.plan(request(gpu0, 300), gpu0),
    }[what]()
    said = {
        "device": f"<GpuDevice {gpu0.name} .*> cannot be pickled: it belongs to this process; send its name",
        "array": rf"<DeviceArray int32\[8\] on {gpu0.name}> cannot be pickled: .*; send device.to_host",
        "plan": f"<Plan .* on {gpu0.name}: .*> cannot be pickled",
    }
    with pytest.raises(InputError, match=said.get(what, said["device"])):
        pickle.dumps(made)


def test_streams_have_plans_of_their_own(gpu0: GpuDevice) -> None:
    """Two that were made, the default one by all of its names, and a foreign object that stands for one of them."""
    inputs, positions = Inputs.make(), gpu0.to_device(chain(200))
    arrays, out = inputs.on(gpu0), gpu0.empty(inputs.q.shape, np.float32)
    first, second = gpu0.stream(), gpu0.stream()

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, first.handle)

        def __repr__(self) -> str:
            return "a stream"

    for expected, streams in ((1, (None, 0, 1)), (2, (first, first.handle, Foreign())), (3, (second,))):
        for stream in streams:
            hk.attend(*arrays, positions, ctx=200, stream=stream, out=out)
            calls_of_this_device = [key for key in calls._plans if key.owner.device is gpu0]
            assert len(calls_of_this_device) == expected
    owners = [key.owner for key in calls._plans]
    assert len({owner.stream for owner in owners}) == 3
    assert len({(owner.device, owner.thread) for owner in owners}) == 1
    q, k, v = (gpu0.to_device(np.zeros((5, heads, 128), np.float32)) for heads in (2, 1, 1))
    for stream in (None, first, second, first.handle):
        hk.draft_attend(q, k, v, stream=stream)
    assert len({owner.stream for owner in calls._workspaces}) == 3


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    calls._plans.clear()
    calls._workspaces.clear()


def test_a_device_without_memory_left_says_how_much_was_asked_for(gpu0: GpuDevice, stub: StandIn) -> None:
    stub.fail("malloc", OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=rf"^1,024 bytes on {gpu0.name}: {stub.failure('malloc', OUT_OF_MEMORY)}"):
        gpu0.empty((256,), np.float32)
