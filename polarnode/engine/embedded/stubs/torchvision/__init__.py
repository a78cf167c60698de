"""A torchvision that can be imported but not used: SGLang and Transformers import it for image models.

It is put on an engine host's path only on a CPU and only where no torchvision is installed (PyPI's wheel for
Linux is a CUDA build whose import fails beside CPU torch). Importing any name of any submodule works; calling
one raises an error that says what to install.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

__version__ = "0.0.0"


class _AbsentType(type):
    """The type of every name in here; its attributes (enum members, nested classes) are absent names too."""

    def __getattr__(cls, name: str) -> "_AbsentType":
        return _absent(f"{cls.__name__}.{name}")

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise ImportError(
            f"{cls.__name__} needs the real torchvision: install it beside torch to serve image models"
        )


def _absent(name: str) -> _AbsentType:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)  # import machinery and pickle ask for dunders and must be told no
    return _AbsentType(name, (), {})


class _AbsentModule(ModuleType):
    """Any submodule; `from torchvision.x import y` gives an absent name."""

    def __getattr__(self, name: str) -> _AbsentType:
        return _absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds every `torchvision.*`; appended last, so that it never stands before a real module."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: its names come from `__getattr__`."""


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> _AbsentType:
    return _absent(f"{__name__}.{name}")
