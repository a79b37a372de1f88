"""A small GPT in JAX whose tied embedding is a first-class object. See README.md for the three ways to use it.

Names are imported on first use, so that `import minigpt_jax` and `minigpt --help` do not wait for jax.
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "errors": "InputError InputTypeError",
    "config": "Config DataConfig ModelConfig Sampling TrainConfig load_config save_config",
    "model": "MiniGPT",
    "functional": "embed forward init readout trunk unembed",
    "losses": "cross_entropy_from_logits loss",
    "data": "Batch load_dataset",
    "tying": "assert_tied clip_head_gradient retie scale_lookup_gradient tie_gradients untie untied",
    "optimizer": "decay_mask learning_rate make_optimizer",
    "train": "TrainState evaluate init_state make_train_step state_of",
    "sampling": "filter_logits",
    "decoding": "generate stream",
    "inspect": "LensTable TiedGradient init_probes interface_consistency lens_points lens_table load_probes logit_lens "
    "neighbours norms_by_frequency param_table save_probes tied_gradient tied_stats token_table train_probes "
    "tree_report",
    "vocabulary": "resize_vocab",
    "convert": "load_gpt2 load_pretrained save_gpt2 save_pretrained",
    "checkpoint": "Run open_run",
}
# No name may be that of a module: importing the module would put it in the name's place.
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str):
    if name not in _HOME_OF:
        raise AttributeError(f"module 'minigpt_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
