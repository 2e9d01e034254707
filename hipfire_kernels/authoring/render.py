"""Declaration and template to HIP source. Needs no compiler.

The source stands alone: dialect, shared headers and body in one text, which is what the cache digests and what an
evidence record names.
"""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, Protocol

from hipfire_kernels import layout
from hipfire_kernels.archs import WAVE, Arch, arch
from hipfire_kernels.authoring.args import C_TYPES, LDS_TYPES, Arg, Lds, Scalar, Tensor
from hipfire_kernels.authoring.places import mark, resolve, without
from hipfire_kernels.authoring.templates import Template
from hipfire_kernels.errors import RenderError

_DIALECT_PARTS = {
    "amd": ("dialect_amd.h", "vec.h", "vocabulary_amd.h", "wave.h", "vocabulary.h"),
    "nvidia": ("dialect_nvidia.h", "vec.h", "vocabulary_nvidia.h", "wave.h", "vocabulary.h"),
    "nvidia_arena": ("dialect_nvidia.h", "shared_arena.h", "vec.h", "vocabulary_nvidia.h", "wave.h", "vocabulary.h"),
    "host": ("dialect_host.h", "faults_host.h", "vec.h", "vocabulary_host.h", "vocabulary.h"),
}
"""What a dialect is made of. `wave.h` builds reductions and scans of a wave from a lane exchange; the host has none. A
kernel with more LDS than the arch lets one declare has it in an arena."""


class Renderable(Protocol):
    """What rendering asks of a kernel. `family.Variant` is one."""

    @property
    def name(self) -> str:
        """Unique, readable."""

    @property
    def entry(self) -> str:
        """The kernel's symbol."""

    @property
    def template(self) -> Template:
        """The body."""

    @property
    def doc(self) -> str:
        """What one block owns."""

    @property
    def params(self) -> tuple[tuple[str, Any], ...]:
        """Parameters and their values."""

    @property
    def args(self) -> tuple[Arg, ...]:
        """The argument list, in signature order."""

    def lds(self, arch: str) -> tuple[Lds, ...]:
        """The LDS arrays on an arch."""

    def lds_bytes(self, arch: str) -> int:
        """LDS of one block on an arch, in bytes."""

    def threads(self, arch: str) -> int:
        """Threads of one block on an arch."""


def render(variant: Renderable, arch_name: str = "gfx1100") -> str:
    """The HIP C++ source of a variant for an arch.

    Raises:
        RenderError: LDS or workgroup over the arch's limit (by how much), or a name the template does not get.
        InputError: the arch is unknown.
    """
    target = arch(arch_name)
    _check_limits(variant, target)
    body = resolve(_parts(variant, target))
    return _banner(variant, target, body) + body


def source_digest(source: str) -> str:
    """SHA-256 of a rendered source, in hex. Evidence is bound to it, so that `#line` directives do not count."""
    return hashlib.sha256(without(source).encode()).hexdigest()


def _parts(variant: Renderable, target: Arch) -> str:
    arena = "_arena" if target.arena_bytes(variant.lds_bytes(target.name)) else ""
    names = [*_DIALECT_PARTS[target.dialect + arena], variant.template.name]
    if target.dialect == "host":
        names.append("host_entry.h.j2")
    return variant.template.render(names, _context(variant, target))


def _context(variant: Renderable, target: Arch) -> dict[str, object]:
    """All a template can name: parameters, what the declaration derives from them, layout constants."""
    return {**beside_parameters(variant, target), **dict(variant.params)}


