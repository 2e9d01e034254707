"""The declarations. With its template, each is the whole truth about one family."""

from pathlib import Path

import numpy as np

from hipfire_kernels import KernelFamily, Lds, Scalar, Tensor, Tolerance

TEMPLATES = Path(__file__).parent / "templates"
DTYPES = ("f32", "f16", "bf16")
ROUNDED = {"f32": Tolerance(1e-5), "f16": Tolerance(1e-3), "bf16": Tolerance(8e-3)}
"""Of an output in that dtype: a few units in its last place."""

SQUARES = 1e17
"""Magnitudes up to which 8,192 squares have a sum in f32."""


def rms_norm(x, w, eps):
    """Zhang and Sennrich, Root Mean Square Layer Normalization, 2019."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * w


RMS_NORM = KernelFamily(
    name="rms_norm",
    doc="one row",
    params={"dtype": DTYPES},
    template=TEMPLATES / "rms_norm.hip.j2",
    entry=lambda v: f"rms_norm_{v.dtype}",
    args=lambda v: (
        Tensor("x", v.dtype, ("rows", "d"), largest=SQUARES),
        Tensor("w", v.dtype, ("d",)),
        Tensor("out", v.dtype, ("rows", "d"), writes=True),
        Scalar("d", "i32"),
        Scalar("eps", "f32", between=(1e-6, 1e-3)),
    ),
    extents={"rows": (1, 64), "d": (128, 8192)},
    grid=lambda v, s: (s.rows, 1, 1),
    block=128,
    lds=lambda v, arch: (Lds("parts", "float", 4),),
    reference=rms_norm,
    tolerance=lambda v: ROUNDED[v.dtype],
)


def swiglu(gate, up):
    """Shazeer, GLU Variants Improve Transformer, 2020."""
    gate = gate.astype(np.float64)
    return gate / (1 + np.exp(-gate)) * up


SWIGLU = KernelFamily(
    name="swiglu",
    doc="one row",
    params={"dtype": DTYPES, "width": (128, 256)},
    template=TEMPLATES / "swiglu.hip.j2",
    entry=lambda v: f"swiglu_{v.dtype}" + (f"_{v.width}" if v.width != 128 else ""),
    args=lambda v: (
        Tensor("gate", v.dtype, ("rows", "d")),
        Tensor("up", v.dtype, ("rows", "d")),
        Tensor("out", v.dtype, ("rows", "d"), writes=True),
        Scalar("d", "i32"),
    ),
    extents={"rows": (1, 64), "d": (32, 8192)},
    grid=lambda v, s: (s.rows, 1, 1),
    block=lambda v, arch: v.width,
    space=lambda v, site: {"width": (128, 256)},
    reference=swiglu,
    tolerance=lambda v: ROUNDED[v.dtype],
)


def top_k(x, values):
    """The k largest of each row, the largest first; of equal ones the one further left first."""
    x = x.astype(np.float64)
    order = np.argsort(-x, axis=1, kind="stable")[:, : values.shape[1]]
    return {"values": np.take_along_axis(x, order, axis=1), "indices": order}


TOP_K = KernelFamily(
    name="top_k",
    doc="one row",
    params={"k": (1, 8)},
    template=TEMPLATES / "top_k.hip.j2",
    entry=lambda v: f"top_k{v.k}",
    args=lambda v: (
        Tensor("x", "f32", ("rows", "n"), contents=("normal", "zeros", "scaled", "subnormal", "inf")),
        Tensor("values", "f32", ("rows", v.k), writes=True),
        Tensor("indices", "i32", ("rows", v.k), writes=True),
        Scalar("n", "i32"),
    ),
    extents={"rows": (1, 64), "n": (8, 4096)},
    grid=lambda v, s: (s.rows, 1, 1),
    reference=top_k,
    tolerance=Tolerance(0.0),
)

FAMILIES = (RMS_NORM, SWIGLU, TOP_K)
