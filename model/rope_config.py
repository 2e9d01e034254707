"""What a config says about RoPE, of a target or a draft, in the keys of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hipfire_kernels.errors import CheckpointError
from hipfire_kernels.model.config_keys import ASKING, refuse, unknown
from hipfire_kernels.model.config_reader import Reader
from hipfire_kernels.model.yarn import Yarn, attention_factor

_OBJECTS = ("rope_scaling", "rope_parameters")
_KINDS = ("rope_type", "type")
_THETA = 1e4  # what transformers takes where none is stated
_ORIGINAL = "original_max_position_embeddings"
_PLAIN_KEYS = {*_KINDS, "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_YARN_KEYS = {
    *("factor", _ORIGINAL, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
}
_FOREIGN_KEYS = {"alpha", "attn_factor", "high_freq_factor", "long_factor", "low_freq_factor", "short_factor"}
"""What other ways to scale RoPE are told."""

_Objects = Mapping[str, Mapping[str, Any]]


class RopeSettings(NamedTuple):
    """RoPE as a config states it.

    Attributes:
        settings: the keys of RoPE beside all others.
        theta: the base of its frequencies.
        yarn: how YaRN changes the plain form; None where it is plain.
        unread: keys inside rope_scaling and rope_parameters that are not known.
    """

    settings: Reader
    theta: float
    yarn: Yarn | None
    unread: tuple[str, ...]


def read_rope(reader: Reader) -> RopeSettings:
    """The RoPE settings: rope_parameters, or the older rope_theta, partial_rotary_factor and rope_scaling.

    Raises:
        CheckpointError: they contradict each other, or ask for another RoPE than the plain one and YaRN.
    """
    objects = {key: _object(reader, key) for key in _OBJECTS}
    kind = _kind(reader, objects)
    _check_agreement(reader, objects)
    rope = reader.merged({**objects["rope_scaling"], **objects["rope_parameters"]}, reader.where)
    rope.read.update(_PLAIN_KEYS)
    theta = rope.number("rope_theta", default=_THETA)
    if kind == "yarn":
        return RopeSettings(rope, theta, _yarn(reader, rope, objects, theta), ())
    _check_unscaled(reader, objects)
    unread = [f"{key}.{name}" for key in objects for name in unknown(objects[key], _PLAIN_KEYS, ASKING)]
    return RopeSettings(rope, theta, None, tuple(unread))


def _object(reader: Reader, key: str) -> Mapping[str, Any]:
    """rope_scaling or rope_parameters, empty where it is absent or null."""
    inner = {} if (value := reader.get(key)) is None else value
    if not isinstance(inner, Mapping):
        raise reader.fail(key, "an object or null")
    where = f"{reader.where} ({key})"
    if nested := [name for name, value in inner.items() if isinstance(value, Mapping)]:
        raise CheckpointError(f"{where}: {nested[0]} is an object; one RoPE for all layers is implemented, not several")
    refuse(inner, where, ASKING)
    return inner


def _kind(reader: Reader, objects: _Objects) -> str | None:
    """ "default" or "yarn"; None where the config does not say."""
    kinds = set[str]()
    for key, inner in objects.items():
        for name in _KINDS:
            Reader(inner, f"{reader.where} ({key})").only(name, ("default", "mrope", "yarn"))
            # Three equal position grids, which is what text has, make mrope the plain form.
            if inner.get(name) is not None:
                kinds.add("default" if inner[name] == "mrope" else inner[name])
    if len(kinds) > 1:
        raise CheckpointError(f"{reader.where}: rope_type is {' and '.join(sorted(kinds))}; it must be one of them")
    return kinds.pop() if kinds else None


def _check_agreement(reader: Reader, objects: _Objects) -> None:
    """What stands at two places where one does not plainly go before the other must be equal."""
    scaling, parameters = (objects[key] for key in _OBJECTS)
    places = [("rope_scaling", scaling, "rope_parameters", parameters, scaling.keys() - {*_KINDS})]
    places += [("top level", reader.values, key, objects[key], {_ORIGINAL}) for key in _OBJECTS]
    for one, here, other, there, keys in places:
        for key in sorted(keys):
            if None not in (a := here.get(key), b := there.get(key)) and a != b:
                raise CheckpointError(
                    f"{reader.where}: {key} is {a!r} ({one}) and {b!r} ({other}); required: one value. Remove the other"
                )


def _check_unscaled(reader: Reader, objects: _Objects) -> None:
    """Without a rope_type RoPE is plain: nothing beside it may say how it is scaled."""
    for key, inner in objects.items():
        stated = any(inner.get(name) is not None for name in _KINDS)
        for name in sorted(inner.keys() & (_YARN_KEYS | _FOREIGN_KEYS)):
            if not stated and inner[name] not in (None, 1):
                raise CheckpointError(
                    f"{reader.where} ({key}): {name} is {inner[name]!r} without a rope_type; required: rope_type "
                    f"'yarn', which reads it, or 'default', for which {name} means nothing"
                )


def _yarn(reader: Reader, rope: Reader, objects: _Objects, theta: float) -> Yarn:
    """The settings of YaRN. Without a factor it is max_position_embeddings over the original context."""
    for key, inner in objects.items():
        if strange := sorted(inner.keys() - _PLAIN_KEYS - _YARN_KEYS - ASKING.keys()):
            raise CheckpointError(f"{reader.where} ({key}): {strange[0]} is set; YaRN with it is not implemented")
    stated = rope.get(_ORIGINAL) is not None
    original = rope.count(_ORIGINAL if stated else "max_position_embeddings")
    factor = rope.given("factor")
    if factor is None and stated:
        factor = rope.count("max_position_embeddings") / original
    if factor is None or factor < 1:
        raise rope.fail("factor", "a number of at least 1")
    if theta <= 1:
        raise rope.fail("rope_theta", "a number above 1 under YaRN")
    fast, slow = rope.given("beta_fast") or 32.0, rope.given("beta_slow") or 1.0
    if fast <= slow:
        raise rope.fail("beta_fast", f"a number above beta_slow ({slow})")
    scale = rope.given("attention_factor")
    if scale is None:
        scale = attention_factor(factor, rope.given("mscale"), rope.given("mscale_all_dim"))
    return Yarn(factor, original, scale, fast, slow, truncate=rope.flag("truncate") is not False)
