"""The arch table: one row per GPU that kernels can be built for.

Everything a template, a limit check or an occupancy figure needs to know about an arch is here and
nowhere else. To add an arch, add one row.
"""

from __future__ import annotations

from dataclasses import dataclass

from hipfire_kernels.errors import InputError

WAVE = 32
"""Lanes per wave. gfx11 and gfx12 run these kernels in wave32, an NVIDIA warp has 32 lanes, the host emulates 32."""


@dataclass(frozen=True)
class Arch:
    """What the library knows about one arch.

    Attributes:
        name: the exact name, as a compiler takes it (`gfx1100`, `sm_90`, `host`).
        dialect: which `templates/dialect_<dialect>.h` defines the kernel vocabulary.
        lds_bytes: LDS one workgroup may use.
        static_lds_bytes: what of that a kernel may declare with fixed addresses; more is one arena, whose size the
            launch must give. Everywhere but on NVIDIA it is all.
        lds_pool_bytes: LDS shared by the workgroups resident on `simds` SIMDs (a WGP on gfx11 and gfx12).
        simds: SIMDs that share `lds_pool_bytes`.
        vgpr_file: 32-lane VGPRs per SIMD; 0 where the idea does not apply.
        vgpr_granule: VGPRs are allocated to a wave in multiples of this.
        max_waves: waves one SIMD can hold.
        max_workgroup: threads one workgroup may have.
        max_workgroups: workgroups that may be resident on `simds` SIMDs, however small; 0 for no such limit.
        target: what the compiler is told, where that is not the name.
    """

    name: str
    dialect: str
    lds_bytes: int = 64 * 1024
    static_lds_bytes: int = 64 * 1024
    lds_pool_bytes: int = 128 * 1024
    simds: int = 4
    vgpr_file: int = 1536
    vgpr_granule: int = 24
    max_waves: int = 16
    max_workgroup: int = 1024
    max_workgroups: int = 0
    target: str = ""

    def arena_bytes(self, lds_bytes: int) -> int:
        """Of a block's LDS, what the launch must give: all or nothing."""
        return lds_bytes if lds_bytes > self.static_lds_bytes else 0


_TABLE = (
    Arch("gfx1100", "amd"),
    Arch("gfx1101", "amd"),
    Arch("gfx1151", "amd"),
    Arch("gfx1200", "amd"),
    Arch("gfx1201", "amd"),
    # A multiprocessor is four schedulers with 512 registers a lane each. Its 228 KiB of shared memory hold 1 KiB of the
    # system's for each block. Warpgroup instructions are there for the target sm_90a alone, which no other chip runs.
    Arch(
        "sm_90",
        "nvidia",
        lds_bytes=227 * 1024,
        static_lds_bytes=48 * 1024,
        lds_pool_bytes=228 * 1024,
        vgpr_file=512,
        vgpr_granule=8,
        max_workgroups=32,
        target="sm_90a",
    ),
    # The host runs a block at a time on each core: LDS and workgroup limits are the GPUs', so that a
    # kernel which passes here fits there; registers have no meaning.
    Arch("host", "host", vgpr_file=0, vgpr_granule=0, max_waves=0),
)

ARCHS: dict[str, Arch] = {a.name: a for a in _TABLE}


def arch(name: str) -> Arch:
    """Look up an arch by name. Feature suffixes (`gfx1100:sramecc-:xnack-`) are ignored for the comparison.

    Raises:
        InputError: the name is not in the table. Case and generic names (`GFX1100`, `gfx11-generic`) are not guessed.
    """
    found = ARCHS.get(name.split(":", 1)[0])
    if found is None:
        raise InputError(f"arch {name!r} is not known; known archs: {', '.join(ARCHS)}")
    return found
