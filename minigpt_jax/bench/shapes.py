"""What is measured: the configs, and the batches and prompts that every contender gets. NumPy only."""

import dataclasses
import math
import time

import numpy as np

from ..config import Config, ModelConfig, TrainConfig

PROMPT_TOKENS = 16
# Batches of training calls after the first step, used in turn.
POOL = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    """A config of the benchmark."""

    about: str
    model: ModelConfig
    batch: int
    new_tokens: int = 0
    """Tokens to generate behind the prompt; 0: generation is not measured."""

    @property
    def decode_model(self) -> ModelConfig:
        """The model with room for prompt and new tokens."""
        length = max(self.model.context_len, PROMPT_TOKENS + self.new_tokens)
        return dataclasses.replace(self.model, context_len=length)


def gpt2_shaped(V: int, D: int, L: int, H: int, T: int) -> ModelConfig:
    """The one architecture that all contenders have: learned positions, tanh GELU, LayerNorm, every bias, tied.

    Weights start wider than one would train from (`ours.write_weights` doubles the kernels too): a weight in the wrong
    place then shows in the loss, and greedy text doesn't repeat one token.
    """
    return ModelConfig(
        vocab_size=V,
        d_model=D,
        n_layers=L,
        n_heads=H,
        context_len=T,
        ffn="gelu_tanh",
        positions="learned",
        attention_bias=True,
        init_std=1 / math.sqrt(D),
        residual_init_scale=False,
    )


SHAPES = {
    "S": Shape("the course's Mini-GPT, with learned positions", gpt2_shaped(64, 64, 2, 4, 32), 32, new_tokens=40),
    "C": Shape("nanoGPT's recipe for CPUs", gpt2_shaped(65, 128, 4, 4, 64), 12),
    "C2": Shape("nanoGPT's character model", gpt2_shaped(65, 384, 6, 6, 256), 16, new_tokens=240),
    "G": Shape("GPT-2 124M", gpt2_shaped(50257, 768, 12, 12, 256), 4, new_tokens=64),
    "G1k": Shape("GPT-2 124M at its own length", gpt2_shaped(50257, 768, 12, 12, 1024), 1),
}


def run_config(model: ModelConfig, batch: int) -> Config:
    """Model and optimizer of a training run: AdamW at a constant rate, decay of matrices and tables, clipping."""
    train = TrainConfig(
        batch_size=batch, steps=10**6, peak_lr=3e-4, floor_lr=3e-4, warmup_steps=0, beta1=0.9, beta2=0.95,
        adam_eps=1e-8, weight_decay=0.1, decay_embedding=True, clip_norm=1.0,
    )  # fmt: skip
    return Config(model=model, train=train)


def batch_ids(model: ModelConfig, batch: int, step: int, n: int = 1) -> np.ndarray:
    """Random ids of n steps from `step` on, (n, B, T + 1); the same for every contender."""
    shape = (batch, model.context_len + 1)
    return np.stack([np.random.default_rng([7, i]).integers(0, model.vocab_size, shape) for i in range(step, step + n)])


def prompt_ids(model: ModelConfig) -> np.ndarray:
    return np.random.default_rng(11).integers(0, model.vocab_size, PROMPT_TOKENS)


def timed(work, least_seconds: float) -> list[float]:
    """Seconds of each call of `work`, which is called until they add up to `least_seconds`."""
    seconds = []
    while not seconds or sum(seconds) < least_seconds:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds
