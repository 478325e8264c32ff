"""What a module's code reads besides its arguments, noted while it runs, and the check of a call that it is the same.

An examination says what code computes with what it read then: attributes, absent ones too, those of objects that the
module holds, its methods, and functions and constants of files. The code of a stand-in runs once more with all of them
noted. A patched module compares them in each call, and runs its own code once one has changed. Code that reads what no
call can compare, such as a table or a tensor that it holds, is left. Functions of PyTorch and of Python are not noted.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_fusion.patching.swap import subclass

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, torch._C.ScriptFunction, torch._ops.OpOverloadPacket)
_CONSTANT = (type, types.ModuleType, *_FUNCTIONS)
_SKIPPED = frozenset({"torch", "kernel_fusion", "builtins"}) | sys.stdlib_module_names
_READERS = ("kernel_fusion.", "torch.nn.modules.module")  # examinations, and `nn.Module` itself
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MANY = 64  # entries of a table
_MEMBERS = ("_parameters", "_buffers", "_modules")
# How an attribute was found: nowhere, in the class alone, as a parameter or buffer that is None, in the dictionary, or
# in any way that may run code.
_ABSENT, _OF_CLASS, _NONE, _DICTIONARY, _LOOKED_UP = "absent", "of its class", "none", "dictionary", "looked up"


class Attribute(NamedTuple):
    """An attribute that was read: names from the module on, how it was found, and its value."""

    path: tuple[str, ...]
    found: str
    value: Any = None


class Name(NamedTuple):
    """A function, or a constant of a file, that was read: the file's module, or a place in a class's order of bases."""

    home: str | int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """What some code read, hashable, and picklable where what it read is."""

    attributes: tuple[Attribute, ...] = ()
    names: tuple[Name, ...] = ()

    def without(self, *attributes: str | None) -> Reads:
        """These reads without the attributes that each call reads anew."""
        return Reads(tuple(a for a in self.attributes if a.path[0] not in attributes), self.names)

    def now(self, original: type | None) -> tuple[Any, ...]:
        """What the names stand for now; None for those that are gone."""
        return tuple(_resolved(name, original) for name in self.names)

    def guard(self, original: type | None) -> Callable[[Any], bool]:
        """Make a function of a module of this class that says whether all is as it was, and the names as now."""
        scope: dict[str, Any] = {"original": original}
        terms: list[str] = []

        def known(value: Any) -> str:
            scope[f"known{len(scope)}"] = value
            return f"known{len(scope) - 1}"

        for name, value in zip(self.names, self.now(original), strict=True):
            terms.append(_term(_place_of(name, original, known), value, known))
            terms += [_term(f"{known(cell)}.cell_contents", content, known) for cell, content in _cells(value)]
        lookups = ""
        for path, found, value in self.attributes:
            lookups = "    own = self.__dict__\n"
            first, text = path[0], repr(path[0])
            if found == _ABSENT:
                homes = ["own", *(f"own[{home!r}]" for home in _MEMBERS)]
                terms += [*(f"{text} not in {home}" for home in homes), f"not hasattr(original, {text})"]
            elif found == _OF_CLASS:
                terms.append(f"{text} not in own")
            elif found == _NONE:
                terms.append(f"own[{value!r}][{text}] is None")
            else:
                start = f"own[{text}]" if found == _DICTIONARY or len(path) > 1 else f"self.{first}"
                terms.append(_term(".".join((start, *path[1:])), value, known))
                terms += [_term(f"{known(cell)}.cell_contents", content, known) for cell, content in _cells(value)]
        code = f"def holds(self):\n  try:\n{lookups}    return {' and '.join(terms) or True}\n"
        exec(f"{code}  except (AttributeError, KeyError):\n    return False", scope)
        return scope["holds"]  # type: ignore[no-any-return]


class Table:
    """The entries of a dictionary, list or set of plain values, functions and classes, to compare with it later."""

    def __init__(self, value: Any) -> None:
        self.entries = _entries(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.entries == other.entries

    def __hash__(self) -> int:
        return len(self.entries)


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _entries(each) for name, each in value.items()}
    return type(value)(_entries(each) for each in value) if isinstance(value, list | tuple | set) else value


def _is_table(value: Any) -> bool:
    """Whether this is a small table, of tables at most: its entries are compared in each call."""
    if isinstance(value, dict):
        return all(map(is_plain, value)) and _is_table(list(value.values()))
    simple = type(value) in (list, tuple, set) and len(value) <= _MANY
    return simple and all(_is_fixed(each) or _is_table(each) for each in value)


def _is_fixed(value: Any) -> bool:
    return is_plain(value) or isinstance(value, (type, *_FUNCTIONS))


def _term(place: str, value: Any, known: Callable[[Any], str]) -> str:
    """The comparison of what stands at a place with a value."""
    if isinstance(value, Table):
        return f"{place} == {known(value.entries)}"
    name = known(value)
    if value is None or isinstance(value, (bool, type, *_FUNCTIONS)):
        return f"{place} is {name}"
    return f"((now := {place}) is {name} or (type(now) is {known(type(value))} and now == {name}))"


def _place_of(name: Name, original: Any, known: Callable[[Any], str]) -> str:
    """Where a name is looked up in each call."""
    if isinstance(name.home, int):
        return ".".join((known(original.__mro__[name.home]), *name.path))
    return ".".join((f"{known(vars(sys.modules[name.home]))}[{name.path[0]!r}]", *name.path[1:]))


def _resolved(name: Name, original: Any) -> Any:
    try:
        if isinstance(name.home, int):
            value: Any = original.__mro__[name.home]
            return functools.reduce(getattr, name.path, value)
        value = functools.reduce(getattr, name.path[1:], vars(sys.modules[name.home])[name.path[0]])
        return Table(value) if not is_plain(value) and _is_table(value) else value
    except (AttributeError, KeyError, IndexError):
        return None


NOTHING = Reads()


def _cells(function: Any) -> Iterator[tuple[Any, Any]]:
    """The variables of enclosing functions that a function, and those in its variables, read, with their values."""
    if isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and cell != types.CellType():
                yield cell, cell.cell_contents
                if cell.cell_contents is not function:
                    yield from _cells(cell.cell_contents)


def is_plain(value: Any) -> bool:
    """Whether a value never changes and is equal to others by what it is."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))


