"""Files that live for a moment: another folder where the temporary one does not serve, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hipfire_kernels import families
from hipfire_kernels.archs import arch
from hipfire_kernels.building import scratch
from hipfire_kernels.building.builder import build
from hipfire_kernels.building.storage import replacing, reserve
from hipfire_kernels.errors import DeviceError, ToolchainUnavailable
from hipfire_kernels.running.devices import host as host_module
from hipfire_kernels.running.devices.host import HostDevice

WRITE = families()["kv_cache_write_q8_0_batched"].variant(pair=False)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The temporary folder and the cache folder's, of this test alone."""
    first = tmp_path / "tmp"
    first.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(first))
    monkeypatch.setattr(scratch, "_taken", {})
    second = tmp_path / "cache" / "scratch"
    monkeypatch.setattr(scratch, "_places", lambda: iter([first, second]))
    return first, second


def full(*folders: Path) -> Any:
    def instead(folder: Path, room: int) -> None:
        if any(folder.is_relative_to(one) for one in folders):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return instead


def test_the_temporary_folder_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "cache"))
    assert list(scratch._places())[:2] == [Path(tempfile.gettempdir()), tmp_path / "cache" / "scratch"]
    with scratch.folder() as made:
        assert made.parent == Path(tempfile.gettempdir())
    assert not made.exists()
    assert not (tmp_path / "cache").exists()


