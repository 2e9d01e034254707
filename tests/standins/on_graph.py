"""The verify graph on a device, alone and in the speculative loop; calls that do not know of a capture."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inputs import HEAD_DIM, HEADS, KV_HEADS, ROWS, chain, request
from model_lab import DRAFT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint
from standin_lab import CAPTURE_INVALIDATED, StandIn

import hipfire_kernels as hk
from hipfire_kernels.dispatch import Plan, VerifyGraph, graph, graph_key, policy
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.model import Engine, GenerationResult, load_draft, load_target
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice

CAPACITY = 1300
CONTEXTS = (8, 9, 127, 128, 129, 300, 640, 641, 1299, CAPACITY)


class Call:
    """A verify attention in fixed arrays."""

    def __init__(self, device: GpuDevice, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.device = device
        shape = (CAPACITY, KV_HEADS, HEAD_DIM)
        self.host_caches = [hk.quantize_q8_0(rng.standard_normal(shape, np.float32)) for _ in range(2)]
        self.caches = [device.to_device(cache) for cache in self.host_caches]
        self.host_q = rng.standard_normal((ROWS, HEADS, HEAD_DIM), np.float32)
        self.q, self.positions = device.to_device(self.host_q), device.to_device(chain(ROWS))
        self.out = device.empty(self.q.shape, np.float32)
        self.plan = hk.plan(request(device, CAPACITY), device)

    def fill(self, ctx: int) -> None:
        self.host_q = np.random.default_rng(ctx).standard_normal(self.q.shape, np.float32)
        self.device.write(self.q, self.host_q)
        self.device.write(self.positions, chain(ctx))
        self.device.write(self.out, np.full(self.q.shape, np.nan, np.float32))

    def key(self) -> Any:
        return graph_key(self.device, q=self.q, k=self.caches[0], v=self.caches[1], at=self.positions, out=self.out)

    def step(self, stream: Any) -> str:
        plan = (
            self.plan if stream is not None else hk.plan(request(self.device, CAPACITY, capturing=False), self.device)
        )
        return plan.run(self.q, *self.caches, self.positions, self.out, stream=stream)

    def wanted(self, ctx: int) -> Any:
        return hk.attend(self.host_q, *self.host_caches, chain(ctx), device="host")


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph, "_logged", set())
    with policy.override(verify_graph=True):
        yield


def test_one_capture_serves_every_context(gpu0: GpuDevice, stub: StandIn) -> None:
    call, machine = Call(gpu0), VerifyGraph(gpu0, "f32")
    captures = stub.calls("capture_begin")
    for ctx in (40, 41, *CONTEXTS):
        call.fill(ctx)
        launches = stub.calls("launch")
        machine.run("layer", call.key(), call.step)
        assert (stub.calls("launch") == launches) == (machine.mode == "replay")
        assert np.array_equal(gpu0.to_host(call.out), call.wanted(ctx)), ctx
    assert machine.counts == {"warmup": 1, "capture": 1, "replay": len(CONTEXTS)}
    assert stub.calls("capture_begin") == captures + 1


@pytest.mark.parametrize("where", ["capture_begin", "capture_end", "instantiate"])
def test_a_failed_capture_runs_directly(
    where: str, gpu0: GpuDevice, stub: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    call, machine = Call(gpu0), VerifyGraph(gpu0, "f32")
    for ctx in (40, 41, 42, 43):
        call.fill(ctx)
        if ctx == 41:
            stub.fail(where, CAPTURE_INVALIDATED)
        machine.run("layer", call.key(), call.step)
        assert np.array_equal(gpu0.to_host(call.out), call.wanted(ctx))
    assert machine.counts == {"warmup": 1, "direct": 3, "failed": 1}
    assert re.search(stub.failure(where, CAPTURE_INVALIDATED), str(machine.reason))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    stub.complaints()


def test_a_copy_in_a_captured_step_runs_directly(gpu0: GpuDevice) -> None:
    call, machine = Call(gpu0), VerifyGraph(gpu0, "f32")
    step = call.step

    def copying(stream: Any) -> str:
        gpu0.write(call.q, call.host_q)
        return step(stream)

    for ctx in (40, 41):
        call.fill(ctx)
        machine.run("layer", call.key(), copying)
        assert np.array_equal(gpu0.to_host(call.out), call.wanted(ctx))
    assert "a copy to the device cannot be part of the graph" in str(machine.reason)


def test_nothing_is_left_behind(gpu0: GpuDevice, stub: StandIn) -> None:
    call = Call(gpu0)
    call.step(None)
    gc.collect()
    before = stub.live()
    machine = VerifyGraph(gpu0, "f32")
    for _ in range(4):
        machine.run("layer", call.key(), call.step)
    assert stub.live()["executable graph"] == before["executable graph"] + 1
    gpu0.synchronize()
    del machine
    gc.collect()
    assert stub.live() == before


# ---- calls that do not know of the capture ---------------------------------------------------------------------------


def test_attend_notices_a_capture(gpu0: GpuDevice) -> None:
    call, stream = Call(gpu0), gpu0.stream()
    call.fill(40)
    assert not gpu0.capturing
    with gpu0.capture(stream) as captured:
        assert gpu0.capturing
        hk.attend(call.q, *call.caches, call.positions, ctx=40, out=call.out, stream=stream)
    assert not gpu0.capturing
    for ctx in CONTEXTS:
        call.fill(ctx)
        captured.launch(stream)
        stream.synchronize()
        assert np.array_equal(gpu0.to_host(call.out), call.wanted(ctx))


def test_a_plan_that_follows_the_context_is_refused_in_a_capture(gpu0: GpuDevice, stub: StandIn) -> None:
    call, stream = Call(gpu0), gpu0.stream()
    plan: Plan = hk.plan(request(gpu0, CAPACITY, capturing=False), gpu0)
    launches = stub.calls("launch")
    with (
        pytest.raises(
            InputError, match=rf"{gpu0.name} is capturing a graph, .* capturing=False: .* with capturing=True"
        ),
        gpu0.capture(stream),
    ):
        plan.run(call.q, *call.caches, call.positions, call.out, stream=stream)
    assert stub.calls("launch") == launches
    plan.run(call.q, *call.caches, call.positions, call.out)


def test_kv_write_is_refused_in_a_capture(gpu0: GpuDevice) -> None:
    call, stream = Call(gpu0), gpu0.stream()
    rows = gpu0.to_device(np.ones((ROWS, KV_HEADS, HEAD_DIM), np.float32))
    for positions in (chain(40), call.positions):
        with pytest.raises(DeviceError, match="cannot be part of the graph"), gpu0.capture(stream):
            hk.kv_write(rows, rows, *call.caches, positions, stream=stream)


# ---- in the loop -----------------------------------------------------------------------------------------------------

NEW = 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A small random target and draft of head_dim 128, which the stub has kernels of."""
    config = changed(TARGET, head_dim=128, max_position_embeddings=600)
    target = write_checkpoint(tmp_path_factory.mktemp("target"), config, target_tensors(config))
    drafting = changed(DRAFT, head_dim=128)
    draft: Path = write_checkpoint(tmp_path_factory.mktemp("draft"), drafting, draft_tensors(drafting))
    return load_target(target), load_draft(draft)


