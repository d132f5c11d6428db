"""Which attention classes make their own softmax over keys, outside Transformers' registry: a fact of their source."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal

from torch import nn

Kind = Literal["sdpa", "softmax"]

_SDPA, _SOFTMAX = "scaled_dot_product_attention", ("softmax", "Softmax")
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_PARTS = ({"q", "query", "queries", "qkv"}, {"k", "key", "keys", "qkv", "kv"}, {"v", "value", "values", "qkv", "kv"})


def bypass_kind(attention_class: type[nn.Module]) -> Kind | None:
    """How a class attends outside the registry, decided from its source code alone, so before any weight is loaded.

    A softmax counts as attention where the class calls itself attention, no path through its `forward` (with the
    functions and methods that it calls) takes more than one, and it speaks of queries, keys and values and multiplies
    matrices. So routers, linear attention, block-sparse and two-stream attention are not claimed, nor is attention to
    another sequence ("cross"), where the name of the class tells.

    Args:
        attention_class: class of a module inside a decoder layer.

    Returns:
        "sdpa" where it calls `scaled_dot_product_attention` on some path (on others it may make its scores, as Falcon
        does with eager attention), "softmax" where it makes its scores itself; None where `Bypass` cannot read it: no
        single softmax over keys, the registry is used, or there is no source.
    """
    cls: Any = attention_class
    return _kind_of(cls)


@functools.cache
def _kind_of(attention_class: type[nn.Module]) -> Kind | None:
    name = attention_class.__name__.lower()
    if not re.search("attention|attn|mha", name) or "cross" in name:
        return None
    code = _Code(attention_class.__mro__)
    calls = code.calls_of_method("forward", 0)
    if calls != 1 or code.uses_registry or not all(code.words & part for part in _PARTS):
        return None
    if code.calls_sdpa:
        return "sdpa"
    return "softmax" if code.multiplies else None


@dataclass(slots=True, eq=False)
class _Code:
    """What the methods of a class do, read statement by statement."""

    mro: tuple[type, ...]
    words: set[str] = field(default_factory=set)
    """Parts of the identifiers in it, lower case."""
    calls_sdpa: bool = False
    multiplies: bool = False
    uses_registry: bool = False
    _counts: dict[FunctionType, int] = field(default_factory=dict)

    def calls_of_method(self, name: str, start: int) -> int:
        """The most softmaxes on a path through the method that `mro[start:]` gives this name; 0 where it is none."""
        for position, cls in enumerate(self.mro[start:], start):
            if cls is nn.Module:
                return 0
            if name in vars(cls):
                function = vars(cls)[name]
                return self._calls_of(inspect.unwrap(getattr(function, "__func__", function)), position)
        return 0

    def _calls_of(self, function: Any, position: int) -> int:
        if not isinstance(function, FunctionType) or str(function.__module__).startswith("torch."):
            return 0
        if function not in self._counts:
            self._counts[function] = 0  # also ends a recursion
            try:
                (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
            except (OSError, SyntaxError, ValueError):  # no source, or none of a function's own
                return 0
            if isinstance(tree, ast.FunctionDef):
                self._note(tree, function)
                passing, ended = _Paths(self, function, position).of(tree.body)
                self._counts[function] = max(passing or 0, ended)
        return self._counts[function]

    def _note(self, tree: ast.FunctionDef, function: FunctionType) -> None:
        for node in ast.walk(tree):
            identifier = next((getattr(node, a) for a in ("attr", "id", "arg") if hasattr(node, a)), None)
            if isinstance(identifier, str):
                self.words.update(identifier.lower().split("_"))
                self.calls_sdpa |= identifier == _SDPA
                self.multiplies |= identifier in _PRODUCTS
                found = type(function.__globals__.get(identifier))
                self.uses_registry |= any(cls.__name__ == "AttentionInterface" for cls in found.__mro__)
            self.multiplies |= isinstance(node, ast.MatMult)


@dataclass(frozen=True, slots=True, eq=False)
class _Paths:
    """Counts softmaxes on the paths through one function."""

    code: _Code
    function: FunctionType
    position: int
    """Of the class that defines it in `code.mro`."""

    def of(self, body: Sequence[ast.stmt]) -> tuple[int | None, int]:
        """The most on a path to the end of `body` (None where none gets there), and on one that returns before."""
        passing, ended = 0, 0
        for statement in body:
            if isinstance(statement, ast.If):
                before = passing + self._in(statement.test)
                ways = [self.of(statement.body), self.of(statement.orelse)]
                ended = max(ended, *(before + way[1] for way in ways))
                onward = [way[0] for way in ways if way[0] is not None]
                if not onward:
                    return None, ended
                passing = before + max(onward)
            elif isinstance(statement, ast.Return | ast.Raise):
                return None, max(ended, passing + self._in(statement))
            else:
                passing += self._in(statement)
        return passing, ended

    def _in(self, node: ast.AST) -> int:
        """The most in an expression, or in a statement other than those above; twice what is repeated."""
        if isinstance(node, ast.IfExp):
            return self._in(node.test) + max(self._in(node.body), self._in(node.orelse))
        if isinstance(node, ast.If):
            passing, ended = self.of([node])
            return max(passing or 0, ended)
        inside = sum(self._in(child) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.For | ast.While | ast.comprehension | ast.ListComp | ast.GeneratorExp):
            inside *= 2
        return inside + (self._at(node.func) if isinstance(node, ast.Call) else 0)

    def _at(self, called: ast.expr) -> int:
        """Softmaxes in what is called: the class's own methods, functions beside it, or torch's."""
        if isinstance(called, ast.Name):
            own = self.function.__globals__.get(called.id)
            if isinstance(own, FunctionType) and not str(own.__module__).startswith("torch."):
                return self.code._calls_of(inspect.unwrap(own), self.position)
            return int(called.id in (_SDPA, *_SOFTMAX))
        if not isinstance(called, ast.Attribute):
            return 0
        of = called.value
        if isinstance(of, ast.Name) and of.id in ("self", "cls"):
            if any(called.attr in vars(cls) for cls in self.code.mro):
                return self.code.calls_of_method(called.attr, 0)
        elif isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super":
            return self.code.calls_of_method(called.attr, self.position + 1)
        return int(called.attr in (_SDPA, *_SOFTMAX))
