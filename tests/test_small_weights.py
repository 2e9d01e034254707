"""Weights that f16 has only subnormals for, in kernels on matrix units: thousands of them hold a share of a row, and
some units read subnormals as zero."""

from __future__ import annotations

import jinja2
import numpy as np
import pytest
import verify_lab
from budget import some

import hipfire_kernels as hk
from hipfire_kernels.authoring import templates
from hipfire_kernels.authoring.family import Variant
from hipfire_kernels.checking import reference
from hipfire_kernels.checking.numbers import worst_row
from hipfire_kernels.running.devices.host import HostDevice
from hipfire_kernels.running.draft import draft_attend_rows

MMA = hk.families()["attention_verify_mma_q8"]
PREFILL = hk.families()["attention_q8_0_flash_prefill_wmma"].variant(head_dim=128)
VERIFY = [MMA.variant(head_dim=128, group=2, rows=4, terms=terms) for terms in (1, 2)]
VERIFY += [hk.families()["attention_verify_gqa_q8"].variant(head_dim=128, group=2, rows=4), PREFILL]
DRAFTS = [
    hk.families()[f"attention_dflash_wmma{form}_f32"].variant(head_dim=128, kv=kv, sliding=False)
    for form in ("", "_m32", "_n64")
    for kv in ("f32", "f16")
]


def by_name(v: Variant) -> str:
    return v.name


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("variant", some(VERIFY, 3), ids=by_name)
def test_a_sink(variant: Variant, flush: bool) -> None:
    assert verify_lab.sink(variant, HostDevice(flush_f16=flush)) == ""


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("variant", some(DRAFTS, 3), ids=by_name)
def test_a_sink_of_a_draft(variant: Variant, flush: bool) -> None:
    q, *caches = verify_lab.a_sink(128, 2)
    k, v = (reference.decode_cache(cache).astype(np.float16 if variant.kv == "f16" else np.float32) for cache in caches)
    out = np.full(q.shape, np.nan, np.float32)
    draft_attend_rows(HostDevice(flush_f16=flush), q, k, v, out, variant=variant)
    assert worst_row(out, reference.draft_attend(q, k, v)) <= variant.tolerance.worst_row


def test_prefill_in_a_unit_of_its_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LIFT, weights below 2^-14 of the largest are lost where subnormals are."""
    original = templates._environment(None)
    assert original.loader is not None
    name = f"{PREFILL.family.name}.hip.j2"
    text = original.loader.get_source(original, name)[0]
    assert text.count("LIFT = WEIGHT / 2;") == 1
    faulty = jinja2.DictLoader({name: text.replace("LIFT = WEIGHT / 2;", "LIFT = 1;")})
    edited = original.overlay(loader=jinja2.ChoiceLoader([faulty, original.loader]), cache_size=0)
    monkeypatch.setattr(templates, "_environment", lambda folder: edited)
    assert verify_lab.sink(PREFILL, HostDevice()) == ""
    assert verify_lab.sink(PREFILL, HostDevice(flush_f16=True)) != ""
