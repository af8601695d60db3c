"""Mutants of a function: its text with one sign, operand, constant, comparison or branch changed."""

import __future__

import ast
import copy
import inspect

_OPPOSITE = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
_NEIGHBOURS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
_OTHER_FUNCTION = {
    "maximum": "minimum",
    "minimum": "maximum",
    "larger": "smaller",
    "smaller": "larger",
    "total": "largest",
    "largest": "total",
    "over_all": "over_clip_group",
    "over_clip_group": "over_all",
}
# what is left of a call without them
_DROPPED = ("sqrt", "abs", "sign", "exp", "log", "cautious", "without_what_opposes", "total", "total_over_all")
_SWAPPED = ("power", "mix", "mixed", "maximum", "minimum")
# the words of instructions
_OTHER_WORDS = {
    "add": ("sub",),
    "sub": ("add",),
    "mul": ("div",),
    "div": ("mul",),
    "neg": ("abs",),
    "lt": ("le", "ge"),
    "le": ("lt", "gt"),
    "gt": ("ge", "le"),
    "ge": ("gt", "lt"),
    "eq": ("ne",),
    "ne": ("eq",),
    "maximum": ("minimum",),
    "minimum": ("maximum",),
    "sum": ("max",),
    "max": ("sum",),
    "sqrt": ("abs",),
    "exp": ("tanh",),
    "tanh": ("exp",),
    "cos": ("exp",),
    "log": ("abs",),
    "all_total": ("clip_total",),
    "clip_total": ("all_total",),
}
_NON_COMMUTATIVE = ("sub", "div", "power", "lt", "le", "gt", "ge")


def _minus(node):
    return ast.UnaryOp(ast.USub(), node)


def _of_call(node):
    name, args = getattr(node.func, "id", getattr(node.func, "attr", "")), node.args
    with_args = lambda *new: ast.Call(node.func, [*new], node.keywords)
    if name in _OTHER_FUNCTION:
        yield ast.Call(ast.Name(_OTHER_FUNCTION[name], ast.Load()), args, node.keywords)
    if name in _DROPPED and args:
        yield args[0]
    if name in _SWAPPED and name not in ("maximum", "minimum"):
        yield with_args(args[1], args[0], *args[2:])
    if name == "where":
        yield args[1]
        yield args[2]
    if name == "clamp":
        yield args[0]
    if name == "fma":
        a, b, c = args
        yield with_args(_minus(a), b, c)
        yield with_args(a, b, _minus(c))
        yield ast.BinOp(ast.BinOp(a, ast.Div(), b), ast.Add(), c)
    if name == "operation" and isinstance(args[0], ast.Constant) and args[0].value in _NON_COMMUTATIVE:
        yield with_args(args[0], args[2], args[1])


def replacements(node):
    """What stands in a mutant where this node stands in the original."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in _OPPOSITE:
            yield ast.BinOp(node.left, _OPPOSITE[type(node.op)](), node.right)
        if isinstance(node.op, (ast.Sub, ast.Div, ast.Pow)):
            yield ast.BinOp(node.right, node.op, node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in _NEIGHBOURS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [op()], node.comparators)
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Constant):
        if type(node.value) in (int, float):
            is_count = node.value == int(node.value) and abs(node.value) < 100
            yield ast.Constant(node.value + 1 if is_count else 2 * node.value)
        elif isinstance(node.value, str):
            yield from (ast.Constant(word) for word in _OTHER_WORDS.get(node.value, ()))


def _nodes(tree):
    """The nodes of a body in their order, without documentation, and without what only errors say."""
    for child in ast.iter_child_nodes(tree):
        is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if isinstance(child, (ast.Raise, ast.JoinedStr, ast.arguments)) or is_text:
            continue
        if not (isinstance(tree, ast.FunctionDef) and child in (*tree.decorator_list, tree.returns)):
            yield child
            yield from _nodes(child)


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def mutants(tree):
    """Pairs of a text that names the change, and the definition with it."""
    seen = {}
    for i, node in enumerate(_nodes(tree)):
        for k in range(len([*replacements(node)])):
            other = copy.deepcopy(tree)
            old = [*_nodes(other)][i]
            new = [*replacements(old)][k]
            before, after = (ast.unparse(n).partition("\n")[0] for n in (old, new))
            if before == after and not isinstance(old, ast.If):
                continue
            name = f"{before} -> {after}"
            seen[name] = seen.get(name, 0) + 1
            told = name if seen[name] == 1 else f"{name} ({seen[name]})"
            yield told, ast.fix_missing_locations(_Replace(old, copy.deepcopy(new)).visit(other))


def definitions(module):
    """The functions of a module, and the methods of its classes, by their names."""
    tree = ast.parse(inspect.getsource(module))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, None, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{n.name}", node, n) for n in node.body if isinstance(n, ast.FunctionDef))


def code_of(module, owner, tree, means_class):
    """The code of a definition as it would be in its module, or in a class of it, which it may mean."""
    tree.decorator_list = []
    body = tree
    if owner is not None:
        if means_class:
            # also where the mutant does not: functions take no code with fewer cells
            tree.body = [ast.Expr(ast.Name("__class__", ast.Load())), *tree.body]
        body = ast.ClassDef(name=owner.name, bases=[], keywords=[], body=[tree], decorator_list=[])
        body.type_params = []
    whole = ast.fix_missing_locations(ast.Module([body], []))
    names = dict(vars(module))
    flags = __future__.annotations.compiler_flag
    exec(compile(whole, module.__file__, "exec", flags, dont_inherit=True), names)
    return (names[tree.name] if owner is None else vars(names[owner.name])[tree.name]).__code__
