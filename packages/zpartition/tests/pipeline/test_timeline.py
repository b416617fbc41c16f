import xml.etree.ElementTree as ElementTree

import pytest

from zpartition.pipeline import ActionKind, gpipe, one_f_one_b, simulate, zero_bubble


def test_text_of_a_timeline() -> None:
    assert simulate(gpipe(2, 2)).text().splitlines() == [
        "rank 0  F0 F1 .  .  .  B0 B0 B1 B1",
        "rank 1  .  F0 F1 B0 B0 B1 B1 .  .",
    ]
    assert simulate(zero_bubble(2, 2)).text().splitlines()[1] == "rank 1  .  F0 I0 F1 I1 W0 W1"


def test_the_svg_has_a_bar_for_every_action() -> None:
    tree = ElementTree.fromstring(simulate(one_f_one_b(2, 3)).svg())
    names = [each.tag.rpartition("}")[2] for each in tree.iter()]
    assert names.count("rect") == 2 * 3 * 2
    assert "1F0: 1 to 2" in [each.text for each in tree.iter() if each.tag.endswith("title")]


def test_slow_stages_and_sends_make_the_batch_longer() -> None:
    made = one_f_one_b(2, 4)
    assert simulate(made).span == 15
    assert (
        simulate(made, send=0.5).span == 15 + 4 * 0.5
    )  # 1F1B waits for both ways, there and back, of every other one
    slow = simulate(
        made, cost=lambda action: (1 + (action.stage == 1)) * (1.0 if action.kind is ActionKind.FORWARD else 2.0)
    )
    assert slow.busy(1) == 2 * slow.busy(0)
    assert slow.span == 1 + 24 + 2
    assert slow.bubble == pytest.approx(2 * 27 / 36 - 1)
