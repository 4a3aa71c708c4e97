"""A function and what is bound to it, as plain values that another process makes the same function of.

Functions of modules are named; `partial`s, bound methods and small objects are taken apart down to
numbers and names. Nothing here reads what a stranger may have written: parent to child, through a pipe.
"""

import importlib
import sys
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

Plain = Any
"""What JSON can hold."""


class NoReference(ValueError):
    """A function depends on something that has no name in a module and is no plain value."""


def describe(value: object) -> Plain:
    """Raises `NoReference`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, FunctionType | type):
        return {"global": _name_of(value, value.__module__, value.__qualname__)}
    if isinstance(value, partial):
        return {
            "partial": describe(value.func),
            "arguments": [describe(argument) for argument in value.args],
            "named": {name: describe(argument) for name, argument in value.keywords.items()},
        }
    if isinstance(value, MethodType):
        return {"method": value.__name__, "of": describe(value.__self__)}
    if type(value) is tuple or type(value) is list:
        return {"items": [describe(item) for item in value], "tuple": type(value) is tuple}
    return _describe_object(value)


def restore(plain: Plain) -> Any:
    """The value that `describe` was given, or one made of equal parts."""
    if not isinstance(plain, Mapping):
        return plain
    if "dtype" in plain:
        return getattr(torch, plain["dtype"])
    if "global" in plain:
        module, _, path = plain["global"].partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        return found
    if "partial" in plain:
        named = {name: restore(argument) for name, argument in plain["named"].items()}
        return partial(restore(plain["partial"]), *map(restore, plain["arguments"]), **named)
    if "method" in plain:
        return getattr(restore(plain["of"]), plain["method"])
    if "items" in plain:
        items = [restore(item) for item in plain["items"]]
        return tuple(items) if plain["tuple"] else items
    kind, values = restore(plain["object"]), {name: restore(each) for name, each in plain["fields"].items()}
    if issubclass(kind, tuple):
        return kind(**values)
    made = object.__new__(kind)
    for name, each in values.items():
        object.__setattr__(made, name, each)
    return made


def _describe_object(value: object) -> Plain:
    """By name where its class's module has it under one, else by its fields."""
    kind = type(value)
    module = sys.modules.get(kind.__module__)
    for name, known in vars(module).items() if module is not None else ():
        if known is value:
            return {"global": f"{kind.__module__}:{name}"}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields: Mapping[str, object] = value._asdict()
    elif hasattr(kind, "__slots__") or not hasattr(value, "__dict__"):
        fields = {
            name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)
        }
    else:
        fields = vars(value)
    if isinstance(value, torch.Tensor) or not kind.__module__.startswith(("core.", "tests.")):
        raise NoReference(f"{value!r:.80} is no plain value")
    return {"object": describe(kind), "fields": {name: describe(each) for name, each in fields.items()}}


def _name_of(value: object, module: str, path: str) -> str:
    """Checked: what is defined inside a function has no name to the outside."""
    found: object = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is not value:
        raise NoReference(f"{module}.{path} cannot be found by that name")
    return f"{module}:{path}"
