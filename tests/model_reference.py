"""Naive float64 forms of the target and the draft, from the formulas alone: no cache, no shared code.

Tensors come as a dict of canonical names to arrays, sizes from the config.json dict.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(float(np.dot(x, x)) / len(x) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def rotate(x: np.ndarray, position: int, dim: int, theta: float) -> np.ndarray:
    """Rotate-half: pairs (j, j + dim / 2) of the first `dim` dimensions."""
    out = x.copy()
    for j in range(dim // 2):
        angle = position * theta ** (-2.0 * j / dim)
        a, b = x[j], x[j + dim // 2]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def softmax_sum(query: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    scores = np.array([float(query @ key) for key in keys]) / math.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return sum(w * v for w, v in zip(weights / weights.sum(), values, strict=True))


def mlp(x: np.ndarray, t: Tensors, prefix: str) -> np.ndarray:
    gate, up = t[prefix + "mlp.gate_proj.weight"] @ x, t[prefix + "mlp.up_proj.weight"] @ x
    return t[prefix + "mlp.down_proj.weight"] @ (silu(gate) * up)


def delta_net(c: dict[str, Any], t: Tensors, prefix: str, xs: list[np.ndarray]) -> list[np.ndarray]:
    """One Gated DeltaNet mixer over a whole sequence."""
    nk, nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dk, dv, kernel = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
    p = prefix + "linear_attn."
    us = [t[p + "in_proj_qkv.weight"] @ x for x in xs]
    state = [np.zeros((dk, dv)) for _ in range(nv)]
    outs = []
    for i, x in enumerate(xs):
        y = np.zeros_like(us[0])
        for j in range(kernel):
            if i - kernel + 1 + j >= 0:
                y += t[p + "conv1d.weight"][:, 0, j] * us[i - kernel + 1 + j]
        y = silu(y)
        z = t[p + "in_proj_z.weight"] @ x
        beta = sigmoid(t[p + "in_proj_b.weight"] @ x)
        softplus = np.log1p(np.exp(t[p + "in_proj_a.weight"] @ x + t[p + "dt_bias"]))
        alpha = np.exp(-np.exp(t[p + "A_log"]) * softplus)
        heads = []
        for h in range(nv):
            g = h // (nv // nk)
            q = y[g * dk : (g + 1) * dk]
            k = y[nk * dk + g * dk : nk * dk + (g + 1) * dk]
            v = y[2 * nk * dk + h * dv : 2 * nk * dk + (h + 1) * dv]
            q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(dk)
            k = k / math.sqrt(float(k @ k) + 1e-6)
            # S_t = alpha (I - beta k k^T) S_{t-1} + beta k v^T
            step = np.eye(dk) - beta[h] * np.outer(k, k)
            state[h] = alpha[h] * step @ state[h] + beta[h] * np.outer(k, v)
            o = rms(state[h].T @ q, c["rms_norm_eps"]) * t[p + "norm.weight"]
            heads.append(o * silu(z[h * dv : (h + 1) * dv]))
        outs.append(t[p + "out_proj.weight"] @ np.concatenate(heads))
    return outs


def full_attention(c: dict[str, Any], t: Tensors, prefix: str, xs: list[np.ndarray]) -> list[np.ndarray]:
    """One gated softmax attention mixer over a whole sequence."""
    n_heads, n_kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    rope = c["rope_parameters"]
    dim, theta, eps = int(d * rope["partial_rotary_factor"]), rope["rope_theta"], c["rms_norm_eps"]
    p = prefix + "self_attn."
    keys: list[list[np.ndarray]] = [[] for _ in range(n_kv)]
    values: list[list[np.ndarray]] = [[] for _ in range(n_kv)]
    outs = []
    for i, x in enumerate(xs):
        qg, k, v = (t[p + f"{name}_proj.weight"] @ x for name in "qkv")
        for h in range(n_kv):
            key = rms(k[h * d : (h + 1) * d], eps) * (1 + t[p + "k_norm.weight"])
            keys[h].append(rotate(key, i, dim, theta))
            values[h].append(v[h * d : (h + 1) * d])
        heads = []
        for h in range(n_heads):
            q, gate = qg[2 * h * d : (2 * h + 1) * d], qg[(2 * h + 1) * d : (2 * h + 2) * d]
            q = rotate(rms(q, eps) * (1 + t[p + "q_norm.weight"]), i, dim, theta)
            g = h // (n_heads // n_kv)
            heads.append(softmax_sum(q, keys[g], values[g]) * sigmoid(gate))
        outs.append(t[p + "o_proj.weight"] @ np.concatenate(heads))
    return outs


def target(c: dict[str, Any], tensors: Tensors, tokens: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """Outputs of every layer, each [tokens, hidden], and the logits [tokens, vocab]."""
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    eps = c["rms_norm_eps"]
    xs = [t["embed_tokens.weight"][token] for token in tokens]
    outputs = []
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        mixer = full_attention if kind == "full_attention" else delta_net
        mixed = mixer(c, t, p, [rms(x, eps) * (1 + t[p + "input_layernorm.weight"]) for x in xs])
        xs = [x + m for x, m in zip(xs, mixed, strict=True)]
        norm = 1 + t[p + "post_attention_layernorm.weight"]
        xs = [x + mlp(rms(x, eps) * norm, t, p) for x in xs]
        outputs.append(np.array(xs))
    head = t.get("lm_head.weight", t["embed_tokens.weight"])
    return outputs, np.array([head @ (rms(x, eps) * (1 + t["norm.weight"])) for x in xs])


def draft(c: dict[str, Any], tensors: Tensors, taps: np.ndarray, block: np.ndarray) -> np.ndarray:
    """Normalised hidden states [rows, hidden] of a draft block.

    taps [n, n_taps * hidden] are the tapped target outputs of positions 0..n-1, block [rows, hidden] the
    embeddings of the anchor and the masks at positions n, n+1, ...
    """
    t = {name: x.astype(np.float64) for name, x in tensors.items()}
    n_heads, n_kv, d, eps = (
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["rms_norm_eps"],
    )
    theta, start = c["rope_parameters"]["rope_theta"], len(taps)
    context = [rms(t["fc.weight"] @ tap, eps) * t["hidden_norm.weight"] for tap in taps.astype(np.float64)]
    xs = list(block.astype(np.float64))
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        hidden = [rms(x, eps) * t[p + "input_layernorm.weight"] for x in xs]
        keys: list[list[np.ndarray]] = [[] for _ in range(n_kv)]
        values: list[list[np.ndarray]] = [[] for _ in range(n_kv)]
        for position, source in enumerate([*context, *hidden]):
            k, v = (t[p + f"self_attn.{name}_proj.weight"] @ source for name in "kv")
            for h in range(n_kv):
                key = rms(k[h * d : (h + 1) * d], eps) * t[p + "self_attn.k_norm.weight"]
                keys[h].append(rotate(key, position, d, theta))
                values[h].append(v[h * d : (h + 1) * d])
        sliding = kind == "sliding_attention"
        causal = c["dflash_config"].get("causal", sliding)
        for row, x in enumerate(hidden):
            at = start + row
            seen = [
                k
                for k in range(start + len(xs))
                if (not causal or k <= at) and (not sliding or abs(at - k) < c["sliding_window"])
            ]
            q = t[p + "self_attn.q_proj.weight"] @ x
            heads = []
            for h in range(n_heads):
                query = rms(q[h * d : (h + 1) * d], eps) * t[p + "self_attn.q_norm.weight"]
                g = h // (n_heads // n_kv)
                ks, vs = [keys[g][k] for k in seen], [values[g][k] for k in seen]
                heads.append(softmax_sum(rotate(query, at, d, theta), ks, vs))
            xs[row] = xs[row] + t[p + "self_attn.o_proj.weight"] @ np.concatenate(heads)
        norm = t[p + "post_attention_layernorm.weight"]
        xs = [x + mlp(rms(x, eps) * norm, t, p) for x in xs]
    return np.array([rms(x, eps) * t["norm.weight"] for x in xs])
