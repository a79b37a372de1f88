"""Small random models of `transformers`, one for each family and variant that the converter reads. Needs torch."""

import contextlib
import copy
import json
import logging
from pathlib import Path

import safetensors.torch
import torch
import transformers

# Matrices this small are done before a second thread has woken up.
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

# Nothing is left at a default of ours or of theirs, so that a field that the converter overlooks shows. No padding
# token: torch gives its row of the table no gradient through the lookup.
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
# Of the 8 frequencies of 16 columns, 2 stay, 2 are divided by 8 only in part, and 4 wholly.
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT2 = {
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "layer_norm_epsilon": 1e-3,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-3,
    "rope_parameters": ROPE,
}
NEOX = {
    "vocab_size": 63,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 96,
    "layer_norm_eps": 1e-3,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.375},
}
# name: (class, config)
VARIANTS = {
    "gpt2": ("GPT2", {**GPT2, "tie_word_embeddings": True}),
    "gpt2-untied": (
        "GPT2",
        {**GPT2, "n_layer": 3, "n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "llama": ("Llama", {**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("Llama", {**LLAMA, "head_dim": 6, "tie_word_embeddings": True}),
    "llama-biases": (
        "Llama",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-llama3": (
        "Llama",
        {**LLAMA, "head_dim": 16, "rope_parameters": ROPE_LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2-untied": (
        "Qwen2",
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {**LLAMA, "head_dim": 12, "attention_bias": True, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoX", {**NEOX, "use_parallel_residual": True, "tie_word_embeddings": False}),
    "gpt_neox-sequential": (
        "GPTNeoX",
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
    ),
}

# With seed 0 the Gemma repeats three tokens for ever, and the tied Llama makes half as much again of rounding.
SEEDS = {"gemma": 2, "llama-tied": 2}


def config_of(variant: str, **changes):
    family, fields = VARIANTS[variant]
    return getattr(transformers, f"{family}Config")(**{**fields, **SPECIAL, **changes})


def empty_model(config, **options):
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options).eval()


def model_of(variant: str, **changes):
    return randomized(empty_model(config_of(variant, **changes)), seed=SEEDS.get(variant, 0))


def randomized(model, scale: float = 0.2, seed: int = 0):
    """Every weight random, biases and norm scales too: zeros and ones would hide a missing term."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith("weight") and ("norm" in name or "ln_" in name)
            start = parameter if is_scale else 0.0  # a norm's scale starts at 1, at 0 where the model adds the 1
            parameter.copy_(start + scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@contextlib.contextmanager
def float32_means_float64():
    """Norms, softmax and RoPE of `transformers` go to float32 whatever the model's type, which would be the end of a
    comparison in float64: inside, what it calls float32 is float64. The model must be made inside too."""
    before = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32 = torch.float = before[0]
        torch.Tensor.float = before[1]
        torch.set_default_dtype(before[0])


def double_of(model):
    """The same weights in a model that computes in float64 throughout; use it inside `float32_means_float64`."""
    config = type(model.config).from_dict({**model.config.to_dict(), "dtype": None})
    double = empty_model(config).double()
    double.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    return double.eval()


def save_with(folder: Path, model, values: dict) -> Path:
    """The model's checkpoint with `values` (by its parameters' names) in the place of its weights, as `transformers`
    writes it: GPT-NeoX's head, say, has one name in the model and another in the file."""
    other = copy.deepcopy(model).to(torch.float32)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[name])
    other.save_pretrained(folder)
    return folder


def save_tensors(folder: Path, model, values: dict) -> Path:
    """A checkpoint of the model's config with a file of just these names."""
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    tensors = {name: value.detach().clone().contiguous() for name, value in values.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, drop: tuple = (), **changes) -> None:
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    fields = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
    path.write_text(json.dumps({**fields, **changes}, indent=2))


@contextlib.contextmanager
def logged_warnings():
    """The warnings that `transformers` logs inside, as a list of messages."""
    messages = []

    class Collect(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Collect(logging.WARNING)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
