"""How a broken rule names its keys."""

from __future__ import annotations

from zengine.config import load
from zengine.config.reading.load import at, violation


def test_a_key_is_named_with_its_line_where_it_has_one() -> None:
    config = load('{"train_batch_size": 8,\n"gradient_clipping": 1}')
    assert at(config, "gradient_clipping") == "gradient_clipping (<json>:2)"
    assert at(config, "steps_per_print") == "steps_per_print"
    assert at(load({"gradient_clipping": 1}), "gradient_clipping") == "gradient_clipping"


def test_a_problem_stands_where_its_key_does() -> None:
    config = load('{"train_batch_size": 8,\n"gradient_clipping": 1}')
    assert str(violation(config, "gradient_clipping", "too much", "Less.")) == "<json>:2:1: too much. Less."
