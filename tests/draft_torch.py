"""The DFlash draft in torch, on torch's own norm, activation and attention, with a cache of its own. For the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class TorchDraft:
    """A draft of one sequence: its cache covers `length` context positions.

    Args:
        config: as config.json has it, with rope_parameters.
        tensors: under the names of the checkpoint, float32.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.length = 0
        self._config = config
        self._tensors = tensors
        none = torch.zeros(config["num_key_value_heads"], 0, config["head_dim"])
        self._caches = [(none, none)] * config["num_hidden_layers"]

    def step(self, taps: Tensor, block: Tensor) -> Tensor:
        """Hidden states after the last norm, [rows, hidden]. The context of `taps` stays in the cache, the block not.

        Args:
            taps: [n, taps * hidden], the outputs of the target that the cache has not had.
            block: [rows, hidden], the embeddings of anchor and masks.
        """
        context = self._norm("hidden_norm", functional.linear(taps, self._tensors["fc.weight"]))
        x = block
        for i in range(self._config["num_hidden_layers"]):
            p = f"layers.{i}."
            x = x + self._attention(i, context, self._norm(p + "input_layernorm", x))
            hidden = self._norm(p + "post_attention_layernorm", x)
            gated = functional.silu(self._linear(p + "mlp.gate_proj", hidden)) * self._linear(p + "mlp.up_proj", hidden)
            x = x + self._linear(p + "mlp.down_proj", gated)
        self.length += len(taps)
        return self._norm("norm", x)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._tensors[name + ".weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._tensors[name + ".weight"], self._config["rms_norm_eps"])

    def _heads(self, index: int, name: str, x: Tensor) -> Tensor:
        """A projection of x as [heads, rows, head_dim], normalised where the checkpoint has a norm for it."""
        p = f"layers.{index}.self_attn.{name}"
        heads = self._linear(p + "_proj", x).unflatten(-1, (-1, self._config["head_dim"]))
        return (heads if name == "v" else self._norm(p + "_norm", heads)).transpose(0, 1)

    def _turned(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding of [heads, rows, head_dim] from position `start` on, in pairs of the two halves."""
        dim, theta = self._config["head_dim"], self._config["rope_parameters"]["rope_theta"]
        turns = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(start, start + x.shape[1], dtype=torch.float64), turns)
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1).float()

    def _attention(self, index: int, context: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([context, hidden])
        keys = self._turned(self._heads(index, "k", both), self.length)
        values = self._heads(index, "v", both)
        old_keys, old_values = self._caches[index]
        keys, values = torch.cat([old_keys, keys], dim=1), torch.cat([old_values, values], dim=1)
        start = self.length + len(context)
        self._caches[index] = keys[:, :start], values[:, :start]
        query = self._turned(self._heads(index, "q", hidden), start)
        group = len(query) // len(keys)
        out = functional.scaled_dot_product_attention(
            query,
            keys.repeat_interleave(group, dim=0),
            values.repeat_interleave(group, dim=0),
            attn_mask=self._visible(index, start, keys.shape[1]),
        )
        return self._linear(f"layers.{index}.self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _visible(self, index: int, start: int, end: int) -> Tensor:
        """Bool [rows, keys]. A sliding layer is causal and a full one not, unless is_causal says it for all."""
        sliding = self._config["layer_types"][index] == "sliding_attention"
        ahead = torch.arange(end) - torch.arange(start, end)[:, None]
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if self._config.get("is_causal", sliding):
            visible &= ahead <= 0
        if sliding:
            visible &= ahead.abs() < self._config["sliding_window"]
        return visible
