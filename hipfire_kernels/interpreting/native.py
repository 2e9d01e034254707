"""The machine, compiled for this CPU by the compiler of the host target, and its memory layout."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hipfire_kernels.archs import arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.cache import Entry, artifact_key, default_cache
from hipfire_kernels.building.toolchains.registry import choose
from hipfire_kernels.errors import DeviceError
from hipfire_kernels.interpreting import table

_OPTIONS = ("-x", "c", "-std=gnu17", "-Wno-unused-function", "-Wno-unused-parameter", "-lm")
_ENTRY = "hk_machine_run"


_once = threading.RLock()
"""Of two threads that ask first, `functools.cache` alone has each make its own: structs of one are no structs of the
other."""


def ffi() -> Any:
    """cffi with the machine's structs."""
    with _once:
        return _ffi()


def machine() -> Any:
    """The machine as a library. Compiled once for a machine and version; then it comes from the artifact cache.

    Raises:
        ToolchainUnavailable: no compiler for the host works here.
        DeviceError: no folder lets code be loaded.
    """
    with _once:
        return _machine()


@functools.cache
def _ffi() -> Any:
    import cffi

    made = cffi.FFI()
    made.cdef(table.part("layout.h"))
    return made


@functools.cache
def _machine() -> Any:
    host = arch("host")
    compiler, text = choose(host), table.source()
    identity = compiler.identity(host)
    key = artifact_key(text, _ENTRY, identity, [*compiler.options(host), *_OPTIONS])

    def make() -> Entry:
        made = compiler.compile(text, host, _OPTIONS)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return Entry(key, host.name, _ENTRY, compiler.name, identity, {}, made.log, now, made.code)

    code = default_cache().get_or_build(key, host.name, make)[0].code
    wanted = "is writable and not mounted noexec"
    return scratch.somewhere("loading the interpreter", functools.partial(_loaded, code), wanted, DeviceError)


def _loaded(code: bytes, place: Path) -> Any:
    with tempfile.NamedTemporaryFile(prefix=scratch.prefix(os.getpid()), suffix=".so", dir=place) as file:
        file.write(code)
        file.flush()
        return ffi().dlopen(file.name)
