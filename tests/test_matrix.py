"""The matrix vocabulary: lane maps against the manuals and against the operation itself, on the host and as built."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from matrix_lab import MAPS, map_device

from hipfire_kernels.building.builder import build
from hipfire_kernels.checking import matrix_probe
from hipfire_kernels.checking.matrix_probe import PROBE, keeps_subnormals, lane_maps, probe
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.inspecting import isa
from hipfire_kernels.running.devices.host import HostDevice

WithMap = Callable[[str], HostDevice]


@pytest.fixture
def with_map(monkeypatch: pytest.MonkeyPatch) -> WithMap:
    """A host device whose matrix operation has the lane map of a GPU."""
    return lambda name: map_device(monkeypatch, name)


@pytest.mark.parametrize("name", MAPS)
def test_the_operation_is_what_the_maps_say(name: str, with_map: WithMap) -> None:
    assert probe(with_map(name)) == []


def manual(name: str) -> dict[str, np.ndarray]:
    """What the manuals say, register by register: (lane, element) to (row or column, k) of A and B, and to D's place.

    gfx11, gfx12: RDNA3 and RDNA4 instruction set documents, 16x16x16 with 16-bit inputs in wave32. mma16: PTX, the
    fragments of mma.m16n8k16 with .f16 inputs. D of gfx11 and gfx12 is that of the instruction with operands in order.
    """
    elements = 16 if name == "gfx11" else 8
    found = {k: np.full((32, 16), -1) for k in ("a_row", "a_k", "b_col", "b_k", "d_row", "d_col")}
    for lane in range(32):
        for register, half in ((r, h) for r in range(elements // 2) for h in range(2)):
            i = 2 * register + half
            if name == "gfx11":  # lanes 16-31 repeat lanes 0-15
                line, k = lane % 16, 2 * register + half
                found["a_row"][lane, i], found["a_k"][lane, i] = line, k
                found["b_col"][lane, i], found["b_k"][lane, i] = line, k
            elif name == "gfx12":  # lanes 0-15: k 0-3 and 8-11, lanes 16-31: k 4-7 and 12-15
                line, k = lane % 16, i % 4 + 8 * (i // 4) + (4 if lane >= 16 else 0)
                found["a_row"][lane, i], found["a_k"][lane, i] = line, k
                found["b_col"][lane, i], found["b_k"][lane, i] = line, k
            else:
                group, within = divmod(lane, 4)
                found["a_row"][lane, i] = group if register in (0, 2) else group + 8
                found["a_k"][lane, i] = within * 2 + half + (8 if register >= 2 else 0)
                found["b_col"][lane, i] = group + (8 if register >= 2 else 0)  # registers 2, 3: of the second operation
                found["b_k"][lane, i] = within * 2 + half + (8 if register in (1, 3) else 0)
        for i in range(8):
            if name == "gfx11":
                found["d_row"][lane, i], found["d_col"][lane, i] = 2 * i + (lane >= 16), lane % 16
            elif name == "gfx12":
                found["d_row"][lane, i], found["d_col"][lane, i] = i + (8 if lane >= 16 else 0), lane % 16
            else:
                found["d_row"][lane, i] = lane // 4 + (8 if i in (2, 3, 6, 7) else 0)
                found["d_col"][lane, i] = lane % 4 * 2 + i % 2 + (8 if i >= 4 else 0)
    return found


@pytest.mark.parametrize("name", MAPS)
def test_the_maps_are_those_of_the_manuals(name: str, with_map: WithMap) -> None:
    maps, want = lane_maps(with_map(name)), manual(name)
    for key in ("a_row", "b_col"):
        assert np.array_equal(maps[key], want[key]), key
    # The order of k is free where A and B share it: to each k of the manual one of ours, in both alike.
    named = {
        (int(ours), int(theirs))
        for side in ("a_k", "b_k")
        for ours, theirs in zip(maps[side].flat, want[side].flat, strict=True)
    }
    assert sorted(ours for ours, theirs in named if theirs >= 0) == list(range(16)), named
    assert sorted(theirs for _, theirs in named if theirs >= 0) == list(range(16)), named
    if name != "gfx12":
        assert all(ours == theirs for ours, theirs in named)
    assert np.array_equal(maps["acct_row"], want["d_row"])
    assert np.array_equal(maps["acct_col"], want["d_col"])
    swapped = name != "mma16"  # Acc exchanges the operands of v_wmma, which transposes the result
    assert np.array_equal(maps["acc_row"], want["d_col" if swapped else "d_row"])
    assert np.array_equal(maps["acc_col"], want["d_row" if swapped else "d_col"])


@pytest.mark.parametrize("name", MAPS)
def test_the_probe_says_whether_subnormal_operands_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeps_subnormals(map_device(monkeypatch, name)) == (True, True)
    flushing = HostDevice(flush_f16=True)
    assert keeps_subnormals(flushing) == (False, False)
    assert probe(flushing) == []  # which kernels of AMD's dialect and the host's do not mind


def test_a_dialect_that_relies_on_subnormal_operands_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NVIDIA's does."""
    relies = ("constexpr bool READS_SUBNORMALS = false", "constexpr bool READS_SUBNORMALS = true")
    assert probe(map_device(monkeypatch, "mma16", *relies)) == []
    found = probe(HostDevice(flush_f16=True))
    assert [said.partition(" count")[0] for said in found] == ["subnormal f16 of A", "subnormal f16 of B"]


