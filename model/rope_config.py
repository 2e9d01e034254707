"""What a config says about RoPE, of a target or a draft, in the keys of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.config_reader import Reader
from hipfire_kernels.model.yarn import Yarn, attention_factor

_YARN_KEYS = {
    *("factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast"),
    *("beta_slow", "truncate", "rope_theta", "rope_type", "type", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
}


def read_rope(reader: Reader) -> tuple[Reader, Yarn | None]:
    """The RoPE settings: rope_parameters, or the older rope_theta, partial_rotary_factor and rope_scaling.

    Returns:
        The settings beside all other keys, and how YaRN changes the plain form; None where it is plain.
    """
    values, kinds = dict(reader.values), set[str]()
    for key in ("rope_scaling", "rope_parameters"):
        inner = reader.values.get(key)
        if not isinstance(inner, (Mapping, type(None))):
            raise reader.fail(key, "an object or null")
        for kind in ("rope_type", "type"):
            Reader(inner or {}, f"{reader.where} ({key})").only(kind, ("default", "mrope", "yarn"))
            # Three equal position grids, which is what text has, make mrope the plain form.
            if inner and inner.get(kind) is not None:
                kinds.add("default" if inner[kind] == "mrope" else inner[kind])
        values.update(inner or {})
    if len(kinds) > 1:
        raise CheckpointError(f"{reader.where}: rope_type is {' and '.join(sorted(kinds))}; it must be one of them")
    rope = Reader(values, reader.where)
    return rope, _yarn(reader, rope) if "yarn" in kinds else None


def _yarn(reader: Reader, rope: Reader) -> Yarn:
    """The settings of YaRN. Without a factor it is max_position_embeddings over the original context."""
    for key in ("rope_scaling", "rope_parameters"):
        if unknown := sorted((reader.values.get(key) or {}).keys() - _YARN_KEYS):
            raise CheckpointError(f"{reader.where} ({key}): {unknown[0]} is set; YaRN with it is not implemented")
    stated = rope.values.get("original_max_position_embeddings") is not None
    original = rope.count("original_max_position_embeddings" if stated else "max_position_embeddings")
    factor = rope.given("factor")
    if factor is None and stated:
        factor = rope.count("max_position_embeddings") / original
    if factor is None or factor < 1:
        raise rope.fail("factor", "a number of at least 1")
    if rope.number("rope_theta") <= 1:
        raise rope.fail("rope_theta", "a number above 1 under YaRN")
    fast, slow = rope.given("beta_fast") or 32.0, rope.given("beta_slow") or 1.0
    if fast <= slow:
        raise rope.fail("beta_fast", f"a number above beta_slow ({slow})")
    scale = rope.given("attention_factor")
    if scale is None:
        scale = attention_factor(factor, rope.given("mscale"), rope.given("mscale_all_dim"))
    return Yarn(factor, original, scale, fast, slow, truncate=rope.flag("truncate") is not False)
