"""Small pieces that the target and the draft share: projections, norms, activations, RoPE, the gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hipfire_kernels.model.yarn import Yarn

Array = NDArray[np.float32]
IntArray = NDArray[np.integer[Any]]

BLOCK_ROWS = 32
"""The most rows of one verify block. Up to here the target computes every row independently of the others."""

# Half a megabyte stays in a second-level cache, and a product that small runs on the calling thread: handing
# it to a pool costs more than it saves, and very much more when the cores are shared.
_PANEL_BYTES = 512 << 10


def project_rows(x: Array, weight: Array) -> Array:
    """x @ weight.T in which a row's result does not depend on which other rows are in the call, bit for bit.

    A matrix product picks its blocking by the number of rows, so that a token verified among 16 would differ
    in the last bits from the same token decoded alone, and a near-tie could flip. One matrix-vector product
    per row has the same shape however many rows there are. The weight is walked in panels that stay in cache
    while the rows pass, so a large weight is still read from memory once per block.

    Args:
        x: float32 [rows, n_in].
        weight: float32 [n_out, n_in].

    Returns:
        float32 [rows, n_out]. Above BLOCK_ROWS rows (prefill) it is one plain matrix product.
    """
    if len(x) > BLOCK_ROWS:
        product: Array = x @ weight.T
        return product
    n_out, n_in = weight.shape
    out: Array = np.empty((len(x), n_out), np.float32)
    panel = max(1, _PANEL_BYTES // (4 * n_in))
    for begin in range(0, n_out, panel):
        part = slice(begin, begin + panel)
        np.matmul(x[:, None, :], weight[part].T, out=out[:, None, part])
    return out


def first_broken_row(x: Array) -> int | None:
    """The first row of x [rows, ...] that holds NaN or an infinity; None where all is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(x.sum()):  # one pass without a copy; both carry through a sum
            return None
    broken = ~np.isfinite(x.reshape(len(x), -1)).all(axis=1)
    return int(broken.argmax()) if broken.any() else None


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x * rsqrt(mean(x^2) + eps) * scale over the last axis.

    Callers hand in the factor itself: w where the checkpoint stores the plain weight, 1 + w where it stores
    the offset from one (every Qwen3.5 norm but the DeltaNet gated one).
    """
    # As np.mean, bit for bit; what that adds takes longer than the sum itself, and a token has dozens of norms.
    mean = np.add.reduce(np.square(x), axis=-1, keepdims=True) / np.float32(x.shape[-1])
    if not mean.max(initial=0.0) < np.inf:  # squares overflow from 1.8e19 on, and such a row would become zero
        return (_wide_norm(x.astype(np.float64), eps) * scale).astype(np.float32)
    out: Array = x * (1.0 / np.sqrt(mean + np.float32(eps))) * scale
    return out


def _wide_norm(x: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    wide: NDArray[np.float64] = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)
    return wide


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by way of tanh, which cannot overflow."""
    out: Array = np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + np.float32(1.0))
    return out


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the rotate-half layout: dimension j turns with j + dim / 2.

    Attributes:
        dim: how many leading dimensions of a head turn; the rest passes unchanged.
        theta: base of the frequencies theta^(-2j / dim).
        yarn: how they are changed for a longer context; None when they are not.
    """

    dim: int
    theta: float
    yarn: Yarn | None = None

    def table(self, positions: IntArray) -> tuple[Array, Array]:
        """cos and sin, float32 [rows, 1, dim // 2]. Angles are float64: positions reach 262,144."""
        if self.yarn is None:
            frequencies = np.power(self.theta, -np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
            scale = 1.0
        else:
            frequencies, scale = self.yarn.frequencies(self.dim, self.theta), self.yarn.attention_factor
        angle = positions[:, None, None] * frequencies
        return (scale * np.cos(angle)).astype(np.float32), (scale * np.sin(angle)).astype(np.float32)

    def __call__(self, x: Array, table: tuple[Array, Array]) -> Array:
        """x float32 [rows, heads, head_dim], turned by `table` of the same rows."""
        cos, sin = table
        half = self.dim // 2
        first, second = x[..., :half], x[..., half : self.dim]
        out: Array = x.copy()
        out[..., :half] = first * cos - second * sin
        out[..., half : self.dim] = second * cos + first * sin
        return out


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)).

    Attributes:
        gate_up: float32 [2 * intermediate, hidden], the gate projection above the up projection.
        down: float32 [hidden, intermediate].
    """

    gate_up: Array
    down: Array

    def __call__(self, x: Array) -> Array:
        both = project_rows(x, self.gate_up)
        half = both.shape[-1] // 2
        return project_rows(silu(both[:, :half]) * both[:, half:], self.down)
