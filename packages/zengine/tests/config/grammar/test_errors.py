"""Problems and the error that carries them."""

from __future__ import annotations

import copy
import pickle

from zengine.config.grammar.errors import NOTHING, ConfigError, Place, Problem, shown


def test_a_problem_prints_place_key_value_reason_and_suggestion() -> None:
    problem = Problem(
        place=Place(source="a/x.json", line=7, column=5), key="a.b", given="2", reason="needs text", suggestion="Do."
    )
    assert str(problem) == 'a/x.json:7:5  a.b = "2": needs text. Do.'


def test_the_parts_that_are_not_known_are_left_out() -> None:
    assert str(Problem(reason="is empty")) == "is empty"
    assert str(Problem(key="a", reason="unknown key")) == "a: unknown key"


def test_an_error_lists_its_problems_in_the_order_of_the_source() -> None:
    late = Problem(place=Place(source="x.json", line=9, column=1), key="b", reason="late")
    early = Problem(place=Place(source="x.json", line=2, column=8), key="a", reason="early")
    error = ConfigError("x.json", [late, early])
    assert error.problems == (early, late)
    assert str(error) == "x.json: 2 problems\n  x.json:2:8  a: early\n  x.json:9:1  b: late"


def test_a_source_that_cannot_be_used_is_one_line() -> None:
    assert str(ConfigError("x.json", [Problem(reason="is empty")])) == "x.json: is empty"


def test_it_is_a_value_error_and_survives_pickle() -> None:
    error = ConfigError("x.json", [Problem(key="a", reason="r", place=Place(source="x.json", line=1, column=1))])
    twin = pickle.loads(pickle.dumps(error))
    assert isinstance(error, ValueError)
    assert isinstance(twin, ConfigError)
    assert (str(twin), twin.problems) == (str(error), error.problems)
    assert twin.problems[0].given is NOTHING
    assert copy.deepcopy(NOTHING) is NOTHING


def test_an_origin_is_the_file_name_and_line() -> None:
    assert Place(source="runs/a/x.json", line=4, column=2).origin() == "x.json:4"
    assert Place(source="dict").origin() == "dict"


def test_long_values_are_cut() -> None:
    assert shown({"a": "b" * 100}) == '{"a": "' + "b" * 38 + "..."
    assert shown(True) == "true"
    assert shown({1, 2}) == "{1, 2}"
