"""Layers and logits of a teacher."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_models import Decoder, config, tokens
from torch import Tensor, nn

import zengine
from zengine.compression import distillation_loss
from zengine.compression.teacher import find_logits
from zengine.features.distillation import Teaching

REDUCTION = {"enabled": True, "module_name_prefix": "layers", "teacher_layer": [1, 3], "other_module_name": ["embed"]}


class Teachable(nn.Module):
    """Returns loss and logits."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.decoder = Decoder(seed=seed)

    def forward(self, ids: Tensor) -> Any:
        logits = self.decoder(ids)
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))


def test_the_students_layers_are_the_teachers() -> None:
    student, teacher = Decoder(2, seed=1), Decoder(4, seed=2)
    head = student.head.weight.clone()
    zengine.init_compression(student, config({"layer_reduction": REDUCTION}), teacher_model=teacher)
    for at, layer in enumerate((1, 3)):
        for mine, other in zip(student.layers[at].parameters(), teacher.layers[layer].parameters(), strict=True):
            assert torch.equal(mine, other)
            assert mine.data_ptr() != other.data_ptr()
    assert torch.equal(student.embed.weight, teacher.embed.weight)
    assert torch.equal(student.head.weight, head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"module_name_prefix": "blocks"},
            "student, a Decoder, has no module 'blocks.0'; it has embed, layers, head",
        ),
        ({"teacher_layer": [1, 9]}, "the teacher, a Decoder, has no module 'layers.9'; it has layers.0, layers.1"),
        ({"other_module_name": ["pooler"]}, "the student, a Decoder, has no module 'pooler'"),
        ({"module_name_prefix": ""}, "module_name_prefix must be given"),
    ],
)
def test_wrong_paths_are_named(changes: dict[str, Any], message: str) -> None:
    student = Decoder(2, seed=1)
    before = student.embed.weight.clone()
    with pytest.raises(ValueError, match=message):
        zengine.init_compression(
            student, config({"layer_reduction": {**REDUCTION, **changes}}), teacher_model=Decoder(4, seed=2)
        )
    assert torch.equal(student.embed.weight, before)


def test_layers_of_another_width_are_named() -> None:
    with pytest.raises(ValueError, match=r"'attention.query.weight' is \(16, 16\) in 'layers.0' of the student"):
        zengine.init_compression(
            Decoder(2), config({"layer_reduction": REDUCTION}), teacher_model=Decoder(4, width=32)
        )


def test_a_missing_teacher_is_told() -> None:
    for name, section in (("layer_reduction", REDUCTION), ("distillation", {"enabled": True})):
        with pytest.raises(ValueError, match=f"compression_training.{name} needs a teacher"):
            zengine.init_compression(Decoder(), config({name: section}))
    with pytest.raises(ValueError, match="distillation needs a teacher"):
        zengine.initialize(model=Teachable(), config=config({"distillation": {"enabled": True}}))


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_divergence_is_that_of_the_softened_distributions(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(2, 3, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = ((each / temperature).softmax(-1) for each in (teacher, student))
    expected = (p * (p.log() - q.log())).sum(-1).mean() * temperature**2
    assert float(distillation_loss(student, teacher, temperature)) == pytest.approx(float(expected), rel=1e-5)
    assert float(distillation_loss(teacher, teacher, temperature)) == pytest.approx(0, abs=1e-6)


def test_logits_are_found_in_outputs() -> None:
    logits = torch.zeros(2, 3)
    for output in (logits, {"logits": logits}, SimpleNamespace(logits=logits)):
        assert find_logits(output, "logits") is logits
    for output in (torch.zeros(()), (logits, logits), {"other": logits}):
        with pytest.raises(TypeError, match="distillation: the model returns"):
            find_logits(output, "logits")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_mixed_with_the_divergence(accumulation: int) -> None:
    section = {"distillation": {"enabled": True, "temperature": 2.0, "weight": 0.25}}
    source = config(
        section,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.0,
        optimizer={"type": "SGD", "params": {"lr": 1}},
    )
    student, teacher, twin = Teachable(), Teachable(seed=9), Teachable()
    zengine.init_compression(student, source, teacher_model=teacher)
    engine = zengine.initialize(model=student, config=source)[0]
    twin, total = twin.to(engine.device), torch.zeros((), device=engine.device)
    for micro in range(accumulation):
        ids = tokens(micro).to(engine.device)
        with torch.no_grad():
            engine.eval()
            engine(ids)
            engine.train()
        engine.backward(engine(ids).loss)
        mine, theirs = twin(ids), teacher(ids)
        divergence = distillation_loss(mine.logits, theirs.logits, 2.0)
        total = total + (0.75 * mine.loss + 0.25 * divergence) / accumulation
        report = engine.step()
    total.backward()
    assert report.loss == pytest.approx(float(total.detach()), rel=1e-6)
    for (name, found), own in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, own - own.grad, rtol=1e-5, atol=1e-6, msg=name)


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


@pytest.mark.parametrize("kind", [lambda logits: logits, lambda logits: {"logits": logits}, Output])
def test_a_training_forward_without_a_backward_keeps_no_graph_and_does_not_count(kind: Any) -> None:
    class Student(Decoder):
        def forward(self, ids: Tensor) -> Any:
            return kind(super().forward(ids))

    source = config({"distillation": {"enabled": True, "weight": 0.5}}, gradient_clipping=0.0)
    losses = []
    for extra in (0, 3):
        student, teacher = Student(seed=5), Student(seed=9)
        zengine.init_compression(student, source, teacher_model=teacher)
        engine = zengine.initialize(model=student, config=source)[0]
        teaching = next(each for each in engine._features if isinstance(each, Teaching))
        for _ in range(extra):
            engine(tokens(1).to(engine.device))
            assert not teaching.divergences
        logits = find_logits(engine(tokens(0).to(engine.device)), "logits")
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens(0).to(engine.device).flatten())
        del logits
        assert len(teaching.divergences) == 1
        losses.append(float(engine.backward(loss).detach()))
        assert not teaching.divergences
        losses.append(engine.step().loss)
        engine.close()
    assert losses[:2] == losses[2:]