def generated(pair: tuple[Any, Any], device: str, asked: bool | None) -> GenerationResult:
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 94, 245)]
    with policy.override(verify_graph=asked):
        return Engine(*pair, device=device).generate(prompt, NEW, stop=(), speculation="on", adaptive_b=False)


def test_the_loop_gives_the_same_tokens_with_a_graph(pair: tuple[Any, Any], gpu0: GpuDevice) -> None:
    """The context passes 256, where the caches grow and every graph starts over. See on_loop.py."""
    host, on = (generated(pair, device, True) for device in ("host", gpu0.name))
    assert host.tokens == on.tokens
    assert host.accepted == on.accepted
    assert on.attention.graph["replay"] > on.attention.graph["warmup"]
    assert on.attention.graph["direct"] == on.attention.graph["failed"] == 0


def test_the_fixed_arrays_are_those_of_one_shape(gpu0: GpuDevice) -> None:
    array: DeviceArray = gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    other = gpu0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    assert graph_key(gpu0, q=array) == graph_key(gpu0, q=array)
    assert graph_key(gpu0, q=array) != graph_key(gpu0, q=other)
    assert graph_key(gpu0, q=array) != graph_key(gpu0, k=array)
    assert graph_key(gpu0, q=array) != graph_key(gpu0, q=gpu0.section(array, 0, (8,)))


def test_threads_keep_out_of_each_others_captures(pair: tuple[Any, Any], gpu0: GpuDevice) -> None:
    """HIP fails a copy in one thread while another is capturing, and that capture with it."""
    engine = Engine(*pair, device=gpu0.name)
    prompts = [[int(t) for t in np.random.default_rng(seed).integers(0, 94, 30)] for seed in range(4)]

    def generate(prompt: list[int]) -> GenerationResult:
        with policy.override(verify_graph=True):
            return engine.generate(prompt, 12, stop=(), speculation="on", adaptive_b=False)

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(generate, prompts))
    for result, prompt in zip(together, prompts, strict=True):
        assert result.tokens == generate(prompt).tokens
        assert result.attention.graph["failed"] == 0
        assert result.attention.graph["capture"] > 0


def test_a_capture_is_its_threads_own(gpu0: GpuDevice) -> None:
    call, stream = Call(gpu0), gpu0.stream()
    copied = threading.Event()

    def elsewhere() -> tuple[bool, DeviceArray]:
        capturing, array = gpu0.capturing, gpu0.empty((4,), np.float32)
        gpu0.to_device(call.host_q)  # waits for the end of the capture
        copied.set()
        return capturing, array

    with ThreadPoolExecutor(1) as pool:
        with gpu0.capture(stream) as captured:
            running = pool.submit(elsewhere)
            assert not copied.wait(0.1)
            call.plan.run(call.q, *call.caches, call.positions, call.out, stream=stream)
        capturing, array = running.result(timeout=600)
    assert copied.is_set()
    assert not capturing
    assert array not in captured.keeps
