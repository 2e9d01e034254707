"""As much of torch and FlashInfer as the benchmarks use: tensors that are numpy arrays on the CPU and this library's on
a device, and attention in float64. For the benchmarks' own code; of the peers it says nothing."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from hipfire_kernels.running.devices import device as open_device
from hipfire_kernels.running.devices.arrays import DeviceArray

uint8, int32, float32, float16, bfloat16 = np.uint8, np.int32, np.float32, np.float16, np.float32


def device(kind: str, index: int) -> Any:
    return SimpleNamespace(type=kind, index=index, name=f"{kind}:{index}")


class Tensor:
    """One of either kind. What computes waits for the device and goes through the host."""

    __module__ = "torch"

    def __init__(self, held: Any) -> None:
        self.held = held
        if isinstance(held, DeviceArray):
            self.device = device("cuda", held.buffer.device.index)
            self.__cuda_array_interface__ = held.__cuda_array_interface__
            self.__dlpack_device__, self.__dlpack__ = held.__dlpack_device__, held.__dlpack__
        else:
            self.device = device("cpu", 0)

    def _host(self) -> Any:
        return self.held.buffer.device.to_host(self.held) if isinstance(self.held, DeviceArray) else self.held

    def _like(self, values: Any) -> Tensor:
        """On the same device."""
        return Tensor(self.held.buffer.device.to_device(values) if isinstance(self.held, DeviceArray) else values)

    def to(self, what: Any) -> Tensor:
        if isinstance(what, type):
            return self._like(self._host().astype(what))
        return Tensor(open_device(what if isinstance(what, str) else what.name).to_device(self._host()))

    def half(self) -> Tensor:
        return self.to(float16)

    def float(self) -> Tensor:
        return self.to(float32)

    def cpu(self) -> Tensor:
        return Tensor(self._host())

    def numpy(self) -> Any:
        assert self.device.type == "cpu"
        return self.held

    def permute(self, *order: int) -> Tensor:
        return self._like(np.ascontiguousarray(self._host().transpose(order)))

    def contiguous(self) -> Tensor:
        return self

    def view(self, *shape: int) -> Tensor:
        return self._like(self._host().reshape(shape))

    def __getitem__(self, key: Any) -> Tensor:
        return self._like(np.ascontiguousarray(self._host()[key]))

    def __setitem__(self, key: Any, value: Tensor) -> None:
        host = self._host().copy()
        host[key] = value._host()
        self.held.buffer.device.write(self.held, host)

    def __mul__(self, factor: float) -> Tensor:
        return self._like(self._host() * np.float32(factor))

    def __eq__(self, other: Any) -> Any:
        return self._host() == other._host()

    __hash__ = None  # type: ignore[assignment]


def from_numpy(array: Any) -> Tensor:
    return Tensor(array)


def from_dlpack(array: Any) -> Tensor:
    array.__dlpack__(stream=array.buffer.device.default_stream or None, max_version=(1, 0), dl_device=None, copy=None)
    return Tensor(array)


def empty_like(tensor: Tensor) -> Tensor:
    return tensor._like(np.full(tensor.held.shape, np.nan, tensor.held.dtype))


def zeros(*shape: int, dtype: Any, device: Any) -> Tensor:
    return Tensor(np.zeros(shape, dtype)).to(device)


empty = zeros


def tensor(values: Any, dtype: Any, device: Any) -> Tensor:
    return Tensor(np.array(values, dtype)).to(device)


def arange(end: int, dtype: Any, device: Any) -> Tensor:
    return Tensor(np.arange(end, dtype=dtype)).to(device)


def compile(function: Any, dynamic: bool) -> Any:
    return function


# ---- streams --------------------------------------------------------------------------------------------------------


class _Streams:
    def __init__(self) -> None:
        self._now: list[Any] = []

    def Stream(self) -> Any:
        made = open_device("cuda:0").stream()
        return SimpleNamespace(cuda_stream=made.handle, keep=made)

    def ExternalStream(self, handle: int, device: Any) -> Any:
        return SimpleNamespace(cuda_stream=handle)

    def default_stream(self, device: Any) -> Any:
        return SimpleNamespace(cuda_stream=0)

    def current_stream(self, device: Any) -> Any:
        return self._now[-1] if self._now else self.default_stream(device)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self._now.append(stream)
        try:
            yield
        finally:
            self._now.pop()

    def synchronize(self) -> None:
        open_device("cuda:0").synchronize()


# ---- attention ------------------------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Of q [heads][rows][dim] over k and v [kv_heads][keys][dim], where `seen` [rows][keys] says so."""
    groups = q.shape[0] // k.shape[0]
    keys, values = (np.repeat(x.astype(np.float64), groups, axis=0) for x in (k, v))
    scores = q.astype(np.float64) @ keys.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    weights = np.exp(np.where(seen, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ values


def bottom_right(rows: int, keys: int) -> Any:
    return np.arange(keys) <= np.arange(rows)[:, None] + keys - rows


def _attended(query: Tensor, keys: Tensor, values: Tensor, seen: Any, enable_gqa: bool) -> Tensor:
    assert enable_gqa
    q, k, v = (x._host()[0] for x in (query, keys, values))
    return query._like(attention(q, k, v, seen)[None].astype(query.held.dtype))


def scaled_dot_product_attention(
    query: Tensor, keys: Tensor, values: Tensor, attn_mask: Any = True, enable_gqa: bool = False
) -> Tensor:
    if _BACKEND == "CUDNN_ATTENTION":
        raise RuntimeError("No available kernel. Aborting execution.\nand more")
    return _attended(query, keys, values, attn_mask, enable_gqa)


def create_block_mask(seen: Any, batch: Any, heads: Any, rows: int, keys: int, device: Any) -> Any:
    return seen(None, None, np.arange(rows)[:, None], np.arange(keys))


def flex_attention(query: Tensor, keys: Tensor, values: Tensor, block_mask: Any, enable_gqa: bool) -> Tensor:
    return _attended(query, keys, values, block_mask, enable_gqa)


_BACKEND = ""


@contextlib.contextmanager
def sdpa_kernel(backend: str) -> Iterator[None]:
    global _BACKEND
    before, _BACKEND = _BACKEND, backend
    try:
        yield
    finally:
        _BACKEND = before


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's, for one request."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, rows: Any, pages: Any, indices: Any, last: Any, *shape: Any, causal: bool, q_data_type: Any) -> None:
        assert causal
        self._keys = (int(pages._host()[1]) - 1) * shape[3] + int(last._host()[0])

    def run(self, query: Tensor, cache: Tensor) -> Tensor:
        pages, _, page, heads, dim = cache.held.shape
        k, v = cache._host().transpose(1, 0, 2, 3, 4).reshape(2, pages * page, heads, dim)[:, : self._keys]
        q = query._host().transpose(1, 0, 2)
        found = attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), bottom_right(q.shape[1], self._keys))
        return query._like(np.ascontiguousarray(found.transpose(1, 0, 2)).astype(np.float32))


def modules() -> dict[str, Any]:
    """What to put into `sys.modules`."""
    here = sys.modules[__name__]
    found = {name: ModuleType(name) for name in ("torch", "torch.nn", "torch.nn.attention", "flashinfer")}
    vars(found["torch"]).update({name: value for name, value in vars(here).items() if not name.startswith("_")})
    functional = SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention)
    backends = {name: name for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")}
    bias, flex = ModuleType("torch.nn.attention.bias"), ModuleType("torch.nn.attention.flex_attention")
    vars(bias).update(causal_lower_right=bottom_right)
    vars(flex).update(create_block_mask=create_block_mask, flex_attention=flex_attention)
    vars(found["torch.nn.attention"]).update(SDPBackend=SimpleNamespace(**backends), sdpa_kernel=sdpa_kernel)
    vars(found["torch.nn"]).update(functional=functional, attention=found["torch.nn.attention"])
    vars(found["torch"]).update(nn=found["torch.nn"], cuda=_Streams(), __version__="2.0 of a test")
    vars(found["flashinfer"]).update(BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper)
    return {**found, bias.__name__: bias, flex.__name__: flex}
