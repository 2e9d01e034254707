"""Environment switches: they can narrow what is admitted, never widen it.

Read when a decision is made. A value that does not parse is an error that names the variable and the legal values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InputError

MIN_CTX_VARIABLE = "HIPFIRE_FA_PERTOKEN_MIN_CTX"
MIN_CTX_DEFAULT = 4096
MIN_CTX_LEGAL = f"0 (the multi-row routes are off) or a number of keys, at least {MIN_CTX_DEFAULT}"


@dataclass(frozen=True)
class Policy:
    """The switches, resolved.

    Attributes:
        multirow_min_ctx: the multi-row routes need a logical context strictly above this; 0 disables them.
            `HIPFIRE_FA_PERTOKEN_MIN_CTX`.
    """

    multirow_min_ctx: int = MIN_CTX_DEFAULT


def read(environ: Mapping[str, str] = os.environ) -> Policy:
    """The policy that the environment asks for.

    The multi-row threshold can be raised, or be 0; a value below the default would widen and is refused.
    """
    text = environ.get(MIN_CTX_VARIABLE)
    if text is None:
        return Policy()
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{MIN_CTX_VARIABLE}={text!r} is not a number; legal: {MIN_CTX_LEGAL}") from None
    if value != 0 and value < MIN_CTX_DEFAULT:
        raise InputError(f"{MIN_CTX_VARIABLE}={value} would widen what is admitted; legal: {MIN_CTX_LEGAL}")
    return Policy(multirow_min_ctx=value)
