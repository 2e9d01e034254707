"""Stop strings: text that ends a generation, found while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from hipfire_kernels.model.tokenizer import Tokenizer


class StopStrings:
    """Looks for the first of `strings` in the text of one request's tokens.

    Attributes:
        text_end: characters of text before the stop string that was found; None until then.
    """

    def __init__(self, strings: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.text_end: int | None = None
        self._strings = strings
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream()
        self._longest = max(map(len, strings))
        self._tail = ""
        self._dropped = 0  # characters of text before the tail

    def restarted(self, tokens: Sequence[int]) -> StopStrings:
        """A watcher of the same strings that has seen `tokens`, whatever they complete."""
        fresh = StopStrings(self._strings, self._tokenizer)
        fresh.cut(tokens, len(tokens))
        return fresh

    def cut(self, tokens: Sequence[int], exempt: int) -> int | None:
        """How many of the next `tokens` there are up to the one that completes a stop string; None for no match.

        What the first `exempt` of them complete does not count.
        """
        for index, token in enumerate(tokens):
            start = self._match(self._decoder.push([token]))
            if start is not None and index >= exempt:
                self.text_end = start
                return index + 1
        return None

    def _match(self, piece: str) -> int | None:
        """Take the next piece of text; where the first stop string that ends in it starts."""
        seen, text = len(self._tail), self._tail + piece
        # A match before this could not end in the piece.
        found = [text.find(s, max(0, seen - len(s) + 1)) for s in self._strings]
        starts = [self._dropped + at for at in found if at >= 0]
        drop = max(0, len(text) - self._longest + 1)
        self._tail, self._dropped = text[drop:], self._dropped + drop
        return min(starts, default=None)
