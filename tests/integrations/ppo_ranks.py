"""A PPO trainer with the habits of DeepSpeed-Chat's third step: four engines and an average of the actor.

Its code names DeepSpeed alone; what it does between the calls is as plain as PPO allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from zengine import deepspeed
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam
from zengine.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

PROMPT, ANSWER, PAD, GOOD = 4, 6, 0, 7  # tokens; GOOD is what is rewarded
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": PAD,
}


def train_config(stage: int, dtype: str, **hybrid: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": bool(hybrid),
            "max_out_tokens": 16,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
            **hybrid,
        },
    }


def eval_config(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {"stage": stage if stage == 3 else 0, "stage3_param_persistence_threshold": 0},
        **({} if dtype == "fp32" else {dtype: {"enabled": True}}),
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


class Scorer(nn.Module):
    """A value for each token, by a transformer without its head."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.rwtransformer, self.v_head = base.model, nn.Linear(SIZES["hidden_size"], 1, bias=False)

    def gradient_checkpointing_enable(self) -> None:
        self.rwtransformer.gradient_checkpointing_enable()

    def forward_value(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = False) -> Tensor:
        hidden = self.rwtransformer(input_ids, attention_mask=attention_mask, use_cache=use_cache)[0]
        return self.v_head(hidden).squeeze(-1)  # type: ignore[no-any-return]

    forward = forward_value


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, and vectors do not."""
    params = list(model.named_parameters())
    return [
        {"params": [p for n, p in params if "norm" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in params if "norm" in n], "weight_decay": 0.0},
    ]


def _trained(model: nn.Module, config: dict[str, Any], lr: float) -> Any:
    optimizer = DeepSpeedCPUAdam(_groups(model), lr=lr, betas=(0.9, 0.95))
    scheduler = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=100)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def _fixed(model: nn.Module, config: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def _to_fetch(params: list[nn.Parameter]) -> list[Any]:
    named: list[Any] = list(params)
    return [p for p in named if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def _log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class Engines:
    def __init__(self, stage: int, dtype: str, tp: int) -> None:
        actor = _model(0)
        actor.gradient_checkpointing_enable()
        self.stage, self.dtype = stage, dtype
        self.actor = _trained(actor, train_config(stage, dtype, enabled=True, inference_tp_size=tp), 5e-3)
        self.ref = _fixed(_model(0), eval_config(stage, dtype))
        self.actor_ema = _fixed(_model(0), eval_config(stage, dtype))
        critic = Scorer(_model(1))
        critic.gradient_checkpointing_enable()
        self.critic = _trained(critic, train_config(stage, dtype), 5e-3)
        self.reward = _fixed(Scorer(_model(1)), eval_config(stage, dtype))


class Trainer:
    def __init__(self, engines: Engines) -> None:
        self.actor_model, self.critic_model = engines.actor, engines.critic
        self.ref_model, self.reward_model = engines.ref, engines.reward
        self.z3_enabled = engines.stage == 3

    def _generate_sequence(self, prompts: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            seq: Tensor = self.actor_model.module.generate(
                prompts,
                attention_mask=mask,
                max_length=PROMPT + ANSWER,
                min_length=PROMPT + ANSWER,
                pad_token_id=PAD,
                synced_gpus=self.z3_enabled,
                do_sample=True,
            )
        assert seq.shape == (len(prompts), PROMPT + ANSWER)
        assert torch.equal(seq[:, :PROMPT], prompts)
        return seq

    def generate_experience(self, prompts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        self.eval()
        seq = self._generate_sequence(prompts, mask)
        self.train()
        mask = seq.not_equal(PAD).long()
        with torch.no_grad():
            output = self.actor_model(seq, attention_mask=mask)
            output_ref = self.ref_model(seq, attention_mask=mask)
            score = self.reward_model.forward_value(seq, mask)  # its weights are gathered, and its score is replaced
            values = self.critic_model.forward_value(seq, mask, use_cache=False).detach()[:, :-1]
        assert bool(score.isfinite().all())
        return {
            "input_ids": seq,
            "attention_mask": mask,
            "logprobs": _log_probs(output.logits[:, :-1], seq[:, 1:]),
            "ref_logprobs": _log_probs(output_ref.logits[:, :-1], seq[:, 1:]),
            "value": values.float(),
            "rewards": seq[:, PROMPT:].eq(GOOD).float().mean(1),
        }

    def train_rlhf(self, inputs: dict[str, Tensor]) -> tuple[float, float]:
        start, seq = PROMPT - 1, inputs["input_ids"]
        mask = inputs["attention_mask"][:, 1:][:, start:].float()
        old, ref = inputs["logprobs"], inputs["ref_logprobs"]
        advantages = (inputs["rewards"] - inputs["rewards"].mean())[:, None].expand_as(mask)
        advantages = advantages - 0.02 * (old - ref)[:, start:]
        batch = {"input_ids": seq, "attention_mask": inputs["attention_mask"]}
        logits = self.actor_model(**batch, use_cache=False).logits
        ratio = torch.exp((_log_probs(logits[:, :-1], seq[:, 1:]) - old)[:, start:] * mask)
        losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        actor_loss = (losses * mask).sum() / mask.sum()
        self.actor_model.backward(actor_loss)
        self.actor_model.step()
        value = self.critic_model.forward_value(**batch, use_cache=False)[:, :-1].float()
        errors = (value[:, start:] - inputs["rewards"][:, None]).square()
        critic_loss = 0.5 * (errors * mask).sum() / mask.sum()
        self.critic_model.backward(critic_loss)
        self.critic_model.step()
        return float(actor_loss.detach()), float(critic_loss.detach())

    def train(self) -> None:
        self.actor_model.train()
        self.critic_model.train()

    def eval(self) -> None:
        for each in (self.actor_model, self.critic_model, self.reward_model, self.ref_model):
            each.eval()


def moving_average(model: Any, model_ema: Any, beta: float, zero_stage: int) -> None:
    with torch.no_grad():
        for param, param_ema in zip(model.parameters(), model_ema.parameters()):
            fetched = _to_fetch([param, param_ema]) if zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
                param_ema.data.copy_(torch.lerp(param.data, param_ema.data, beta))


def whole_weights(model: Any, zero_stage: int) -> dict[str, Tensor]:
    """Weights of rank 0, one parameter at a time, as for a file in Hugging Face's format."""
    found = {}
    for name, param in model.named_parameters():
        fetched = _to_fetch([param]) if zero_stage == 3 else []
        with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
            if torch.distributed.get_rank() == 0:
                found[name] = param.data.cpu().clone()
    return found