def test_a_device_that_reads_subnormal_operands_as_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ("if (!block.flush_f16) return pair;", "return pair & 0xfffeffffu;")
    with pytest.raises(DeviceError, match=r"of 256 subnormal f16 of [AB] times 1 are something else; required"):
        keeps_subnormals(map_device(monkeypatch, "gfx11", *half))


FAULTS = {
    "A's k in another order": ("gfx12", "int a_k(int i, int l) { return 8", "int a_k(int i, int l) { i ^= 2; return 8"),
    "rows of C exchanged": ("mma16", "acc_row(int i, int l) { return (l", "acc_row(int i, int l) { i ^= 2; return (l"),
    "wave halves of C exchanged": ("gfx11", "even = lane() & 16 ? other", "even = lane() & 8 ? other"),
    "one exchange short": ("mma16", "COL_LANES = 28", "COL_LANES = 12"),
    "second half not subtracted": ("gfx11", "(y - hy) * LOW)", "y * LOW)"),
    "second half not enlarged": ("gfx11", "(y - hy) * LOW)", "y - hy)"),
    "a first half that is subnormal": ("gfx12", "!(abs_f32(x) < 0x1p-14f)", "!(abs_f32(x) < 0x1p-18f)"),
    "a copy not waited for": ("gfx11", "> PENDING) hk::arrive(c)", "> PENDING + 1) hk::arrive(c)"),
    "chunks not where they are read": ("gfx12", "<CHUNKS>(row, column >> 3) * 4", "<CHUNKS>(row, column / 16) * 4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_probe_sees_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new = FAULTS[fault]
    assert probe(map_device(monkeypatch, name, old, new))


def test_lanes_that_should_hold_the_same_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx11 wants its operands in both wave halves; what it does with two different ones no manual says."""
    device = map_device(monkeypatch, "gfx11")
    words = np.full((1, 32, 8), 0x3C003C00, np.int32)
    nothing = np.zeros((1, 32, 8), np.int32)
    assert not np.isnan(matrix_probe._launch(device, words, words, nothing)["d"][0, :2]).any()
    words[0, 20, 3] = 0
    assert np.isnan(matrix_probe._launch(device, words, words, nothing)["d"][0, :2]).any()


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1151", "gfx1201"])
def test_it_is_the_matrix_unit_that_multiplies(arch: str) -> None:
    code = isa.listing(PROBE.variant(), arch).instructions
    assert {i.text.split()[0] for i in code if i.kind == "matrix"} == {"v_wmma_f32_16x16x16_f16"}
    built = build(PROBE.variant(), arch=arch)
    assert built.resources.scratch_bytes == built.resources.vgpr_spills == 0
    assert built.log == ""
