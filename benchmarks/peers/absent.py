"""Empty modules in place of packages that a library imports and a benchmark does not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the given packages; every attribute of their modules is an empty class."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def allow_missing() -> None:
    """Let Streaming be imported without torchvision and transformers."""
    # last: an installed package is found before
    sys.meta_path.append(EmptyModules("torchvision", "transformers"))