def beside_parameters(variant: Renderable, target: Arch) -> dict[str, object]:
    """What a template can name besides the parameters."""
    params = dict(variant.params)
    lds_arrays = _lds_arrays(variant, target)
    derived = {"dims_per_lane": params["head_dim"] // WAVE} if "head_dim" in params else {}
    return {
        "WAVE": WAVE,
        "TILE": layout.TILE,
        "Q8_BLOCK": layout.Q8_BLOCK,
        "Q8_BYTES": layout.Q8_BYTES,
        "RECORD_HEAD": layout.RECORD_HEAD,
        "SPLIT_KEYS": layout.SPLIT_KEYS,
        "MAX_SPLITS": layout.MAX_SPLITS,
        "SLAB_PITCH": layout.SLAB_PITCH,
        "entry": variant.entry,
        "block": variant.threads(target.name),
        "lds_bytes": variant.lds_bytes(target.name),
        "signature": _signature(variant, target),
        "dialect": target.dialect,
        "lds": SimpleNamespace(**{one.name: one.declared for one in lds_arrays}),
        "lds_arrays": lds_arrays,
        "matrix": f"matrix_{target.dialect}.h",
        "args": [_c_type(arg) for arg in variant.args],
        **derived,
    }


def _c_type(arg: Arg) -> str:
    if isinstance(arg, Scalar):
        return C_TYPES[arg.dtype]
    return f"{'' if arg.writes else 'const '}{C_TYPES[arg.dtype]}*"


def _signature(variant: Renderable, target: Arch) -> str:
    """The kernel's C signature, a tensor a line with its shape as comment."""
    scalars = ", ".join(f"{_c_type(arg)} {arg.name}" for arg in variant.args if isinstance(arg, Scalar))
    tensors = [arg for arg in variant.args if isinstance(arg, Tensor)]
    lines = []
    for arg in tensors:
        shape = "".join(f"[{extent}]" for extent in arg.shape)
        comma = "," if scalars or arg is not tensors[-1] else ""
        lines.append(f"    {_c_type(arg)} __restrict__ {arg.name}{comma}  // {shape}")
    # A kernel that moves registers between its warpgroups must know how many it has: one block, all of them.
    bounds = f"{variant.threads(target.name)}{', 1' if target.arena_bytes(variant.lds_bytes(target.name)) else ''}"
    head = f'extern "C" __global__ __launch_bounds__({bounds}) void {variant.entry}('
    text = [head, *lines, f"    {scalars})"]
    return "\n".join(mark(f"declaration of {variant.name}", n) + line for n, line in enumerate(text, 1))


def _lds_arrays(variant: Renderable, target: Arch) -> list[SimpleNamespace]:
    """The LDS arrays: what declares each, the bytes ahead of it, those of an element, and those of all."""
    arrays, offset = [], 0
    for region in variant.lds(target.name):
        macro = "SHARED(" if region.align == 1 else f"SHARED_ALIGNED({region.align}, "
        declared = f"{macro}{region.ctype}, {region.name}, {region.count}, {offset});"
        size = LDS_TYPES[region.ctype]
        align = max(size, region.align)
        arrays.append(
            SimpleNamespace(
                **{**vars(region), "align": align}, declared=declared, offset=offset, used=size * region.count
            )
        )
        offset += region.nbytes
    return arrays


def _check_limits(variant: Renderable, target: Arch) -> None:
    needed = variant.lds_bytes(target.name)
    over = needed - target.lds_bytes
    if over > 0:
        raise RenderError(
            f"{variant.name} needs {needed} bytes of LDS, {over} more than the {target.lds_bytes} "
            f"one workgroup has on {target.name}; choose a smaller tile or fewer rows"
        )
    threads = variant.threads(target.name)
    if threads % WAVE or threads > target.max_workgroup:
        raise RenderError(
            f"{variant.name} declares {threads} threads a block; required: a multiple of {WAVE} up to "
            f"{target.max_workgroup} on {target.name}"
        )


def _banner(variant: Renderable, target: Arch, body: str) -> str:
    parameters = ", ".join(f"{name}={value}" for name, value in variant.params)
    return (
        f"// {variant.name}: {variant.template.name.removesuffix('.hip.j2')}({parameters}) for {target.name}\n"
        f"// One block owns {variant.doc}.\n"
        f"// body sha256 {source_digest(body)[:16]}\n\n"
    )
