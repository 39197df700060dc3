"""A function of the script as its source and its values: what a name in it stands for, and where it is
assigned."""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from lastcall.script.source import sources

Loop = ast.For | ast.While | ast.AsyncFor
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_CACHE = dis.opmap.get("CACHE", -1)  # another Python may have none
_LISTED = 32  # callbacks
_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# Their functions hold no save of the script's, and are many.
LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    *(
        "torch",
        "torchvision",
        "torchaudio",
        "torchmetrics",
        "numpy",
        "ray",
        "pandas",
        "pyarrow",
        "PIL",
        "tqdm",
        "wandb",
        "mlflow",
    ),
    *(
        "transformers",
        "accelerate",
        "datasets",
        "peft",
        "lightning",
        "pytorch_lightning",
        "deepspeed",
        "safetensors",
        "sklearn",
    ),
    *(
        "fsspec",
        "lastcall",
        "_pytest",
        "pytest",
        "pluggy",
        "IPython",
        "ipykernel",
        "cloudpickle",
        "joblib",
        "hydra",
        "click",
    ),
}


def instruction(frame: FrameType) -> int:
    """Where a frame is: the offset of an instruction. From Python 3.12 on `f_lasti` of a loop over a
    generator is that of FOR_ITER in the first passes, and points into the cache behind it once the loop is
    specialized."""
    at, code = frame.f_lasti, frame.f_code.co_code
    while at > 0 and code[at] == _CACHE:
        at -= 2
    return at


def is_library(space: Mapping[str, Any]) -> bool:
    return str(space.get("__name__", "")).partition(".")[0] in LIBRARIES


def below(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node in the same frame, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _NESTED):
            yield child
            yield from below(child)


def spans(node: ast.AST, line: int) -> bool:
    return isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)


class Scope:
    """`bound`: parameters, as the scope and the expression that they were given from. `line`: where the frame
    is, if it runs; `calling`: the call that it is in, if that is known."""

    def __init__(
        self,
        source: sources.SourceFile,
        node: sources.Body,
        code: CodeType,
        space: Mapping[str, Any],
        own: Mapping[str, Any],
        line: int | None = None,
    ) -> None:
        self.source, self.node, self.code, self.line = source, node, code, line
        self.space, self.own = space, own
        self.bound: dict[str, tuple[Scope, ast.expr]] = {}
        self.calling: ast.Call | None = None

    def repeats(self, node: ast.AST) -> bool:
        """Whether what runs now is run again and again by this node: a loop, or a comprehension around the
        call that runs."""
        if isinstance(node, _Comprehension):
            return self.calling is not None and any(each is self.calling for each in below(node))
        return isinstance(node, Loop) and self.line is not None and spans(node, self.line)

    @functools.cached_property
    def assigned(self) -> dict[str, list[tuple[ast.AST, ast.expr | None]]]:
        """Names, and what else is written to, as text: the statements that assign it, and what is assigned,
        if that is plain."""
        found: dict[str, list[tuple[ast.AST, ast.expr | None]]] = {}
        for node in below(self.node):
            for target, value in assignments(node):
                found.setdefault(ast.unparse(target), []).append((node, value))
        return found

    @functools.cached_property
    def varying(self) -> set[str]:
        """What is assigned in a loop."""
        loops = [node for node in below(self.node) if isinstance(node, Loop)]
        held = {id(node) for loop in loops for node in (loop, *below(loop))}
        return {
            name
            for name, all_of_it in self.assigned.items()
            if any(id(node) in held for node, _ in all_of_it)
        }

    def value(self, node: ast.expr) -> Any:
        """What an expression stands for, found without running anything of the script's; None if that cannot
        be told."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return _attribute(self.value(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            base = self.value(node.value)
            return base.get(node.slice.value) if type(base) is dict else None
        return None

    def _named(self, name: str) -> Any:
        if name in self.bound and name not in self.own:
            caller, argument = self.bound[name]
            return caller.value(argument)
        for space in (self.own, self.space, vars(builtins)):
            if name in space:
                return space[name]
        return None

    def called(self, call: ast.Call) -> Scope | None:
        """The function of the script that a call runs."""
        function, given = _function(self.value(call.func))
        if function is None or is_library(function.__globals__):
            return None
        source = sources.of(function.__code__, function.__globals__)
        node = source.body_of(function.__code__) if source is not None else None
        if source is None or node is None:
            return None
        scope = Scope(source, node, function.__code__, function.__globals__, _closure(function))
        scope.bind(self, call, given)
        return scope

    def callees(self, call: ast.Call) -> Iterator[Scope]:
        """All that it may run: in `for callback in self.callbacks: callback.on_epoch_end()`, one a
        callback."""
        name = next((node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)), "")
        loops = [
            node
            for node in below(self.node)
            if isinstance(node, ast.For) and getattr(node.target, "id", "") == name
        ]
        listed = [self.value(loop.iter) for loop in loops]
        values = [each for value in listed if isinstance(value, list | tuple) for each in value[:_LISTED]]
        scopes = [
            Scope(self.source, self.node, self.code, self.space, {**self.own, name: each}, self.line)
            for each in values
        ] or [self]
        yield from (callee for scope in scopes if (callee := scope.called(call)) is not None)

    def bind(self, caller: Scope, call: ast.Call, given: list[Any]) -> None:
        """The parameters get what this call gives them, behind what the callable itself brings: its object, a
        partial's arguments."""
        if not isinstance(self.node, sources.Function):
            return
        names = [each.arg for each in [*self.node.args.posonlyargs, *self.node.args.args]]
        self.own = {**self.own, **dict(zip(names, given, strict=False))}
        for name, argument in zip(names[len(given) :], call.args, strict=False):
            if isinstance(argument, ast.Starred):
                break
            self.bound[name] = caller, argument
        self.bound |= {word.arg: (caller, word.value) for word in call.keywords if word.arg is not None}


