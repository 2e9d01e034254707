"""Kernel families by name: the library's, those registered here, those of installed packages and of named modules.

Outside families are looked for when a name is not among those known already, or when all are listed: importing the
library, and every call of it, touches none of them.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from hipfire_kernels.authoring.family import KernelFamily, Variant
from hipfire_kernels.errors import InputError

GROUP = "hipfire_kernels.families"
"""The entry-point group. An entry is a family, an iterable of families, or a module that holds some."""

VARIABLE = "HIPFIRE_KERNELS_FAMILIES"
"""Modules or files with families, separated by commas: what `hfk --families` sets, for child processes too."""

_log = logging.getLogger(__name__)


class Registry(Mapping[str, KernelFamily]):
    """Families by name, in the order they came.

    Attributes:
        failures: entry points of installed packages that could not be loaded, with the reason. What the caller names
            itself raises instead.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[KernelFamily, str]] = {}
        self._taken: set[str] = set()
        self._lock = threading.RLock()
        self.failures: dict[str, str] = {}

    def add(self, family: KernelFamily, origin: str) -> KernelFamily:
        """Make a family known by its name; the same one again changes nothing.

        Raises:
            InputError: it is no family, or another one has its name or the entry point of one of its variants.
        """
        if not isinstance(family, KernelFamily):
            raise InputError(f"{origin}: {family!r} is no KernelFamily")
        with self._lock:
            other, place = self._known.get(family.name, (family, origin))
            if other is not family:
                raise InputError(f"{origin}: there is a kernel family {family.name} already, of {place}; rename one")
            taken = {v.entry: f.name for f, _ in self._known.values() if f is not family for v in f.variants()}
            clash = next((v.entry for v in family.variants() if v.entry in taken), None)
            if clash is not None:
                raise InputError(
                    f"{origin}: {family.name} has the entry point {clash}, as {taken[clash]} has; rename it"
                )
            self._known[family.name] = (family, origin)
        return family

    def remove(self, name: str) -> None:
        """Forget a family that was registered."""
        with self._lock:
            self._known.pop(name, None)

    def __getitem__(self, name: str) -> KernelFamily:
        if name not in self._known:
            self._look_outside()
        return self._known[name][0]

    def __iter__(self) -> Iterator[str]:
        self._look_outside()
        return iter(tuple(self._known))

    def __len__(self) -> int:
        self._look_outside()
        return len(self._known)

    def origin(self, name: str) -> str:
        """Where a family comes from, in words."""
        return self._known[name][1]

    def _look_outside(self) -> None:
        with self._lock:
            for entry in metadata.entry_points(group=GROUP):
                label = f"entry point {entry.name} = {entry.value}"
                if label not in self._taken:
                    self._taken.add(label)
                    self._load_entry(entry, label)
            for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
                if name not in self._taken:
                    self.load(name)

    def _load_entry(self, entry: metadata.EntryPoint, label: str) -> None:
        try:
            self._add_all(entry.load(), label)
        except Exception as error:  # somebody else's package: it must not take the library with it
            self.failures[label] = f"{type(error).__name__}: {error}"
            _log.warning("kernel families of %s could not be loaded: %s", label, self.failures[label])

    def load(self, name: str) -> None:
        """Import a module, or a `.py` file, and take its families.

        Raises:
            InputError: it cannot be imported, or holds no family.
        """
        before = len(self._known)
        try:
            module = _file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"families {name!r} cannot be imported: {type(error).__name__}: {error}") from error
        self._add_all(module, name)
        if len(self._known) == before and name not in self._taken:
            raise InputError(f"{name!r} holds no kernel family; assign a hipfire_kernels.KernelFamily to a name in it")
        self._taken.add(name)

    def _add_all(self, found: Any, origin: str) -> None:
        for family in _families_in(found):
            self.add(family, origin)


def _families_in(found: Any) -> Iterable[KernelFamily]:
    if isinstance(found, ModuleType):
        return [value for value in vars(found).values() if isinstance(value, KernelFamily)]
    return [found] if isinstance(found, KernelFamily) else found


def _file(path: Path) -> ModuleType:
    """A module from a file; the modules beside it can be imported by it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"families {str(path)!r}: there is no such file")
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


REGISTRY = Registry()


def families() -> Mapping[str, KernelFamily]:
    """Every kernel family by name: the library's, registered ones, those of installed packages."""
    return REGISTRY


def register(family: KernelFamily) -> KernelFamily:
    """Make a family known by its name, to `families()`, `hfk` in this process, and the pytest plugin.

    For `hfk` itself, name the module that declares it: `hfk --families mypkg.kernels ...`, or give your package an
    entry point in the group `hipfire_kernels.families`.

    Raises:
        InputError: another family has its name, or the entry point of one of its variants.
    """
    return REGISTRY.add(family, "a call of register")


def variants() -> dict[str, Variant]:
    """Every variant of every family by its entry point."""
    return {v.entry: v for family in REGISTRY.values() for v in family.variants()}


# ---- in other processes: by name ------------------------------------------------------------------------------------


def _family_named(name: str) -> KernelFamily:
    return REGISTRY[name]


def _variant_named(name: str, params: dict[str, Any]) -> Variant:
    return REGISTRY[name].variant(**params)


def _by_name(family: KernelFamily) -> str:
    """What stands for a family in another process: its functions do not travel."""
    if REGISTRY.get(family.name) is not family:
        raise InputError(
            f"{family!r} cannot be pickled: it is none of families(), where the other process would look for it by "
            "name; declare it in a module that both import, and register it there"
        )
    return family.name


copyreg.pickle(KernelFamily, lambda family: (_family_named, (_by_name(family),)))
copyreg.pickle(Variant, lambda variant: (_variant_named, (_by_name(variant.family), dict(variant.params))))
