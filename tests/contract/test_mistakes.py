"""Mistakes of newcomers: each raises an error that says what was given, what is allowed, and what to do.

A row of the table is one mistake on one process and a tiny model: the call, the type of the error, and three texts
of its message (with its notes).  A message that loses one of the three fails here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
from zengine.config import ConfigError
from zengine.engine.clock import CallOrderError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X, LABELS = torch.ones(2, 3, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Net(nn.Module):
    """Classifies 3 features into 2 classes; returns the loss if labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        out = self.head(torch.tanh(self.body(x)))
        return out if labels is None else nn.functional.cross_entropy(out, labels)


def make(model: Any = None, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return an engine of `initialize(...)` with a small valid config, changed by `config`."""
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": SGD}
    return zengine.initialize(model=Net() if model is None else model, config={**base, **(config or {})}, **options)[
        0
    ]


def without_backward(_: Path) -> None:
    make().step()


def step_after_forward(_: Path) -> None:
    engine = make()
    engine(X, LABELS)
    engine.step()


def step_twice(_: Path) -> None:
    engine = make()
    engine.backward(engine(X, LABELS))
    engine.step()
    engine.step()


def backward_twice(_: Path) -> None:
    engine = make()
    loss = engine(X, LABELS)
    engine.backward(loss)
    engine.backward(loss)


def step_in_no_sync(_: Path) -> None:
    engine = make()
    with engine.no_sync():
        engine.backward(engine(X, LABELS))
        engine.step()


def after_close(_: Path) -> None:
    engine = make()
    engine.close()
    engine(X, LABELS)


def without_optimizer(_: Path) -> None:
    engine = zengine.initialize(model=Net(), config={"train_micro_batch_size_per_gpu": 2})[0]
    engine.backward(engine(X, LABELS))
    engine.step()


def mixed_backwards(_: Path) -> None:
    engine = make(config={"gradient_accumulation_steps": 2})
    engine(X, LABELS).backward()
    engine.backward(engine(X, LABELS))


def loss_under_no_grad(_: Path) -> None:
    engine = make()
    with torch.no_grad():
        loss = engine(X, LABELS)
    engine.backward(loss)


def second_engine(_: Path) -> None:
    net = Net()
    engine = make(net)
    make(net)
    engine.close()


def invalid_json(path: Path) -> None:
    (path / "ds.json").write_text('{"train_batch_size": 2 "bf16": {}}')
    zengine.initialize(model=Net(), config=str(path / "ds.json"))


def load_pt_file(path: Path) -> None:
    torch.save(Net().state_dict(), path / "model.pt")
    make().load_checkpoint(str(path / "model.pt"))


def load_tag_folder(path: Path) -> None:
    engine = make()
    engine.load_checkpoint(engine.save_checkpoint(str(path)))


def load_other_tag(path: Path) -> None:
    engine = make()
    engine.save_checkpoint(str(path))
    engine.load_checkpoint(str(path), tag="global_step7")


def load_other_model(path: Path) -> None:
    make().save_checkpoint(str(path))
    make(nn.Linear(3, 2)).load_checkpoint(str(path))


def save_into_file(path: Path) -> None:
    (path / "file").write_text("text")
    make().save_checkpoint(str(path / "file"))


def read_generator(_: Path) -> None:
    net = Net()
    parameters = net.parameters()
    assert sum(param.numel() for param in parameters) == 26
    make(net, model_parameters=parameters)


@attrs.frozen
class Mistake:
    """A call that raises `error`, whose message has three texts."""

    make: Callable[[Path], Any]
    error: type[Exception]
    given: str
    allowed: str
    remedy: str


def backward(loss: Callable[[torch.Tensor], Any]) -> Callable[[Path], Any]:
    """Return a mistake: `loss` changes the output of a forward before engine.backward()."""

    def run(_: Path) -> None:
        engine = make()
        engine.backward(loss(engine(X, LABELS)))

    return run


def call(*args: Any) -> Callable[[Path], Any]:
    """Return a mistake: a forward with wrong arguments."""
    return lambda _: make()(*args)


def config(**keys: Any) -> Callable[[Path], Any]:
    """Return a mistake: a config with wrong keys."""
    return lambda _: make(config=keys)


def option(**options: Any) -> Callable[[Path], Any]:
    """Return a mistake: a wrong argument of initialize()."""
    return lambda _: make(**options)


def detect(**environ: str) -> Callable[[Path], Any]:
    """Return a mistake: an environment that no launcher sets; `initialize` reads it with this function."""
    return lambda _: zcomm.detect(environ)


NOT_FOUND, TEXT = zckpt.CheckpointNotFound, "initialize() needs model=, a torch.nn.Module"
STEP = "engine.backward(loss); engine.step()"
WORLD = "torchrun --nproc-per-node"

# inputs that the module rejects: torch's texts on the CPU; on CUDA some of them end the process
BATCHES = {
    "float labels": Mistake(
        call(X, LABELS.float()), RuntimeError, "argument 1 float32 (2,)", "int64 indices", "labels.long()"
    ),
    "int32 labels": Mistake(call(X, LABELS.int()), RuntimeError, "argument 1 int32", "int64", "labels.long()"),
    "int64 features": Mistake(
        call(X.long(), LABELS), RuntimeError, "argument 0 int64", "weights are float32", "x.to("
    ),
    "float64 features": Mistake(call(X.double()), RuntimeError, "argument 0 float64", "weights are float32", "x.to("),
    "too many features": Mistake(
        call(torch.ones(2, 5, device=DEVICE)), RuntimeError, "(2, 5)", "3x4", "Compare the shapes"
    ),
    "a label out of range": Mistake(
        call(X, torch.tensor([0, 7], device=DEVICE)), IndexError, "Target 7", "number of classes", "count from 0"
    ),
    "a list as input": Mistake(
        call([1, 2, 3]), TypeError, "argument 0 (list)", "must be Tensor", "torch.as_tensor(x)"
    ),
}

MISTAKES = {
    **BATCHES,
    # -- the loop
    "step without forward": Mistake(without_backward, CallOrderError, "phase IDLE", "legal here: forward()", STEP),
    "step without backward": Mistake(
        step_after_forward, CallOrderError, "phase FORWARD", "legal here: forward()", STEP
    ),
    "step twice": Mistake(step_twice, CallOrderError, "step 1)", "legal here: forward(), backward()", STEP),
    "backward twice": Mistake(
        backward_twice, RuntimeError, "a second time", "once per loss = engine(...)", "compute it again"
    ),
    "step inside no_sync": Mistake(
        step_in_no_sync, CallOrderError, "inside no_sync", "not reduced", "Leave no_sync()"
    ),
    "forward after close": Mistake(
        after_close, CallOrderError, "CLOSED", "legal here: nothing", "zengine.initialize()"
    ),
    "step without optimizer": Mistake(without_optimizer, ValueError, "has none", "needs an optimizer", "optimizer="),
    "plain and engine backward": Mistake(
        mixed_backwards, CallOrderError, "plain loss.backward()", "gradient_accumulation_steps = 2", "zero_grad()"
    ),
    "loss.item()": Mistake(backward(lambda loss: loss.item()), TypeError, "float", "loss tensor", "not loss.item()"),
    "a dict as loss": Mistake(backward(lambda loss: {"loss": loss}), TypeError, "dict", "loss tensor", "output.loss"),
    "a tuple as loss": Mistake(backward(lambda loss: (loss, 1)), TypeError, "tuple", "loss tensor", "outputs[0]"),
    "a detached loss": Mistake(
        backward(lambda loss: loss.detach()),
        ValueError,
        "detached",
        "without a graph",
        "Pass the loss of engine(...)",
    ),
    "a loss under no_grad": Mistake(
        loss_under_no_grad, ValueError, "torch.no_grad()", "without a graph", "Pass the loss of engine(...)"
    ),
    "a loss of each sample": Mistake(
        backward(lambda loss: loss.expand(2)), ValueError, "shape (2,)", "scalar loss", "loss.mean()"
    ),
    "a loss of another module": Mistake(
        backward(lambda _: Net().to(DEVICE)(X, LABELS)),
        ValueError,
        "another module",
        "this engine",
        "output of engine(...)",
    ),
    # -- arguments of initialize
    "a class as model": Mistake(option(model=Net), TypeError, "the class Net", TEXT, "model=Net(...)"),
    "a name as model": Mistake(option(model="gpt2"), TypeError, "'gpt2'", TEXT, "load the model first"),
    "parameters as model": Mistake(option(model=[1]), TypeError, "list", TEXT, "pass the module itself"),
    "no model": Mistake(
        lambda _: zengine.initialize(config={}), TypeError, "got NoneType", TEXT, "pass the module itself"
    ),
    "no config": Mistake(
        lambda _: zengine.initialize(model=Net()), ConfigError, "no config", "a path, a dict or JSON", "Pass config="
    ),
    "a list as config": Mistake(
        lambda _: zengine.initialize(model=Net(), config=[1]),
        TypeError,
        "[1] (list)",
        "JSON file, a dict",
        "give a path",
    ),
    "two configs": Mistake(
        option(config_params={}), ConfigError, "config_params= is {}", "given 2 times", "Keep one of them"
    ),
    "config file with a syntax error": Mistake(invalid_json, ConfigError, "ds.json", 'expected ","', 'found "bf16"'),
    "a name as optimizer": Mistake(
        option(optimizer="AdamW"), TypeError, "'AdamW'", "torch.optim.Optimizer, or a function", "leave it out"
    ),
    "an optimizer of another model": Mistake(
        lambda _: make(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)),
        ValueError,
        "shape (4, 3)",
        "not a parameter of the module",
        "this module's parameters()",
    ),
    "an optimizer function that returns None": Mistake(
        option(optimizer=lambda _: None), TypeError, "a NoneType", "torch.optim.Optimizer", "must return"
    ),
    "a name as schedule": Mistake(
        option(lr_scheduler="cosine"), TypeError, "'cosine'", "a function optimizer -> schedule", '"scheduler": {'
    ),
    "names as model_parameters": Mistake(
        option(model_parameters=["body.weight"]),
        TypeError,
        "'body.weight' (str)",
        "tensors",
        "Pass model.parameters()",
    ),
    "a group without params": Mistake(
        option(model_parameters=[{"lr": 1}]), TypeError, "{'lr': 1}", '{"params": [...]', "Pass model.parameters()"
    ),
    "a generator read before": Mistake(
        read_generator, ValueError, "model_parameters= is empty", "nothing to train", "make it anew"
    ),
    "no parameters": Mistake(
        option(model=nn.Identity()), ValueError, "Identity", "nothing to train", "Give the param"
    ),
    "a number as dataset": Mistake(
        option(training_data=5), TypeError, "got int", "a torch Dataset or a sequence", "Pass the dataset itself"
    ),
    "a DataLoader as dataset": Mistake(
        option(training_data=torch.utils.data.DataLoader([1, 2])),
        TypeError,
        "DataLoader",
        "Dataset",
        "dataset itself",
    ),
    "an empty dataset": Mistake(option(training_data=[]), ValueError, "0 samples", "micro_batch_size 2", "more data"),
    "a module in a second engine": Mistake(
        second_engine, ValueError, "body.weight", "partitioned already", "close()"
    ),
    # -- the config
    "a misspelt key": Mistake(
        config(gradient_clippin=1),
        ConfigError,
        "gradient_clippin = 1",
        "unknown key",
        'Did you mean "gradient_clipping"',
    ),
    "no batch size": Mistake(
        config(train_micro_batch_size_per_gpu=None), ConfigError, "neither", "train_batch_size", "Add one of them"
    ),
    "batch sizes that contradict": Mistake(
        config(train_batch_size=7),
        ConfigError,
        "7 = micro 2",
        "does not hold",
        "Nearest valid train_batch_size: 6 or 8",
    ),
    "a batch size of 0": Mistake(config(train_batch_size=0), ConfigError, "train_batch_size = 0", ">= 1", "must be"),
    "stage 4": Mistake(config(zero_optimization={"stage": 4}), ConfigError, "stage = 4", "0, 1, 2 or 3", "must be"),
    "a number as section": Mistake(config(zero_optimization=3), ConfigError, "= 3", "an object {...}", "needs"),
    "true as section": Mistake(config(fp16=True), ConfigError, "fp16 = true", "an object", 'Write {"enabled": true}'),
    "fp16 and bf16": Mistake(
        config(fp16={"enabled": True}, bf16={"enabled": True}),
        ConfigError,
        "fp16.enabled",
        "bf16.enabled",
        "Keep one",
    ),
    "an unknown optimizer": Mistake(
        config(optimizer={"type": "AdmW"}), ConfigError, "'AdmW'", "Allowed: Adam, AdamW", "Did you mean 'AdamW'"
    ),
    "an unknown option": Mistake(
        config(optimizer={"type": "AdamW", "params": {"lrr": 1}}), ConfigError, "'lrr'", "It takes: lr", "mean 'lr'"
    ),
    "a text as optimizer": Mistake(
        config(optimizer="AdamW"), ConfigError, 'optimizer = "AdamW"', "an object", 'Write {"type": "AdamW"}'
    ),
    "an unknown schedule": Mistake(
        config(scheduler={"type": "Cosine"}), ConfigError, "'Cosine'", "Allowed: WarmupLR", "mean 'WarmupCosineLR'"
    ),
    "nvme without a folder": Mistake(
        config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}),
        ConfigError,
        'device = "nvme"',
        "needs a folder",
        'Add "nvme_path"',
    ),
    # -- checkpoints
    "load of an absent folder": Mistake(
        lambda path: make().load_checkpoint(str(path / "none")),
        NOT_FOUND,
        "none",
        "does not exist",
        "pass the folder",
    ),
    "load of an empty folder": Mistake(
        lambda path: make().load_checkpoint(str(path)), NOT_FOUND, "holds no", "latest is missing", "Pass the folder"
    ),
    "load of None": Mistake(
        lambda _: make().load_checkpoint(None), TypeError, "load_dir=None", "the folder", "give the folder"
    ),
    "load of a .pt file": Mistake(load_pt_file, NOT_FOUND, "model.pt", "takes the folder", "engine.load_weights("),
    "load of a tag's folder": Mistake(
        load_tag_folder, NOT_FOUND, "global_step0", "it is a checkpoint itself", "tag='global_step0')"
    ),
    "load of an absent tag": Mistake(
        load_other_tag, NOT_FOUND, "'global_step7'", "Newest complete checkpoint", "load it with tag='global_step0'"
    ),
    "load into another model": Mistake(
        load_other_model, zckpt.CheckpointMismatch, "head.bias", "2 tensors are missing", "load_module_strict=False"
    ),
    "load of absent weights": Mistake(
        lambda path: make().load_weights(str(path / "w")), NOT_FOUND, "does not exist", ".safetensors", "or a folder"
    ),
    "save into a file": Mistake(
        save_into_file, zckpt.CheckpointError, "file/.lock", "is a file", "give a path to a folder"
    ),
    "save into nothing": Mistake(
        lambda _: make().save_checkpoint(""), ValueError, "save_dir=''", "the folder that holds", "give the folder"
    ),
    "save of a module": Mistake(
        lambda path: make().save_checkpoint(str(path), client_state={"model": Net()}),
        TypeError,
        "client_state.model is a Net",
        "a checkpoint holds numbers",
        "not supported",
    ),
    "save of a list": Mistake(
        lambda path: make().save_checkpoint(str(path), "tag", [1]), TypeError, "got list", "takes a dict", "pass {"
    ),
    # -- the environment
    "WORLD_SIZE alone": Mistake(detect(WORLD_SIZE="2"), ValueError, "(set: WORLD_SIZE)", "RANK is missing", WORLD),
    "RANK alone": Mistake(detect(RANK="0"), ValueError, "(set: RANK)", "WORLD_SIZE is missing", WORLD),
    "no address": Mistake(
        detect(RANK="0", WORLD_SIZE="2"), ValueError, "(set: RANK, WORLD_SIZE)", "MASTER_ADDR is missing", WORLD
    ),
    "a text as WORLD_SIZE": Mistake(
        detect(RANK="0", WORLD_SIZE="two"), ValueError, "WORLD_SIZE='two'", "a whole number", WORLD
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str, tmp_path: Path) -> None:
    if name in BATCHES and DEVICE == "cuda":
        pytest.skip("torch checks inputs on the CPU only")
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.make(tmp_path)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for part in (mistake.given, mistake.allowed, mistake.remedy):
        assert part in message, f"{name}: {part!r} is not in:\n{message}"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs two devices")
def test_a_batch_on_the_host_is_explained() -> None:
    with pytest.raises(RuntimeError) as caught:
        make()(X.cpu())
    (note,) = caught.value.__notes__
    assert re.search(r"float32 \(2, 3\) on cpu; .*on cuda:0. Move the batch .*batch.to\(engine.device\)", note)


def test_a_frozen_model_with_an_optimizer_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    make(Net().requires_grad_(False))
    assert re.search(
        r"all 4 parameters of Net are frozen.*an optimizer is given.*requires_grad_\(True\)", caplog.text
    )


def test_a_trained_model_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.body.requires_grad_(False)
    make(net)
    assert "frozen" not in caplog.text


def test_an_error_that_does_not_come_from_inputs_gets_no_note() -> None:
    class Broken(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            raise RuntimeError("the user's own text")

    with pytest.raises(RuntimeError, match="the user's own text") as caught:
        make(Broken())(X)
    assert not getattr(caught.value, "__notes__", ())


def test_a_group_with_a_generator_is_trained() -> None:
    net = Net()
    engine = make(net, model_parameters=[{"params": net.parameters()}])
    before = net.body.weight.detach().clone()
    engine.backward(engine(X, LABELS))
    engine.step()
    assert not torch.equal(before, net.body.weight)
