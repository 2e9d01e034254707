"""Sums over the keys of a draft: their rounding must not grow with the context."""

from __future__ import annotations

import numpy as np
import pytest

from hipfire_kernels import families
from hipfire_kernels.running.binding import launch
from hipfire_kernels.running.devices.protocol import Device


@pytest.mark.parametrize("sliding", [False, True])
def test_the_error_of_equal_weights_does_not_grow(sliding: bool, host: Device) -> None:
    """Equal values come out as they went in. Every addition of a dim's long sum rounds the same way."""
    variant = families()["attention_dflash_f32"].variant(head_dim=128, sliding=sliding)
    value = np.linspace(1, 2, 128, dtype=np.float32)
    errors = []
    for keys in (128, 128 * 500):
        q, out = np.ones((1, 1, 128), np.float32), np.full((1, 1, 128), np.nan, np.float32)
        k, v = np.zeros((keys, 1, 128), np.float32), np.repeat(value[None, None], keys, axis=0)
        more = {"window": keys, "causal": 0} if sliding else {}
        launch(variant, host, q=q, k=k, v=v, out=out, scale=0.1, **more)
        errors.append(float(np.max(np.abs(out[0, 0] - value) / value)))
    assert 0 < errors[1] <= 1.2 * errors[0] < 5e-6, errors
