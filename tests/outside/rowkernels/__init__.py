"""RMSNorm, SwiGLU and top-k over rows."""

from rowkernels.kernels import FAMILIES, RMS_NORM, SWIGLU, TOP_K

__all__ = ["FAMILIES", "RMS_NORM", "SWIGLU", "TOP_K"]
