"""The artifact cache: whole entries or none, whatever happens to the folder, the disk or other processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hipfire_kernels.archs import Arch
from hipfire_kernels.building import cache as cache_module
from hipfire_kernels.building.builder import Artifact, build
from hipfire_kernels.building.cache import ArtifactCache, Counters, Entry, artifact_key, default_cache
from hipfire_kernels.building.toolchains import Candidate, Compiled, Toolchain
from hipfire_kernels.errors import CompileError, InputError

KEY = artifact_key("source")
ENTRY = Entry(
    KEY,
    "gfx1100",
    "axpy",
    "clang",
    "clang 22",
    {"vgprs": 5},
    "a warning\n",
    "2026-01-01T00:00:00",
    b"\x7fELF\n\0",
)


def entry_file(root: Path, key: str = KEY) -> Path:
    return root / "artifacts" / f"{key}.hfk"


def count_build(cache: ArtifactCache, entry: Entry = ENTRY) -> int:
    """How often one request for the entry compiles."""
    calls: list[int] = []

    def make() -> Entry:
        calls.append(1)
        return entry

    found, cached = cache.get_or_build(entry.key, entry.arch, make)
    assert found == entry
    assert cached == (not calls)
    return len(calls)


class Script(Toolchain):
    """A compiler that answers what it is told, and counts."""

    name = "script"

    def __init__(self, version: str = "1", options: tuple[str, ...] = ("-O3",)) -> None:
        self.version, self.flags, self.compiled = version, options, 0

    def targets(self, arch: Arch) -> bool:
        return True

    def candidates(self, arch: Arch) -> tuple[Candidate, ...]:
        return (Candidate("script", None, identity=self.version),)

    def options(self, arch: Arch) -> tuple[str, ...]:
        return self.flags

    def compile(self, source: str, arch: Arch, extra: tuple[str, ...] = ()) -> Compiled:
        self.compiled += 1
        if "refuse" in source:
            raise CompileError("refused", log="why", source=source)
        return Compiled(b"code of " + source.encode(), "")


class Kernel:
    """The least that `build` takes."""

    def __init__(self, text: str = "body", entry: str = "k", lds_bytes: int = 64) -> None:
        self.text, self.entry, self.threads = text, entry, 32
        self._lds_bytes = lds_bytes

    def lds_bytes(self, arch: str) -> int:
        return self._lds_bytes

    def source(self, arch: str) -> str:
        return self.text


class TestEntry:
    def test_comes_back_from_disk_as_it_was(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        fresh = ArtifactCache(tmp_path)
        assert fresh.get(KEY, "gfx1100") == ENTRY
        assert fresh.counters == Counters(hits=1)
        assert list(fresh.entries()) == [ENTRY]
        assert fresh.verify() == []

    def test_is_two_text_lines_and_the_code(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        first, header, code = entry_file(tmp_path).read_bytes().split(b"\n", 2)
        assert first.startswith(b"hipfire-artifact 2 ")
        assert json.loads(header)["resources"] == {"vgprs": 5}
        assert code == ENTRY.code

    def test_is_private(self, tmp_path: Path) -> None:
        root = tmp_path / "new"
        ArtifactCache(root).put(ENTRY)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "artifacts", entry_file(root))]
        assert modes == [0o700, 0o700, 0o600]

    def test_others_may_write_is_named_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        tmp_path.chmod(0o777)
        cache = ArtifactCache(tmp_path)
        cache.put(ENTRY)
        cache.put(ENTRY)
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        assert f"{tmp_path} can be written by others" in caplog.text

    def test_reading_creates_nothing(self, tmp_path: Path) -> None:
        cache = ArtifactCache(tmp_path / "new")
        assert cache.get(KEY, "gfx1100") is None
        assert not cache.verify()
        assert not list(cache.entries())
        assert not cache.path.exists()


class TestHealing:
    """Whatever stands in an entry's place is a miss, and the next build puts the entry there."""

    @staticmethod
    def heals(root: Path) -> None:
        cache = ArtifactCache(root)
        assert count_build(cache) == 1
        assert cache.counters == Counters(misses=1, corrupt=1, compiled=1)
        assert ArtifactCache(root).get(KEY, "gfx1100") == ENTRY
        assert ArtifactCache(root).verify() == []

    def test_every_truncation(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        whole = entry_file(tmp_path).read_bytes()
        for length in range(len(whole)):
            entry_file(tmp_path).write_bytes(whole[:length])
            assert ArtifactCache(tmp_path).get(KEY, "gfx1100") is None, length
        self.heals(tmp_path)

    def test_every_bit_flip(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        whole = entry_file(tmp_path).read_bytes()
        for position in range(len(whole)):
            altered = bytearray(whole)
            altered[position] ^= 1 << position % 8
            entry_file(tmp_path).write_bytes(altered)
            assert ArtifactCache(tmp_path).get(KEY, "gfx1100") is None, position
        self.heals(tmp_path)

    def test_bytes_behind_it(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        with entry_file(tmp_path).open("ab") as file:
            file.write(b"\0")
        self.heals(tmp_path)

    def test_other_schema(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "SCHEMA", 99)
            ArtifactCache(tmp_path).put(ENTRY)
        self.heals(tmp_path)

    @pytest.mark.parametrize("stranger", [replace(ENTRY, arch="gfx1201"), replace(ENTRY, key=artifact_key("other"))])
    def test_sound_entry_of_another_arch_or_key(self, tmp_path: Path, stranger: Entry) -> None:
        ArtifactCache(tmp_path).put(stranger)
        if stranger.key != KEY:
            shutil.copy(entry_file(tmp_path, stranger.key), entry_file(tmp_path))
            entry_file(tmp_path, stranger.key).unlink()
        self.heals(tmp_path)

    @pytest.mark.parametrize("header", [b"not json", b"[]", b'{"key": "x"}', b'{"surplus": 1}'])
    def test_right_digest_over_a_header_that_is_wrong(self, tmp_path: Path, header: bytes) -> None:
        import hashlib

        ArtifactCache(tmp_path).put(ENTRY)
        rest = header + b"\ncode"
        entry_file(tmp_path).write_bytes(
            b"hipfire-artifact 2 " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
        )
        self.heals(tmp_path)

    @pytest.mark.parametrize("place", [
        lambda path: (path.mkdir(), (path / "inside").write_text("x")),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to(path),
    ], ids=["folder", "fifo", "symlink to itself"])  # fmt: skip
    def test_no_file_in_its_place(self, tmp_path: Path, place: Callable[[Path], object]) -> None:
        (tmp_path / "artifacts").mkdir()
        place(entry_file(tmp_path))
        assert [finding.path for finding in ArtifactCache(tmp_path).verify()] == [entry_file(tmp_path)]
        self.heals(tmp_path)

    def test_unreadable(self, open_folder: Path) -> None:
        ArtifactCache(open_folder).put(ENTRY)
        entry_file(open_folder).chmod(0)
        self.heals(open_folder)

    def test_failed_build_leaves_nothing(self, tmp_path: Path) -> None:
        cache = ArtifactCache(tmp_path)
        with pytest.raises(CompileError, match="refused"):
            build(Kernel("refuse"), "host", Script(), cache)
        assert list(cache.entries()) == []
        assert cache.counters.compiled == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder reached as a user whom file modes bind: root drops to nobody for the test."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        if root:
            os.chown(name, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if root:
                os.seteuid(0)
            os.chmod(name, 0o700)


class TestDisk:
    """A disk that refuses costs one warning and nothing else."""

    @staticmethod
    def works_without(cache: ArtifactCache, caplog: pytest.LogCaptureFixture, said: str) -> None:
        assert count_build(cache) == 1
        assert count_build(cache) == 0  # from memory
        assert count_build(cache, replace(ENTRY, key=artifact_key("second"))) == 1
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert said in warnings[0].getMessage()
        assert "HIPFIRE_CACHE_DIR" in warnings[0].getMessage()

    def test_read_only_folder(self, open_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        open_folder.chmod(0o555)
        self.works_without(ArtifactCache(open_folder), caplog, "Permission denied")

    def test_read_only_folder_serves_what_it_has(self, open_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        ArtifactCache(open_folder).put(ENTRY)
        for folder in (open_folder, open_folder / "artifacts"):
            folder.chmod(0o555)
        assert count_build(ArtifactCache(open_folder)) == 0
        (open_folder / "artifacts").chmod(0o700)
        assert not caplog.records

    def test_path_is_a_file(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("x")
        self.works_without(ArtifactCache(tmp_path / "file"), caplog, "File exists")

    def test_path_below_a_file(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("x")
        self.works_without(ArtifactCache(tmp_path / "file" / "cache"), caplog, "Not a directory")

    @pytest.mark.parametrize("call", ["replace", "fsync"])
    def test_full(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, call, full)
        self.works_without(ArtifactCache(tmp_path), caplog, "No space left")
        assert list((tmp_path / "artifacts").iterdir()) == []

    def test_write_cut_off_by_a_limit(self, tmp_path: Path) -> None:
        """A real short write: the process may not write files above 4 KiB."""
        code = """
            import resource, signal
            from dataclasses import replace
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            assert count_build(cache, replace(ENTRY, code=bytes(100_000))) == 1
        """
        assert "cannot be written" in run_child(code, tmp_path).stderr
        assert list((tmp_path / "artifacts").iterdir()) == []


CHILD = f"""
import logging, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
logging.basicConfig()
from hipfire_kernels.building.cache import ArtifactCache
from test_cache import ENTRY, KEY, count_build
root = sys.argv[1]
cache = ArtifactCache(root)
def slow():
    with open(os.path.join(root, "compiled"), "a") as file:
        file.write("x")
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
    return ENTRY
"""


def child(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", CHILD + textwrap.dedent(code), *map(str, arguments)]


def run_child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(child(code, *arguments), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done


BUILD = "print(cache.get_or_build(KEY, 'gfx1100', slow)[1], cache.counters.compiled)"


class TestProcesses:
    def test_eight_cold_starts_compile_once(self, tmp_path: Path) -> None:
        running = [
            subprocess.Popen(child(BUILD, tmp_path, 0.5), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(8)
        ]
        said = [process.communicate(timeout=600) for process in running]
        assert all(err == "" for _, err in said)
        assert sorted(out.split()[-2:] for out, _ in said) == [["False", "1"], *[["True", "0"]] * 7]
        assert (tmp_path / "compiled").read_text() == "x"

    def test_killed_builder_frees_the_lock(self, tmp_path: Path, no_waiting: None) -> None:
        builder = self.start_builder(tmp_path)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        assert count_build(ArtifactCache(tmp_path)) == 1

    def test_killed_builder_frees_a_waiter(self, tmp_path: Path) -> None:
        builder = self.start_builder(tmp_path)
        waiter = subprocess.Popen(child(BUILD, tmp_path, 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not self.waits(waiter.pid, self.lock(tmp_path)):
            assert waiter.poll() is None
        builder.kill()
        builder.wait()
        said, warned = waiter.communicate(timeout=600)
        assert said.split()[-2:] == ["False", "1"]
        assert warned == ""  # the lock was taken, not passed over

    def test_stuck_builder_is_named_and_overtaken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(cache_module, "_WAIT_NOTICE_S", 0.1)
        monkeypatch.setattr(cache_module, "_WAIT_LIMIT_S", 0.3)
        builder = self.start_builder(tmp_path)
        assert count_build(ArtifactCache(tmp_path)) == 1
        assert f"for process {builder.pid}, which compiles" in caplog.text
        assert f"process {builder.pid} has held" in caplog.text
        builder.kill()
        builder.wait()

    @pytest.mark.parametrize("gone", ["stopped", "elsewhere"])
    def test_a_holder_that_does_not_run_here_costs_no_more_than_a_compilation(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, gone: str
    ) -> None:
        assert cache_module._WAIT_UNSEEN_S <= 5
        monkeypatch.setattr(cache_module, "_WAIT_UNSEEN_S", 0.1)
        monkeypatch.setattr(cache_module, "_WAIT_LIMIT_S", math.inf)
        builder = self.start_builder(tmp_path)
        assert cache_module._holders(self.lock(tmp_path)) == str(builder.pid)
        if gone == "stopped":
            builder.send_signal(signal.SIGSTOP)
        else:  # on another machine, which shares the folder: the system lists none
            monkeypatch.setattr(cache_module, "_holders", lambda path: "")
        assert count_build(ArtifactCache(tmp_path)) == 1
        assert "no process that runs here has held" in caplog.text
        builder.kill()
        builder.wait()

    def test_a_marker_of_another_lock_is_none(self, tmp_path: Path, no_waiting: None) -> None:
        """What a library leaves that locks by the presence of a file, where there is no flock."""
        (tmp_path / "locks").mkdir()
        self.lock(tmp_path).write_text("4711\nanother-machine\n")
        assert count_build(ArtifactCache(tmp_path)) == 1

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
    def test_a_file_system_without_locks(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        no_waiting: None,
        number: int,
    ) -> None:
        def none(*args: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", none)
        cache = ArtifactCache(tmp_path)
        assert count_build(cache) == 1
        assert count_build(cache, replace(ENTRY, key=artifact_key("second"))) == 1
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"the file system of {tmp_path} has no locks ({os.strerror(number)})" in caplog.text
        assert ArtifactCache(tmp_path).get(KEY, "gfx1100") == ENTRY

    @pytest.fixture
    def no_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wait(seconds: float) -> None:
            raise AssertionError("waits for a lock")

        monkeypatch.setattr(cache_module.time, "sleep", wait)

    @staticmethod
    def waits(pid: int, lock: Path) -> bool:
        """Whether a process has the file of a lock open."""
        with contextlib.suppress(FileNotFoundError):  # one that was open, or all of them
            return str(lock) in [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
        return False

    @staticmethod
    def lock(root: Path) -> Path:
        return root / "locks" / f"{KEY}.lock"

    def test_eight_threads_compile_once(self, tmp_path: Path) -> None:
        cache, calls = ArtifactCache(tmp_path), []

        def make() -> Entry:
            calls.append(1)
            time.sleep(0.1)
            return ENTRY

        threads = [threading.Thread(target=cache.get_or_build, args=(KEY, "gfx1100", make)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(calls) == cache.counters.compiled == 1
        assert cache.counters.hits == 7

    @staticmethod
    def start_builder(root: Path) -> subprocess.Popen[str]:
        builder = subprocess.Popen(child(BUILD, root, 60), stdout=subprocess.PIPE, text=True)
        assert builder.stdout is not None
        assert builder.stdout.readline() == "locked\n"
        return builder


class TestMaintenance:
    def test_clear_takes_its_own_files_alone(self, tmp_path: Path) -> None:
        cache = ArtifactCache(tmp_path)
        assert count_build(cache) == 1
        for folder in ("artifacts", "probes", "locks"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "mine.hfk").write_text("x")
        (tmp_path / "artifacts" / ".writing-x").write_text("x")
        entry_file(tmp_path, "0" * 64).mkdir()
        assert cache.clear() == 2
        assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["mine.hfk"] * 3
        assert count_build(cache) == 1

    def test_verify_reaps_what_killed_writers_left(self, tmp_path: Path) -> None:
        ArtifactCache(tmp_path).put(ENTRY)
        old, young = (tmp_path / "artifacts" / f".writing-{age}" for age in ("old", "young"))
        for path in (old, young):
            path.write_text("x")
        os.utime(old, (0, 0))
        assert ArtifactCache(tmp_path).verify() == []
        assert not old.exists()
        assert young.exists()

    def test_default_follows_the_variable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "a"))
        first = default_cache()
        assert first is default_cache()
        monkeypatch.setenv("HIPFIRE_CACHE_DIR", str(tmp_path / "b"))
        assert default_cache().path == tmp_path / "b"

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import platformdirs

        monkeypatch.delenv("HIPFIRE_CACHE_DIR", raising=False)
        monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: Path("~/.cache/hipfire-kernels"))
        with pytest.raises(InputError, match="set HIPFIRE_CACHE_DIR"):
            default_cache()

    def test_memory_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_module, "_IN_MEMORY", 2)
        cache = ArtifactCache(tmp_path)
        for n in range(4):
            cache.put(replace(ENTRY, key=artifact_key(n)))
        assert len(cache._memory) == 2
        assert cache.get(artifact_key(0), "gfx1100") is not None


class TestBuild:
    def test_compiles_once_and_says_so(self, tmp_path: Path) -> None:
        script, cache = Script(), ArtifactCache(tmp_path)
        first = build(Kernel(), "host", script, cache)
        again = build(Kernel(), "host", script, cache)
        fresh = build(Kernel(), "host", script, ArtifactCache(tmp_path))
        assert (first.cached, again.cached, fresh.cached, script.compiled) == (False, True, True, 1)
        assert first.code == again.code == fresh.code == b"code of body"
        assert first.resources == fresh.resources
        assert first.resources.lds_bytes == 64
        assert (first.toolchain, first.compiler, first.source) == ("script", "1", "body")

    def test_everything_that_matters_is_in_the_key(self, tmp_path: Path) -> None:
        def key(kernel: Kernel, script: Script) -> Artifact:
            return build(kernel, "host", script, ArtifactCache(tmp_path))

        built = [
            key(Kernel(), Script()),
            key(Kernel("other body"), Script()),
            key(Kernel(entry="other"), Script()),
            key(Kernel(), Script(version="2")),
            key(Kernel(), Script(options=("-O2",))),
        ]
        assert len({artifact.key for artifact in built}) == len(built)
        assert not any(artifact.cached for artifact in built)

    def test_arch_row_is_in_the_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The entry holds figures that were reckoned from the row."""
        from hipfire_kernels.archs import ARCHS

        before = build(Kernel(), "host", Script(), ArtifactCache(tmp_path))
        monkeypatch.setitem(ARCHS, "host", replace(ARCHS["host"], lds_bytes=1))
        assert build(Kernel(), "host", Script(), ArtifactCache(tmp_path)).key != before.key

    def test_unknown_arch(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="gfx906"):
            build(Kernel(), "gfx906", Script(), ArtifactCache(tmp_path))

    def test_hit_is_quick(self, tmp_path: Path) -> None:
        kernel, script = Kernel("x" * 30_000), Script()
        cache = ArtifactCache(tmp_path)
        build(kernel, "host", script, cache)

        def median_ms(stores: list[ArtifactCache]) -> float:
            """Of CPU time."""
            times = []
            for store in stores:
                start = time.thread_time()
                assert build(kernel, "host", script, store).cached
                times.append(time.thread_time() - start)
            return 1e3 * sorted(times)[len(times) // 2]

        assert median_ms([cache] * 21) < 2.0
        assert median_ms([ArtifactCache(tmp_path) for _ in range(21)]) < 5.0