def test_another_folder_where_it_is_full(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = places
    monkeypatch.setattr(scratch, "reserve", full(first))
    for _ in range(3):
        with scratch.folder() as made:
            assert made.parent == second
    assert list(first.iterdir()) == list(second.iterdir()) == []
    assert second.stat().st_mode & 0o777 == second.parent.stat().st_mode & 0o777 == 0o700
    said = f"a compiler's files: in {second}, because of {first}: No space left on device"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_no_folder_has_room(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = places
    monkeypatch.setattr(scratch, "reserve", full(first, second))
    with pytest.raises(ToolchainUnavailable) as refused, scratch.folder():
        pass
    assert str(refused.value) == (
        f"a compiler's files: no folder serves ({first}: No space left on device; {second}: No space left on device); "
        "set TMPDIR or HIPFIRE_CACHE_DIR to one that has 16 MB of room"
    )


def test_what_may_be_written_is_found_out_by_the_system(tmp_path: Path) -> None:
    code = f"""
import pathlib, resource
from hipfire_kernels.building.storage import reserve
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
reserve(pathlib.Path({str(tmp_path)!r}), 4096)
try:
    reserve(pathlib.Path({str(tmp_path)!r}), 4097)
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")
    with pytest.raises(FileNotFoundError):
        reserve(tmp_path / "nowhere", 1)


def test_a_compiler_keeps_its_files_where_there_is_room(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, host: HostDevice
) -> None:
    from hipfire_kernels.building.toolchains import clang
    from hipfire_kernels.building.toolchains import host as host_toolchain
    from hipfire_kernels.building.toolchains._process import run

    seen: list[tuple[Path, str]] = []

    def watched(argv: Any, *, cwd: Path, env: Any = None) -> Any:
        seen.append((cwd.parent, run(["sh", "-c", "echo $TMPDIR"], cwd=cwd, env=env).out.strip()))
        return run(argv, cwd=cwd, env=env)

    monkeypatch.setattr(scratch, "reserve", full(places[0]))
    monkeypatch.setattr(host_toolchain, "run", watched)
    monkeypatch.setattr(clang, "run", watched)
    source = 'extern "C" __attribute__((global)) void empty() {}'
    clang.ClangToolchain().compile(source, arch("gfx1100"))
    host_toolchain.HostToolchain().compile('extern "C" int one() { return 1; }', arch("host"))
    assert {place for place, _ in seen} == {places[1]}
    assert all(Path(temporary).parent == places[1] for _, temporary in seen)
    assert list(places[1].iterdir()) == []


# ---- noexec ---------------------------------------------------------------------------------------------------------


def refusing(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Have the loader refuse what lies in a folder, as cffi says it of one that is mounted noexec."""
    ffi = host_module._FFI

    def dlopen(name: str) -> Any:
        if any(Path(name).is_relative_to(folder) for folder in folders):
            raise OSError(
                f"cannot load library {name!r}: {name}: failed to map segment from shared object.  Additionally, "
                f"ctypes.util.find_library() did not manage to locate a library called {name!r}"
            )
        return ffi.dlopen(name)

    monkeypatch.setattr(host_module, "_FFI", SimpleNamespace(dlopen=dlopen, new=ffi.new, cast=ffi.cast))


def test_kernels_load_from_another_folder(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: HostDevice
) -> None:
    first, second = places
    artifact, on = build(WRITE, "host"), HostDevice()
    caplog.set_level(logging.WARNING)
    refusing(monkeypatch, first)
    assert on.load(artifact).workspace_bytes > 0
    (record,) = caplog.records
    assert record.getMessage().startswith(f"loading kernels: in {second}, because of {first}: cannot load library")
    assert record.getMessage().endswith("failed to map segment from shared object")
    assert list(first.iterdir()) == list(second.iterdir()) == []


def test_no_folder_lets_kernels_load(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, host: HostDevice
) -> None:
    refusing(monkeypatch, *places)
    with pytest.raises(DeviceError) as refused:
        HostDevice().load(build(WRITE, "host"))
    said = str(refused.value)
    assert said.startswith("loading kernels: no folder serves (")
    assert all(f"{place}: cannot load library" in said for place in places)
    assert said.endswith("set TMPDIR or HIPFIRE_CACHE_DIR to one that is writable and not mounted noexec")
    assert "ctypes" not in said


MOUNTED = """
import logging
import numpy as np
logging.basicConfig()
import hipfire_kernels as hk
k = np.ones((1, 1, 32), np.float32)
cache = np.zeros((1, 1, 1, 34), np.uint8)
hk.kv_write(k, k, cache, cache.copy(), np.zeros(1, np.int32))
print(cache[0, 0, 0, 2])
"""


@pytest.mark.parametrize("options", ["noexec", "size=4k"])
def test_a_temporary_folder_that_is_mounted_so(options: str, tmp_path: Path, host: HostDevice) -> None:
    """A real one, in a mount namespace of its own."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    mount = f"mount -t tmpfs -o {options} tmpfs {tmp_path}"
    if subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount here")
    done = subprocess.run(
        [*inside, f'{mount}; TMPDIR={tmp_path} exec "$0" -c "$1"', sys.executable, MOUNTED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "127\n", done.stderr
    assert "loading kernels: in " in done.stderr
    assert "Traceback" not in done.stderr


# ---- nothing is left ------------------------------------------------------------------------------------------------


def test_what_a_process_left_is_removed_and_nothing_else(places: tuple[Path, Path]) -> None:
    first, second = places
    second.mkdir(parents=True)
    for place in places:
        (place / "hipfire-17-folder").mkdir()
        (place / "hipfire-17-folder" / "file").touch()
        (place / "hipfire-17-file.so").touch()
        (place / "hipfire-171-file.so").touch()
        (place / "hipfire-17").touch()
    scratch.discard({17, 18})
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    assert sorted(p.name for p in first.iterdir()) == ["hipfire-17", "hipfire-171-file.so"]


def test_names_begin_with_the_process(places: tuple[Path, Path], host: HostDevice) -> None:
    with scratch.folder() as made:
        assert made.name.startswith(scratch.prefix(os.getpid()))


def test_a_file_that_is_being_written_is_known(tmp_path: Path) -> None:
    from hipfire_kernels.building import storage

    with contextlib.suppress(FileNotFoundError), replacing(tmp_path / "out") as file:
        file.write(b"x")
        assert len(list(tmp_path.iterdir())) == len(storage._unfinished) == 1
        storage.remove_unfinished()
        assert list(tmp_path.iterdir()) == []
    assert not storage._unfinished
