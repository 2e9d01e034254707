"""Text to token ids and back, from a checkpoint's tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.config import TargetConfig
from hipfire_kernels.model.hfq import read_container

_REPLACEMENT = "\ufffd"
_PATIENCE = 32  # pending ids above which bytes that are no character yet are taken for none
_LONGEST = 4  # bytes of a character, so ids too


def tokenizer_text(path: Path) -> str | None:
    """The text of tokenizer.json, from a checkpoint folder or a container; None when it holds none.

    Raises:
        CheckpointError: it holds something else there, or cannot be read.
    """
    if path.is_file():
        text = read_container(path).metadata.get("tokenizer")
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"metadata of {path}: tokenizer must be the text of tokenizer.json or null")
        return text
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        path: the folder that holds tokenizer.json, or a container with its text.

    Raises:
        CheckpointError: it is absent or is not a tokenizer.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        from tokenizers import Tokenizer as Backend

        self._source = str(path)
        text = tokenizer_text(Path(path))
        if text is None:
            raise CheckpointError(f"{path}: holds no tokenizer.json; a checkpoint must, to work with text")
        try:
            self._backend = Backend.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"tokenizer.json of {path}: not a tokenizer ({error})") from error

    def check_pairing(self, target: TargetConfig) -> None:
        """Whether every id of this tokenizer is one of the target, which may have more.

        Raises:
            CheckpointError: one is not; the message names both.
        """
        if self._largest_id >= target.vocab_size:
            raise CheckpointError(
                f"tokenizer of {self._source} has ids up to {self._largest_id}, target {target.source} from 0 to "
                f"{target.vocab_size - 1}; pair it with the target that it came with"
            )

    @cached_property
    def _largest_id(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive bit by bit."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns ids into text as they arrive, and holds back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self._pending += ids
        new = self._ready()
        if len(self._pending) > _PATIENCE:
            new += self._cut() + self._ready()
        return new

    def _ready(self) -> str:
        text = self._tokenizer.decode(self._pending)
        # An unfinished character decodes to U+FFFD at the end, and to itself once its bytes are there.
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._given :]
        self._given += len(new)
        if len(whole) == len(text):
            self._pending, self._given = [], 0
        return new

    def _cut(self) -> str:
        """Let go of the pending ids up to the last few, at a place that no character lies across; their text."""
        text = self._tokenizer.decode(self._pending)
        for keep in range(1, _LONGEST + 1):
            done, rest = (self._tokenizer.decode(ids) for ids in (self._pending[:-keep], self._pending[-keep:]))
            if rest and done + rest == text:
                new = done[self._given :]
                self._pending, self._given = self._pending[-keep:], max(0, self._given - len(done))
                return new
        return ""

    def finish(self) -> str:
        """What is left at the end of the text, unfinished or not."""
        text = self._tokenizer.decode(self._pending)[self._given :]
        self._pending, self._given = [], 0
        return text
