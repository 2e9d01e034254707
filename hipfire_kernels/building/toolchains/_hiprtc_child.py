"""Compiles one source with hiprtc and ends: `python _hiprtc_child.py FOLDER OPTION...`.

A process of its own, because the library aborts the one it is in on an arch it does not know. Run by path, so
that it starts without importing the package. Reads FOLDER/kernel.hip, writes FOLDER/kernel.co and, before
each step that may end the process, FOLDER/answer.json. Standard output is left to the library.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


class Refused(Exception):
    """A call answered with another status than success."""


def main(folder: Path, options: list[str]) -> None:
    """Go as far as possible and leave in answer.json how far that was."""
    answer: dict[str, Any] = {"stage": "import", "error": "", "log": "", "identity": ""}

    def tell(**news: Any) -> None:
        answer.update(news)
        (folder / "answer.new").write_text(json.dumps(answer))
        os.replace(folder / "answer.new", folder / "answer.json")

    tell()
    try:
        from hip import hiprtc as bindings

        hiprtc: Any = bindings

        tell(stage="load")
        _checked(hiprtc, hiprtc.hiprtcVersion())
        tell(stage="compile")
        program = _checked(
            hiprtc,
            hiprtc.hiprtcCreateProgram((folder / "kernel.hip").read_bytes(), b"kernel.hip", 0, None, None),
        )
        words = [option.encode() for option in options]
        (status,) = hiprtc.hiprtcCompileProgram(program, len(words), words)
        tell(identity=_identity(), log=_log(hiprtc, program))
        _checked(hiprtc, (status,))
        code = bytearray(_checked(hiprtc, hiprtc.hiprtcGetCodeSize(program)))
        _checked(hiprtc, hiprtc.hiprtcGetCode(program, code))
        (folder / "kernel.co").write_bytes(code)
        tell(stage="done")
    except Refused as refused:
        tell(error=f"hiprtc answered {refused}")
    except Exception as error:  # whatever it is, the parent has to hear of it
        tell(error=f"{type(error).__name__}: {error}")


def _checked(hiprtc: Any, answer: tuple[Any, ...]) -> Any:
    """First output of a call, after its status."""
    if answer[0] != hiprtc.hiprtcResult.HIPRTC_SUCCESS:
        raise Refused(answer[0].name)
    return answer[1] if len(answer) > 1 else None


def _log(hiprtc: Any, program: Any) -> str:
    text = bytearray(_checked(hiprtc, hiprtc.hiprtcGetProgramLogSize(program)))
    if text:
        _checked(hiprtc, hiprtc.hiprtcGetProgramLog(program, text))
    return text.rstrip(b"\0").decode(errors="replace")


def _identity() -> str:
    """The libraries that took part, by name, size and time: every release of hiprtc calls itself 9.0."""
    maps = Path("/proc/self/maps").read_text()
    paths = set(re.findall(r"/\S*/lib(?:hiprtc|amd_comgr|amdhip64|LLVM|clang)\S*", maps))
    stamps = [(Path(path).name, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted(paths)]
    return "hiprtc " + ", ".join(f"{name} ({size} bytes, {time})" for name, size, time in stamps)


if __name__ == "__main__":
    # The script's own folder came first on the path; its modules must not stand in for anybody's.
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    main(Path(sys.argv[1]), sys.argv[2:])
