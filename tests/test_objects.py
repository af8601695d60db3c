"""Questions about many objects: compiled code and Python give the same answers, and hold no object back."""

import sys

import pytest

from fusedstep._engines import objects
from fusedstep._engines.objects import same, values_of

NAMES = ["exp_avg", "step"]


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def is_compiled(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(objects, "_compiled", lambda: None)
    elif objects._compiled() is None:
        pytest.skip("this Python has no lock to hold")
    monkeypatch.setattr(objects, "_FEW", 0)
    return request.param


@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000])
def test_lists_are_the_same_if_all_their_objects_are(is_compiled, count):
    one = [[i] for i in range(count)]
    assert same(one, [*one])
    assert not same(one, [*one, 1])
    for i in range(0, count, 7):
        assert not same(one, [*one[:i], [i], *one[i + 1 :]])


def test_objects_that_cannot_be_compared_are_told_apart(is_compiled):
    class Incomparable:
        def __eq__(self, other):
            raise AssertionError("only identity counts")

        __hash__ = None

    several = [Incomparable() for _ in range(20)]
    assert same(several, [*several])
    assert not same(several, several[::-1])


@pytest.mark.parametrize("count", [0, 1, 500])
def test_values_come_one_dict_after_the_other(is_compiled, count):
    dicts = [{"step": object(), "exp_avg": object(), "other": 1} for _ in range(count)]
    expected = [each[name] for each in dicts for name in NAMES]
    assert same(values_of(dicts, NAMES), expected)
    assert values_of(dicts, []) == []


def test_a_name_that_is_missing_is_told_without_an_error(is_compiled):
    dicts = [{"step": 1, "exp_avg": 2} for _ in range(50)]
    del dicts[30]["exp_avg"]
    assert values_of(dicts, NAMES) is None
    # a value that is None is there
    dicts[30]["exp_avg"] = None
    assert values_of(dicts, NAMES).count(None) == 1


def test_a_dict_that_knows_more_than_it_holds_is_asked(is_compiled):
    class Known(dict):
        def __missing__(self, name):
            return name.upper()

    assert values_of([Known(), {"step": 1, "exp_avg": 2}], NAMES) == ["EXP_AVG", "STEP", 2, 1]


def test_a_dict_with_a_way_of_its_own_is_asked_in_that_way(is_compiled):
    class Lazy(dict):
        def __getitem__(self, name):
            return super().__getitem__(name)()

    dicts = [Lazy(step=lambda i=i: i, exp_avg=lambda: "made") for i in range(20)]
    assert values_of(dicts, ["step", "exp_avg"]) == [x for i in range(20) for x in (i, "made")]


def test_sequences_that_are_no_lists_are_compared(is_compiled):
    one = tuple(object() for _ in range(20))
    assert same(one, list(one))
    assert same(list(one), one)
    assert not same(list(one), one[::-1])


def test_what_is_no_dict_raises_as_in_python(is_compiled):
    with pytest.raises(TypeError):
        values_of([{"step": 1, "exp_avg": 2}, 3], NAMES)


def test_no_object_is_held_back(is_compiled):
    value, dicts = object(), [{"step": 0} for _ in range(20)]
    before = sys.getrefcount(value)
    for _ in range(10):
        dicts[3]["step"] = value
        assert values_of(dicts, ["step"])[3] is value
        assert values_of(dicts, ["step", "missing"]) is None
        assert same([value] * 20, [value] * 20)
        dicts[3]["step"] = 0
    assert sys.getrefcount(value) == before
