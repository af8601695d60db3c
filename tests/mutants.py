"""Does `fusedstep check` notice when a rule is wrong? Every rule and scalar function, changed in every way.

    python tests/mutants.py             all of them, in minutes
    python tests/mutants.py adam lamb   those whose name contains one of these
    python tests/mutants.py --sample 50

Each mutant takes the steps of those cases that call its function, against the same references. It is caught
if one of them is wrong, or named in equivalent_mutants.json with the reason why it computes the same. The run
fails if a mutant is neither, and if a name there is of no mutant, or of one that is caught.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib
import json
import multiprocessing
import pkgutil
import random
import sys
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from fusedstep import npu, optimizers
from fusedstep._algorithm import language, program, step, value
from fusedstep._memory import needs
from fusedstep.cli.combinations import FEATURES, Case, Place
from fusedstep.cli.judging import complaints
from fusedstep.cli.subjects import SUBJECTS
from fusedstep.rules import Rule
from tests.mutations import code_of, definitions, mutants

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
# what only refuses options, or says something
_SILENT = ("check", "called", "keywords", "_check", "_differs", "_results")
_METHODS = ("rule_of", "number", "limit", "_show")


def modules():
    of_optimizers = [name for _, name, _ in pkgutil.iter_modules(optimizers.__path__) if name != "checks"]
    yield from (importlib.import_module(f"{optimizers.__name__}.{name}") for name in of_optimizers)
    yield from (
        importlib.import_module(f"{npu.__name__}.{name}")
        for name in ("_adamp", "_lamb", "_rmsprop", "_operator")
    )
    yield from (step, language, value)


def _function(module, name):
    """The function that steps call by this name."""
    found = functools.reduce(lambda x, part: vars(x)[part], name.split("."), module)
    return found.update if isinstance(found, Rule) else getattr(found, "__wrapped__", found)


@functools.cache
def all_mutants():
    """Their names, each with its function, and how to make its code."""
    found = {}
    for module in modules():
        for name, owner, tree in definitions(module):
            method = name.rpartition(".")[2]
            is_silent = method.startswith(_SILENT) or method in (
                "__init__",
                "step",
                "add_param_group",
                "_by_either_name",
            )
            of_value = owner is not None and owner.name == "Value" and method not in _OF_VALUES
            if (
                is_silent
                or of_value
                or (owner is not None and owner.name != "Value" and method not in _METHODS)
            ):
                continue
            for change, other in mutants(tree):
                short = f"{module.__name__.removeprefix('fusedstep.')}.{name}: {change}"
                found[short] = (module, name, owner, other)
    return found


# of values: operators, and not what raises errors
_OPERATORS = ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs"]
_OPERATORS += ["lt", "le", "gt", "ge", "eq", "ne", "init"]
_OF_VALUES = [f"__{name}__" for name in _OPERATORS]


@contextlib.contextmanager
def replaced(module, name, owner, other):
    """Within this, everybody who calls the function calls the mutant."""
    function = _function(module, name)
    before = function.__code__
    function.__code__ = code_of(module, owner, other, bool(before.co_freevars))
    forget()
    try:
        yield
    finally:
        function.__code__ = before
        forget()


def forget():
    """Rules are traced once; what engines keep belongs to programs, which differ if rules do."""
    program.compile_step.cache_clear()
    program._sums_of.cache_clear()
    needs.program_of.cache_clear()


def _case(subject, dtype="float64", **levels):
    chosen = tuple(levels.get(name, values[0]) for name, values in FEATURES.items())
    return Case(subject, dtype, Place("torch", "cpu"), chosen)


_AROUND = {"clip": "norm", "ema": "yes", "statistics": "yes", "groups": "several", "grads": "missing"}
# what a step does besides its update is done by every optimizer alike: two that keep most, with each of it
_STEPS = [
    {"clip": "largest", "groups": "several", "statistics": "yes", "zero": "fill"},
    {"skip": "guard", "ema": "yes"},
    {"skip": "scaler", "clip": "norm", "groups": "several"},
    {"skip": "torch", "clip": "norm"},
    {"statistics": "yes", "skip": "scaler"},
]


def cases(only=None):
    """In float64, where nothing but a mistake shows; what takes no float64 in float32."""
    for subject in (subject for subject in SUBJECTS if only is None or subject.name in only):
        dtype = "float64" if _case(subject).makes_sense else "float32"
        place = Place("torch" if subject.takes("engine") or dtype == "float64" else "cpu", "cpu")
        variants = [
            {},
            {"rate": "schedule"},
            {**_AROUND, "rate": "tensor"},
            {"steps": "one"},
            {"grads": "late"},
        ]
        variants += _STEPS if subject.name in ("AdamW", "NAdam", "Prodigy", "SGD") else []
        for levels in variants:
            case = _case(subject, dtype, **levels)._replace(place=place)
            if case.makes_sense:
                yield case
    # engines clear gradients in ways of their own
    if only is None:
        yield _case(SUBJECTS[0], zero="fill")._replace(place=Place("cpu", "cpu"))
    # torch multiplies truth values, too
    for subject in (subject for subject in SUBJECTS if subject.name == "rules" and only is None):
        yield _case(subject)._replace(place=Place("cpu", "cpu"))


@functools.cache
def callers(only=None):
    """Of every function the cases that call it, by their texts; of these optimizers, or of all."""
    found, wrong = {}, []
    by_code = {_function(m, name).__code__: f"{m.__name__}.{name}" for m, name, _, _ in all_mutants().values()}
    for case in cases(only):
        called = set()
        watch = lambda frame, event, _, called=called: called.add(frame.f_code) if event == "call" else None
        forget()
        sys.setprofile(watch)
        try:
            wrong += [f"{case}: {complaint}" for complaint in complaints(case)]
        finally:
            sys.setprofile(None)
        for code in called & by_code.keys():
            found.setdefault(by_code[code], []).append(str(case))
    if wrong:
        raise SystemExit("\n".join(["without any mutant these are wrong; make check green first:", *wrong]))
    return found


def caught(name, texts):
    """The case that notices a mutant, of those with these texts; or None."""
    module, function, owner, other = all_mutants()[name]
    with warnings.catch_warnings(), replaced(module, function, owner, other):
        warnings.simplefilter("ignore")
        for text in texts:
            try:
                if complaints(Case.of(text)):
                    return text
            except Exception as error:
                return f"{text} ({type(error).__name__})"
    return None


def run(names, jobs=1, only=None):
    """Each name, with the case that noticed it, or None."""
    where = {name: f"{module.__name__}.{of}" for name, (module, of, _, _) in all_mutants().items()}
    texts = [callers(only).get(where[name], ()) for name in names]
    if jobs == 1:
        yield from zip(names, map(caught, names, texts), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        yield from zip(names, pool.map(caught, names, texts, chunksize=4), strict=True)


def unaccounted(results, equivalent, is_all):
    """What is wrong with the results of a run."""
    wrong = [f"survived: {name}" for name, case in results.items() if case is None and name not in equivalent]
    wrong += [
        f"caught by {results[name]}, and no equivalent: {name}" for name in equivalent if results.get(name)
    ]
    if is_all:
        wrong += [f"of no mutant: {name}" for name in equivalent if name not in all_mutants()]
    return wrong


def sample(count, only=None, seed=0):
    """Some of those that are to be caught, in the files of these optimizers or in all."""
    known = json.loads(EQUIVALENT.read_text())
    prefixes = ("",) if only is None else tuple(f"optimizers.{name.lower()}." for name in only)
    names = [name for name in all_mutants() if name not in known and name.startswith(prefixes)]
    return random.Random(seed).sample(names, min(count, len(names)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--sample", type=int, help="so many of them, always the same")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="tell what caught each")
    asked = parser.parse_args()
    names = sample(asked.sample) if asked.sample else [*all_mutants()]
    names = [name for name in names if not asked.parts or any(part in name for part in asked.parts)]
    equivalent = json.loads(EQUIVALENT.read_text())
    console = Console(soft_wrap=True, highlight=False, markup=False)
    results = {}
    for name, case in track(run(names, asked.jobs), "mutants", total=len(names), console=Console(stderr=True)):
        results[name] = case
        if asked.list or (case is None and name not in equivalent):
            console.print(f"{name}   [{case or 'SURVIVED'}]")
            sys.stdout.flush()
    wrong = unaccounted(results, equivalent, is_all=len(names) == len(all_mutants()))
    for line in wrong:
        console.print(line)
    count = sum(case is not None for case in results.values())
    console.print(f"{len(results)} mutants: {count} caught, {len(results) - count} survived")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
