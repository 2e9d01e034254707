"""The verify graph on hip:0, alone and in the speculative loop; calls that do not know of a capture."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hip_lab import CAPTURE_INVALIDATED, Stub
from model_lab import DRAFT, TARGET, changed, draft_tensors, target_tensors, write_checkpoint

import hipfire_kernels as hk
from hipfire_kernels.dispatch import AttendRequest, Plan, VerifyGraph, evidence, graph, graph_key, policy
from hipfire_kernels.dispatch.record import Crossover
from hipfire_kernels.errors import DeviceError, InputError
from hipfire_kernels.model import Engine, GenerationResult, load_draft, load_target
from hipfire_kernels.running.devices.arrays import DeviceArray
from hipfire_kernels.running.devices.gpu import GpuDevice

ROWS, HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 8, 4, 2, 128, 1300
CONTEXTS = (8, 9, 127, 128, 129, 300, 640, 641, 1299, CAPACITY)


def chain(ctx: int) -> Any:
    return np.arange(ctx - ROWS, ctx, dtype=np.int32)


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
        self.plan = hk.plan(request(capturing=True), device)

    def fill(self, ctx: int) -> None:
        self.host_q = np.random.default_rng(ctx).standard_normal(self.q.shape, np.float32)
        self.device.write(self.q, self.host_q)
        self.device.write(self.positions, chain(ctx))
        self.device.write(self.out, np.full(self.q.shape, np.nan, np.float32))

    def key(self) -> Any:
        return graph_key(self.device, q=self.q, k=self.caches[0], v=self.caches[1], at=self.positions, out=self.out)

    def step(self, stream: Any) -> str:
        plan = self.plan if stream is not None else hk.plan(request(), self.device)
        return plan.run(self.q, *self.caches, self.positions, self.out, stream=stream)

    def wanted(self, ctx: int) -> Any:
        return hk.attend(self.host_q, *self.host_caches, chain(ctx), device="host")


def request(capturing: bool = False) -> AttendRequest:
    return AttendRequest(
        arch="gfx1100", kv_format="q8_0", head_dim=HEAD_DIM, n_heads=HEADS, n_kv_heads=KV_HEADS, rows=ROWS,
        logical_ctx=CAPACITY, layout="chain", capturing=capturing, recording=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def graphs_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graph, "_logged", set())
    with policy.override(verify_graph=True):
        yield


def test_one_capture_serves_every_context(hip0: GpuDevice, stub: Stub) -> None:
    call, machine = Call(hip0), VerifyGraph(hip0, "f32")
    captures = stub.calls("hipStreamBeginCapture")
    for ctx in (40, 41, *CONTEXTS):
        call.fill(ctx)
        launches = stub.calls("hipModuleLaunchKernel")
        machine.run("layer", call.key(), call.step)
        assert (stub.calls("hipModuleLaunchKernel") == launches) == (machine.mode == "replay")
        assert np.array_equal(hip0.to_host(call.out), call.wanted(ctx)), ctx
    assert machine.counts == {"warmup": 1, "capture": 1, "replay": len(CONTEXTS)}
    assert stub.calls("hipStreamBeginCapture") == captures + 1


@pytest.mark.parametrize("where", ["hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphInstantiateWithFlags"])
def test_a_failed_capture_runs_directly(
    where: str, hip0: GpuDevice, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    call, machine = Call(hip0), VerifyGraph(hip0, "f32")
    for ctx in (40, 41, 42, 43):
        call.fill(ctx)
        if ctx == 41:
            stub.fail(where, CAPTURE_INVALIDATED)
        machine.run("layer", call.key(), call.step)
        assert np.array_equal(hip0.to_host(call.out), call.wanted(ctx))
    assert machine.counts == {"warmup": 1, "direct": 3, "failed": 1}
    assert f"{where} failed" in str(machine.reason)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    stub.complaints()


def test_a_copy_in_a_captured_step_runs_directly(hip0: GpuDevice) -> None:
    call, machine = Call(hip0), VerifyGraph(hip0, "f32")
    step = call.step

    def copying(stream: Any) -> str:
        hip0.write(call.q, call.host_q)
        return step(stream)

    for ctx in (40, 41):
        call.fill(ctx)
        machine.run("layer", call.key(), copying)
        assert np.array_equal(hip0.to_host(call.out), call.wanted(ctx))
    assert "a copy to the device cannot be part of the graph" in str(machine.reason)


def test_nothing_is_left_behind(hip0: GpuDevice, stub: Stub) -> None:
    call = Call(hip0)
    call.step(None)
    gc.collect()
    before = stub.live()
    machine = VerifyGraph(hip0, "f32")
    for _ in range(4):
        machine.run("layer", call.key(), call.step)
    assert stub.live()["executable graph"] == before["executable graph"] + 1
    hip0.synchronize()
    del machine
    gc.collect()
    assert stub.live() == before


# ---- calls that do not know of the capture ---------------------------------------------------------------------------


def test_attend_notices_a_capture(hip0: GpuDevice) -> None:
    call, stream = Call(hip0), hip0.stream()
    call.fill(40)
    assert not hip0.capturing
    with hip0.capture(stream) as captured:
        assert hip0.capturing
        hk.attend(call.q, *call.caches, call.positions, ctx=40, out=call.out, stream=stream)
    assert not hip0.capturing
    for ctx in CONTEXTS:
        call.fill(ctx)
        captured.launch(stream)
        stream.synchronize()
        assert np.array_equal(hip0.to_host(call.out), call.wanted(ctx))


def test_a_plan_that_follows_the_context_is_refused_in_a_capture(hip0: GpuDevice, stub: Stub) -> None:
    call, stream = Call(hip0), hip0.stream()
    plan: Plan = hk.plan(request(), hip0)
    launches = stub.calls("hipModuleLaunchKernel")
    with (
        pytest.raises(InputError, match=r"hip:0 is capturing a graph, .* capturing=False: .* with capturing=True"),
        hip0.capture(stream),
    ):
        plan.run(call.q, *call.caches, call.positions, call.out, stream=stream)
    assert stub.calls("hipModuleLaunchKernel") == launches
    plan.run(call.q, *call.caches, call.positions, call.out)


def test_kv_write_is_refused_in_a_capture(hip0: GpuDevice) -> None:
    call, stream = Call(hip0), hip0.stream()
    rows = hip0.to_device(np.ones((ROWS, KV_HEADS, HEAD_DIM), np.float32))
    for positions in (chain(40), call.positions):
        with pytest.raises(DeviceError, match="cannot be part of the graph"), hip0.capture(stream):
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


def test_the_loop_gives_the_same_tokens_with_and_without_a_graph(pair: tuple[Any, Any], hip0: GpuDevice) -> None:
    """The context passes 256, where the caches grow and every graph starts over."""
    host, off, on, unset = (
        generated(pair, device, asked)
        for device, asked in (("host", True), ("hip:0", False), ("hip:0", True), ("hip:0", None))
    )
    assert host.tokens == off.tokens == on.tokens == unset.tokens
    assert host.accepted == off.accepted == on.accepted
    layers = 2
    assert host.attention.graph == off.attention.graph == {"direct": layers * host.cycles}
    counts = on.attention.graph
    assert counts == unset.attention.graph
    assert sum(counts.values()) == layers * on.cycles
    assert counts["capture"] >= 2 * layers  # before and after the caches grew
    assert counts["replay"] > counts["warmup"]
    assert counts["direct"] == counts["failed"] == 0
    assert on.routes == off.routes
    assert on.attention.refused["rows8: capturing"] > 0
    assert off.attention.refused["rows8: capturing"] == 0


def test_a_faster_route_that_no_graph_holds_is_not_given_up_for_one(pair: tuple[Any, Any], hip0: GpuDevice) -> None:
    """Evidence opens rows8 above 260 keys, in the middle of the generation."""
    shipped = evidence.find("gfx1100", "rows8", 128)
    assert shipped is not None
    opened = dataclasses.replace(shipped, kind="measured", digests={}, crossover=Crossover(260, None, None))
    with evidence.using([opened]):
        unset, on = (generated(pair, "hip:0", asked) for asked in (None, True))
    assert unset.tokens == on.tokens == generated(pair, "host", False).tokens
    assert unset.routes["rows8"] > 0
    assert unset.attention.graph["direct"] == unset.routes["rows8"]
    assert unset.attention.graph["replay"] > 0
    assert on.routes["rows8"] == 0
    assert on.attention.graph["direct"] == 0


def test_the_loop_goes_on_when_a_capture_fails(pair: tuple[Any, Any], hip0: GpuDevice, stub: Stub) -> None:
    stub.fail("hipStreamEndCapture", CAPTURE_INVALIDATED)
    got = generated(pair, "hip:0", True)
    stub.complaints()
    assert got.tokens == generated(pair, "host", False).tokens
    assert got.attention.graph["failed"] == 1
    assert got.attention.graph["direct"] > 0
    assert got.attention.graph["replay"] > 0  # of the other layer


def test_the_fixed_arrays_are_those_of_one_shape(hip0: GpuDevice) -> None:
    array: DeviceArray = hip0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    other = hip0.empty((ROWS, HEADS, HEAD_DIM), np.float32)
    assert graph_key(hip0, q=array) == graph_key(hip0, q=array)
    assert graph_key(hip0, q=array) != graph_key(hip0, q=other)
    assert graph_key(hip0, q=array) != graph_key(hip0, k=array)
    assert graph_key(hip0, q=array) != graph_key(hip0, q=hip0.section(array, 0, (8,)))


def test_threads_keep_out_of_each_others_captures(pair: tuple[Any, Any], hip0: GpuDevice) -> None:
    """HIP fails a copy in one thread while another is capturing, and that capture with it."""
    engine = Engine(*pair, device="hip:0")
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


def test_a_capture_is_its_threads_own(hip0: GpuDevice) -> None:
    call, stream = Call(hip0), hip0.stream()
    copied = threading.Event()

    def elsewhere() -> tuple[bool, DeviceArray]:
        capturing, array = hip0.capturing, hip0.empty((4,), np.float32)
        hip0.to_device(call.host_q)  # waits for the end of the capture
        copied.set()
        return capturing, array

    with ThreadPoolExecutor(1) as pool:
        with hip0.capture(stream) as captured:
            running = pool.submit(elsewhere)
            assert not copied.wait(0.1)
            call.plan.run(call.q, *call.caches, call.positions, call.out, stream=stream)
        capturing, array = running.result(timeout=600)
    assert copied.is_set()
    assert not capturing
    assert array not in captured.keeps