def statement(node: ast.AST, scope: Scope) -> ast.stmt:
    """The one that an expression belongs to."""
    while not isinstance(node, ast.stmt):
        node = scope.source.parents[node]
    return node


def of_frame(frame: FrameType) -> Scope | None:
    source = sources.of(frame.f_code, frame.f_globals)
    node = source.body_of(frame.f_code) if source is not None else None
    if source is None or node is None:
        return None
    return Scope(source, node, frame.f_code, frame.f_globals, dict(frame.f_locals), frame.f_lineno)


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple | ast.List):
                yield from ((each, None) for each in target.elts)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor):
        targets = node.target.elts if isinstance(node.target, ast.Tuple | ast.List) else [node.target]
        yield from ((each, None) for each in targets)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, None


def _closure(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # assigned later
            continue
    return found


def _attribute(base: Any, name: str) -> Any:
    """Without running a property or an import."""
    if base is None:
        return None
    if isinstance(base, ModuleType):
        return vars(base).get(name)
    found = inspect.getattr_static(base, name, None)
    if found is None:
        return getattr(base, "__dict__", {}).get("_modules", {}).get(name)
    if isinstance(found, staticmethod):
        return found.__func__
    if isinstance(found, classmethod):
        return MethodType(found.__func__, base if isinstance(base, type) else type(base))
    if (
        isinstance(found, FunctionType)
        and not isinstance(base, type)
        and name not in getattr(base, "__dict__", {})
    ):
        return MethodType(found, base)
    return None if isinstance(found, property) else found


def _function(target: Any) -> tuple[FunctionType | None, list[Any]]:
    """The function behind something that is called, and the first arguments that it gets from there."""
    given: list[Any] = []
    for _ in range(8):
        if isinstance(target, MethodType):
            target, given = target.__func__, [target.__self__, *given]
        elif isinstance(target, functools.partial):
            target, given = target.func, [*target.args, *given]
        elif "__wrapped__" in getattr(target, "__dict__", {}):
            target = target.__wrapped__
        elif isinstance(target, FunctionType):
            return target, given
        elif target is None or isinstance(target, type | ModuleType):
            return None, given
        else:
            target = _attribute(target, "__call__")
    return None, given
