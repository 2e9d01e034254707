"""Host devices whose matrix operation has the lane map of a GPU, and kernels as the GPU declares them."""

from __future__ import annotations

import dataclasses

import jinja2
import pytest

from hipfire_kernels.archs import arch
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.running.devices.host import HostDevice

MAPS = ("gfx11", "gfx12", "mma16")


def map_device(monkeypatch: pytest.MonkeyPatch, name: str, old: str = "", new: str = "") -> HostDevice:
    """A host device with the lane map of `name`; with a fault where `old` becomes `new` in every matrix header."""
    original = templates._environment(None)
    assert original.loader is not None
    texts = {}
    for header in ("matrix_host.h", "matrix_maps.h", "matrix.h"):
        text = original.loader.get_source(original, header)[0]
        texts[header] = text.replace(old, new) if old else text
    host = texts["matrix_host.h"]
    assert "namespace fragment = gfx11;" in host
    texts["matrix_host.h"] = host.replace("namespace fragment = gfx11;", f"namespace fragment = {name};")
    edited = original.overlay(loader=jinja2.ChoiceLoader([jinja2.DictLoader(texts), original.loader]), cache_size=0)
    monkeypatch.setattr(templates, "_environment", lambda folder: edited)
    return HostDevice()


def as_on(variant: Variant, arch_name: str) -> Variant:
    """The variant with the LDS arrays it has on another arch: they can decide which formulation a template takes."""
    lds = variant.lds(arch_name)
    family = dataclasses.replace(variant.family, lds=lambda v, a: lds)
    assert arch(arch_name).lds_bytes >= variant.lds_bytes(arch_name)
    return dataclasses.replace(variant, family=family)