@dataclass
class Notes:
    """What was read so far, and why some of it cannot be compared, if so."""

    attributes: dict[tuple[str, ...], Attribute] = field(default_factory=dict)
    names: dict[Name, None] = field(default_factory=dict)
    reason: str | None = None
    busy: int = 0

    def reads(self) -> Reads:
        """All that was read so far."""
        return Reads(tuple(self.attributes.values()), tuple(self.names))

    def refuse(self, what: str) -> None:
        """Note that something was read which no call can compare."""
        self.reason = self.reason or f"its code reads {what}, which a call cannot compare"


def noted(module: nn.Module | None, run: Callable[[], Any]) -> tuple[Reads, str | None]:
    """What the code of a module, or of a function, reads while `run` calls it, and what in it cannot be compared."""
    notes = Notes()
    if module is not None:
        notes.names[Name(0, ("forward",))] = None
        bases = type(module).__mro__[1:]
        with _noting(module, (), notes), _following(bases, notes):
            run()
    else:
        with _following((), notes):
            run()
    return notes.reads(), notes.reason


@contextlib.contextmanager
def _noting(target: Any, path: tuple[str, ...], notes: Notes) -> Iterator[None]:
    """Note, within the context, which attributes of a module, or of an object that it holds, are read."""
    kind: Any = type(target)
    held: dict[str, Any] = {}
    within = contextlib.ExitStack()

    def note(self: Any, name: str, value: Any) -> Any:
        if notes.busy or self is not target:
            return value
        notes.busy += 1
        try:
            if name in held:
                return held[name]
            entry = _entry(kind, target, (*path, name), value, notes)
            if entry is not None:
                notes.attributes.setdefault(entry.path, entry)
            elif _is_object(value):
                try:
                    held[name] = _copied(value)
                except TypeError:  # its class wants arguments
                    notes.refuse(f"`self.{'.'.join((*path, name))}`")
                    return value
                within.enter_context(_noting(held[name], (*path, name), notes))
                return held[name]
        finally:
            notes.busy -= 1
        return value

    def get(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        reader = sys._getframe(1).f_globals.get("__name__", "")
        return value if reader.startswith(_READERS) else note(self, name, value)

    def missing(self: Any, name: str) -> Any:
        notes.busy += 1
        try:
            value = kind.__getattr__(self, name) if hasattr(kind, "__getattr__") else _missing(self, name)
        except AttributeError:
            if notes.busy == 1 and self is target:
                if path:
                    notes.refuse(f"`self.{'.'.join((*path, name))}`, which is not there")
                notes.attributes.setdefault((*path, name), Attribute((*path, name), _ABSENT))
            raise
        finally:
            notes.busy -= 1
        return note(self, name, value)

    try:
        object.__setattr__(target, "__class__", subclass(kind, {"__getattribute__": get, "__getattr__": missing}))
    except TypeError as error:
        notes.reason = f"its class allows no subclass: {error}"
        yield
        return
    with within:
        try:
            yield
        finally:
            notes.busy += 1
            object.__setattr__(target, "__class__", kind)
            notes.busy -= 1


def _missing(self: Any, name: str) -> Any:
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _is_object(value: Any) -> bool:
    """Whether this is an object of a class in Python that has attributes of its own, such as a configuration."""
    others = (Tensor, nn.Module, types.MethodType, functools.partial, list, dict, set, tuple, *_CONSTANT)
    return hasattr(value, "__dict__") and not isinstance(value, others)


def _copied(value: Any) -> Any:
    """Another object with the same attributes, whose class may be exchanged."""
    copied = object.__new__(type(value))
    vars(copied).update(vars(value))
    return copied


def _entry(kind: Any, target: Any, path: tuple[str, ...], value: Any, notes: Notes) -> Attribute | None:
    """How an attribute can be compared; None if it need not be, or cannot be and is refused, or is looked into."""
    name, text = path[-1], "self." + ".".join(path)
    own = len(path) == 1  # the module's
    if own and (name == "training" or name in _OF_EVERY_MODULE or name.startswith("__")):
        if name in ("__dict__", *_MEMBERS):
            notes.refuse(f"`{text}`")
        return None  # both modes are examined
    for home in ("_parameters", "_buffers") if own else ():
        if name in vars(target)[home]:  # read anew, or of no influence
            return Attribute(path, _NONE, home) if value is None else None
    bound = isinstance(value, types.MethodType) and value.__self__ is target
    if own and name not in vars(target) and (bound or isinstance(value, (type, *_FUNCTIONS))):
        notes.names[Name(0, path)] = None
        return Attribute(path, _OF_CLASS)
    if isinstance(value, functools.partial) and _is_fixed(value.func) and _is_table([value.args, value.keywords]):
        for part, each in ("func", value.func), ("args", value.args), ("keywords", Table(value.keywords)):
            inner = (*path, part)
            notes.attributes[inner] = Attribute(inner, _LOOKED_UP, each)
        return None
    if not is_plain(value) and _is_table(value):
        value = Table(value)
    if is_plain(value) or isinstance(value, (Table, type, *_FUNCTIONS)):
        return Attribute(path, _DICTIONARY if name in vars(target) and not hasattr(kind, name) else _LOOKED_UP, value)
    if not _is_object(value):
        notes.refuse(f"`{text}`")
    return None


@contextlib.contextmanager
def _following(bases: tuple[type, ...], notes: Notes) -> Iterator[None]:
    """Within, the functions that run are followed, and what they read in their files is noted in the end."""
    methods = {
        f.__code__: Name(index, (name,))
        for index, base in enumerate(bases, 1)
        if base not in (nn.Module, object)
        for name, f in vars(base).items()
        if isinstance(f, types.FunctionType)
    }
    lines: dict[types.CodeType, set[int]] = {}
    homes: dict[types.CodeType, dict[str, Any]] = {}

    def start(frame: types.FrameType, event: str, arg: Any) -> Any:
        code, home = frame.f_code, frame.f_globals.get("__name__", "")
        if code in methods:
            notes.names[methods[code]] = None
        if notes.busy or home.split(".")[0] in _SKIPPED or home.startswith("namedtuple_"):
            return None
        homes[code] = frame.f_globals
        for name in code.co_freevars:
            value = frame.f_locals.get(name)
            if name != "__class__" and not is_plain(value) and not isinstance(value, _CONSTANT):
                notes.refuse(f"`{name}` of an enclosing function")
        return line

    def line(frame: types.FrameType, event: str, arg: Any) -> Any:
        lines.setdefault(frame.f_code, set()).add(frame.f_lineno)
        return line

    before = sys.gettrace()
    sys.settrace(start)
    try:
        yield
    finally:
        sys.settrace(before)
    for code, home in homes.items():
        for name, *attributes in _globals(code, lines.get(code, set())):
            if name in home:
                _note_global(home, name, attributes, notes)


def _globals(code: types.CodeType, lines: set[int]) -> Iterator[list[str]]:
    """The names of its file that code reads in these lines, each with the attributes that are read of it at once."""
    starts, here = dict(dis.findlinestarts(code)), None
    found: list[str] = []
    for instruction in dis.get_instructions(code):
        here = starts.get(instruction.offset, here)
        if found and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.append(instruction.argval)
            continue
        if found:
            yield found
        wanted = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM") and here in lines
        found = [instruction.argval] if wanted else []


def _note_global(home: dict[str, Any], name: str, attributes: list[str], notes: Notes) -> None:
    """Note the function, class or constant that a name of a file, or an attribute of it, stands for."""
    value, path = home[name], [name]
    for attribute in attributes:
        if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] in _SKIPPED:
            return
        if is_plain(value) or isinstance(value, _FUNCTIONS):
            break
        try:
            inner = getattr(value, attribute, None)
        except Exception as error:  # a property, which may need what this machine lacks
            notes.refuse(f"`{'.'.join((*path, attribute))}` of its file, which raises {type(error).__name__}")
            return
        if isinstance(value, type) and not _is_fixed(inner):  # a method of the class itself
            break
        value = inner
        path.append(attribute)
    if isinstance(value, types.ModuleType):
        return
    module = sys.modules.get(home.get("__name__", ""))
    if not (_is_fixed(value) or _is_table(value)) or module is None or vars(module) is not home:
        notes.refuse(f"`{'.'.join(path)}` of its file")
        return
    notes.names[Name(module.__name__, tuple(path))] = None
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        notes.names.update({Name(module.__name__, (*path, name)): None for name in ("forward", "backward")})
