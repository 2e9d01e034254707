"""Converting a checkpoint to a .hfq container: which format each tensor gets, and the run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hipfire_kernels.errors import InputError
from hipfire_kernels.model.chat import chat_settings
from hipfire_kernels.model.checkpoint import read_generation_config
from hipfire_kernels.model.draft_config import DraftConfig, dflash_metadata
from hipfire_kernels.model.hfq import DRAFT, TARGET, Planned, write_container
from hipfire_kernels.model.jsonfile import read_json
from hipfire_kernels.model.layers import Array
from hipfire_kernels.model.loading import open_either
from hipfire_kernels.model.tensors import F16, F32, MQ4G256, Q8F16, Format
from hipfire_kernels.model.tokenizer import tokenizer_text

FORMATS: dict[str, tuple[Format, ...]] = {"mq4": (MQ4G256, Q8F16), "q8": (Q8F16,), "f16": (F16,), "f32": (F32,)}
"""Per name, what a matrix gets: the first format whose groups fit its rows, float32 when none does."""

_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


def choose(name: str, shape: tuple[int, ...], wanted: str) -> Format:
    """The format of a tensor, by its canonical name.

    Matrices get `FORMATS[wanted]`; for mq4 the embedding and the output head get Q8F16, for four bits there show in
    every token. What is no matrix (norms, the convolution, A_log, dt_bias) is small and stays float32.
    """
    if len(shape) != 2:
        return F32
    candidates = [f for f in FORMATS[wanted] if not (f is MQ4G256 and name in _VOCABULARY)]
    return next((f for f in candidates if f.fits(shape)), F32)


class Conversion:
    """A checkpoint that is about to be converted: checked, but not read.

    Args:
        source: the checkpoint folder of a target or a draft.
        wanted: a key of `FORMATS`.

    Attributes:
        arch_id: of the container: `hfq.TARGET` or `hfq.DRAFT`.
        entries: the source's tensors, in the order in which they are written.
        tensors: what is written of each, under the name that the source has.
        skipped: names in the source that are left out: vision and multi-token prediction.

    Raises:
        InputError: the format is unknown, or the source is no folder.
        CheckpointError: the source is not exactly a target or a draft.
    """

    def __init__(self, source: Path, wanted: str) -> None:
        if wanted not in FORMATS:
            raise InputError(f"format is {wanted!r}; legal values: {', '.join(FORMATS)}")
        if not source.is_dir():
            raise InputError(f"{source} is not a folder; required: the folder of a checkpoint")
        said = read_json(source / "config.json")
        self._metadata: dict[str, Any] = {"config": said, "tokenizer": tokenizer_text(source)}
        if generation := read_generation_config(source)[0]:
            self._metadata["generation_config"] = generation
        if chat := chat_settings(source):
            self._metadata["tokenizer_config"] = chat
        config, self._checkpoint = open_either(source)
        self.arch_id = TARGET
        if isinstance(config, DraftConfig):
            self.arch_id = DRAFT
            self._metadata["dflash"] = dflash_metadata(config)
        named = self._checkpoint.entries
        self.entries = list(named.values())
        self.tensors = [Planned(e.name, choose(name, e.shape, wanted), e.shape) for name, e in named.items()]
        self.skipped = self._checkpoint.skipped

    def write(self, out: Path, done: Callable[[Planned], None]) -> None:
        """Write the container; it appears when it is complete. `done` is called after each tensor.

        Raises:
            InputError: `out` exists.
            CheckpointError: a value is not finite, or cannot be stored in its format.
            OSError: the file cannot be written.
        """
        if out.exists():
            raise InputError(f"{out} exists; remove it, or name a file that does not")
        write_container(out, self.arch_id, self._metadata, self.tensors, self._values(done))

    def _values(self, done: Callable[[Planned], None]) -> Iterator[Array]:
        for name, tensor in zip(self._checkpoint.entries, self.tensors, strict=True):
            yield self._checkpoint.read(name)
            done(tensor)
