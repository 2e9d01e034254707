"""Gated DeltaNet: causal convolution, then a delta-rule recurrence with one state matrix per value head.

Notation: u is the projected [q | k | v] before the convolution, S [dk, dv] the state of one head,
    S <- alpha S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q.
Every run of tokens, a prompt too, steps through it one by one: each token gets exactly what decoding it alone
gives. The chunk form would save little here, since the projections cost several times as much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hipfire_kernels.model.attention import Block
from hipfire_kernels.model.config import DeltaDims
from hipfire_kernels.model.layers import Array, project_rows, rms_norm, sigmoid, silu

_L2_EPS = np.float32(1e-6)


@dataclass
class Steps:
    """What the recurrence consumes, per token: rows first.

    Attributes:
        u: float32 [rows, conv_dim], before the convolution.
        q: float32 [rows, nv, dk]; scaled and normalised.
        k: float32 [rows, nv, dk]; normalised.
        v: float32 [rows, nv, dv].
        alpha: float32 [rows, nv]; the decay.
        beta: float32 [rows, nv].
    """

    u: Array
    q: Array
    k: Array
    v: Array
    alpha: Array
    beta: Array


class DeltaState:
    """The state of one DeltaNet layer.

    Attributes:
        conv: float32 [kernel - 1, conv_dim]: the last rows of u, before the convolution.
        s: float32 [nv, dk, dv].
        tape: what the last recorded block fed to the recurrence, for `replay`.
    """

    def __init__(self, dims: DeltaDims) -> None:
        self.conv: Array = np.zeros((dims.kernel - 1, dims.conv_dim), np.float32)
        self.s: Array = np.zeros((dims.value_heads, dims.key_dim, dims.value_dim), np.float32)
        self.tape: Steps | None = None

    def snapshot(self) -> tuple[Array, Array]:
        """A copy of (conv, s)."""
        return self.conv.copy(), self.s.copy()

    def restore(self, snapshot: tuple[Array, Array]) -> None:
        """Go back to `snapshot`, which stays as it is."""
        conv, s = snapshot
        self.conv = conv.copy()
        np.copyto(self.s, s)
        self.tape = None

    def reset(self) -> None:
        """Go back to the state of an empty sequence."""
        self.conv, self.tape = np.zeros_like(self.conv), None
        self.s.fill(0.0)

    def replay(self, snapshot: tuple[Array, Array], keep: int) -> None:
        """Go back to `snapshot`, then through the first `keep` tokens of the tape, convolution included.

        The same arithmetic as the first pass, so the result is what decoding those tokens alone leaves.
        """
        if self.tape is None:
            raise RuntimeError("replay without a recorded block")
        conv, s = snapshot
        self.conv = np.concatenate([conv, self.tape.u[:keep]])[keep:]
        np.copyto(self.s, s)
        self.advance(self.tape, count=keep)

    def advance(self, steps: Steps, out: Array | None = None, count: int | None = None) -> None:
        """Go through the first `count` tokens of `steps`, by default all; o goes to `out` [rows, nv, dv]."""
        s = self.s
        update = np.empty_like(s)
        alpha, beta = steps.alpha[:, :, None, None], steps.beta[:, :, None, None]
        q, k, v = steps.q[:, :, None, :], steps.k[:, :, None, :], steps.v[:, :, None, :]
        k_column = steps.k[:, :, :, None]
        for t in range(len(steps.u) if count is None else count):
            s *= alpha[t]
            delta = beta[t] * (v[t] - k[t] @ s)
            np.multiply(k_column[t], delta, out=update)
            s += update
            if out is not None:
                np.matmul(q[t], s, out=out[t, :, None, :])


@dataclass(frozen=True)
class DeltaNet:
    """The weights of one Gated DeltaNet mixer.

    Attributes:
        dims: head counts and sizes.
        eps: of the output norm.
        in_proj: float32 [conv_dim + value_heads * value_dim + 2 * value_heads, hidden]: qkv, z, b, a stacked.
        conv: float32 [kernel, conv_dim]; the last row weighs the current token.
        a_log, dt_bias: float32 [value_heads].
        norm: float32 [value_dim], the plain factor.
        out_proj: float32 [hidden, value_heads * value_dim].
    """

    dims: DeltaDims
    eps: float
    in_proj: Array
    conv: Array
    a_log: Array
    dt_bias: Array
    norm: Array
    out_proj: Array

    def __call__(self, x: Array, state: DeltaState, block: Block) -> Array:
        """x float32 [rows, hidden] -> float32 [rows, hidden]. Advances `state`."""
        d = self.dims
        z_dim = d.value_heads * d.value_dim
        cuts = (d.conv_dim, d.conv_dim + z_dim, d.conv_dim + z_dim + d.value_heads)
        u, z, b, a = np.split(project_rows(x, self.in_proj), cuts, axis=1)
        steps = self._steps(u, b, a, state)
        state.tape = steps if block.record else None
        out: Array = np.empty_like(steps.v)
        state.advance(steps, out)
        out = rms_norm(out, self.norm, self.eps)
        return project_rows(out.reshape(len(x), -1) * silu(z), self.out_proj)

    def _steps(self, u: Array, b: Array, a: Array, state: DeltaState) -> Steps:
        d, rows = self.dims, len(u)
        padded = np.concatenate([state.conv, u])
        state.conv = padded[rows:].copy()
        mixed = padded[:rows] * self.conv[0]
        for j in range(1, d.kernel):
            mixed += padded[j : j + rows] * self.conv[j]
        mixed = silu(mixed)
        cut = d.key_heads * d.key_dim
        q = _unit(mixed[:, :cut].reshape(rows, d.key_heads, d.key_dim)) * np.float32(d.key_dim**-0.5)
        k = _unit(mixed[:, cut : 2 * cut].reshape(rows, d.key_heads, d.key_dim))
        v = mixed[:, 2 * cut :].reshape(rows, d.value_heads, d.value_dim)
        if (group := d.value_heads // d.key_heads) > 1:
            q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
        alpha = np.exp(-np.exp(self.a_log) * np.logaddexp(np.float32(0.0), a + self.dt_bias))
        return Steps(u, q, k, v, alpha, sigmoid(b))


def _unit(x: Array) -> Array:
    out: Array = x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + _L2_EPS)
    return out
