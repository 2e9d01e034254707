"""A short run of the random requests of `model_soak.py`; its long form is a command of its own."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from model_soak import resident_mib, soak

from hipfire_kernels.model.deltanet import DeltaState
from hipfire_kernels.model.prefix import Checkpoints
from hipfire_kernels.model.qwen35 import TargetState
from hipfire_kernels.model.state import WarmState


def test_warm_equals_cold_and_memory_stays_flat(tmp_path: Path) -> None:
    memory = []
    for started, seen in soak(tmp_path, 150, seed=1):
        counts = seen
        if started in (75, 150):
            gc.collect()
            memory.append(resident_mib())
    # A snapshot of this target's recurrent state takes 0.1 MiB; the rings of the rooms may still have been filling.
    assert memory[1] < memory[0] + 4
    for kind in ("prefix hit", "prefix rewind", "prefix cold", "repair replayed", "repair reset", "repair realigned"):
        assert counts[kind] >= 1, counts
    for kind in ("end stop", "end length", "end cancelled", "end caller", "end failed", "refused", "sampled"):
        assert counts[kind] >= 1, counts


right_restore, right_rollback = DeltaState.restore, TargetState.rollback


def conv_not_restored(self: DeltaState, snapshot: Any) -> None:
    conv = self.conv
    right_restore(self, snapshot)
    self.conv = conv


def one_kept_too_many(self: TargetState, snapshot: Any, keep: int) -> None:
    right_rollback(self, snapshot, keep + 1)
    self.length -= 1


def nothing_reset(self: WarmState) -> None:
    self._shorten(0)
    self.target_state.length = 0


FAULTS = {
    "conv_not_restored": (DeltaState, "restore", conv_not_restored),
    "one_kept_too_many": (TargetState, "rollback", one_kept_too_many),
    "stale_checkpoints": (Checkpoints, "drop_beyond", lambda self, length: None),
    "recurrent_state_not_reset": (WarmState, "reset", nothing_reset),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = FAULTS[fault]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        list(soak(tmp_path, 200))
