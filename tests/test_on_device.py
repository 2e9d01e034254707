"""What `bench.on_device` makes of the tools that it starts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hipfire_kernels import families
from hipfire_kernels.bench import on_device
from hipfire_kernels.errors import DeviceError

FAKE = """#!/bin/sh
case "$2 $*" in
  memcheck*verify_mma*) echo "========= ERROR SUMMARY: 0 errors" ;;
  memcheck*verify_gqa*) echo "========= ERROR SUMMARY: 3 errors"; exit 9 ;;
  racecheck*others*) exec sleep 2000 ;;
  *) echo "========= SUMMARY: fine" ;;
esac
"""


def test_a_sanitizer_that_fails_or_does_not_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(argv: list[str], *, timeout: float, **options: Any) -> Any:
        """With a limit for the one that sleeps alone: the others may take as long as they need on a busy machine."""
        assert timeout == on_device.SANITIZE_LIMIT_S
        sleeps = "racecheck" in argv and "others" in argv[-1]
        return subprocess.run(argv, timeout=0.2 if sleeps else None, **options)

    monkeypatch.setattr(on_device, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    found = on_device.sanitize("cuda:0")
    assert found["memcheck attention_verify_mma_q8"] == "exit 0: ERROR SUMMARY: 0 errors"
    assert found["memcheck attention_verify_gqa_q8"].startswith("exit 9: ERROR SUMMARY: 3 errors")
    assert found["racecheck others"] == f"did not end in {on_device.SANITIZE_LIMIT_S} s"
    assert len(found) == len(on_device.SANITIZED)


def test_no_sanitizer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DeviceError, match="compute-sanitizer is not on the PATH"):
        on_device.sanitize("cuda:0")


def test_every_family_is_sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Passed:
        ok = True

    monkeypatch.setattr(on_device, "check_case", lambda case, subject: ran.append(case.variant) or Passed)
    for families_of in dict.fromkeys(families_of for _, families_of in on_device.SANITIZED):
        on_device.one_case_each("host", families_of)
    assert set(ran) == {v.entry for family in families().values() for v in family.variants()}
