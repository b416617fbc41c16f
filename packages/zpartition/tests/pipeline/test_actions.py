import pytest

from zpartition.pipeline import Action, ActionKind


def test_text_and_back() -> None:
    for text in ("0F0", "12I3", "3W11", "7B0"):
        assert str(Action.parse(text)) == text
    assert Action.parse("2B5") == Action(2, ActionKind.BACKWARD, 5)


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "-1F0", "0F0 "])
def test_invalid_actions_raise(text: str) -> None:
    with pytest.raises(ValueError, match="is not a pipeline action: write STAGE"):
        Action.parse(text)


def test_properties_of_split_backwards() -> None:
    assert [kind.makes_gradient for kind in ActionKind] == [False, True, True, False]
    assert [kind.frees_activations for kind in ActionKind] == [False, True, False, True]