def run(stage: int, dtype: str, tp: int, steps: int, folder: str) -> dict[str, Any]:
    """Train; return rewards and losses, and whether what is saved is what is trained."""
    engines = Engines(stage, dtype, tp)
    trainer, rank = Trainer(engines), torch.distributed.get_rank()
    assert get_accelerator().device_name() in ("cpu", "cuda")
    assert type(engines.actor).__name__ == "DeepSpeedHybridEngine"
    torch.manual_seed(100 + rank)
    rewards, losses = [], []
    for _ in range(steps):
        prompts = torch.randint(3, SIZES["vocab_size"], (4, PROMPT))
        experience = trainer.generate_experience(prompts, torch.ones_like(prompts))
        rewards.append(float(experience["rewards"].mean()))
        losses.append(trainer.train_rlhf(experience))
        moving_average(engines.actor, engines.actor_ema, 0.5, stage)
    actor, ema = (whole_weights(each.module, stage) for each in (engines.actor, engines.actor_ema))
    start = dict(_model(0).named_parameters())
    far = {}
    if rank == 0:
        torch.save(actor, Path(folder, "pytorch_model.bin"))
        with torch.no_grad():
            far = {
                name: float(sum((each[key].float() - start[key]).abs().sum() for key in start))
                for name, each in (("actor", actor), ("ema", ema))
            }
    ids = torch.arange(3, 13)[None]
    engines.actor.eval()
    with torch.no_grad():
        logits = engines.actor(ids).logits.float()
    for each in (engines.actor, engines.ref, engines.actor_ema, engines.critic, engines.reward):
        each.destroy()
    return {"rewards": rewards, "losses": losses, "far": far, "logits": logits}
