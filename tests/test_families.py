"""config.json of released models, as they are published, and what is refused in them."""

import dataclasses
import json
from pathlib import Path

import pytest

import minigpt_jax as mg
from minigpt_jax.convert import pretrained_config
from minigpt_jax.convert.families import FAMILIES, family_that_fits

CONFIGS = Path(__file__).parent.parent / "configs"
COMMON = {"initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
LLAMA = COMMON | {"model_type": "llama", "attention_dropout": 0.0, "hidden_act": "silu", "pretraining_tp": 1}
SCALING = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA3 = LLAMA | {
    "attention_bias": False, "eos_token_id": [128001, 128008], "mlp_bias": False, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_scaling": SCALING, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 8192,
}  # fmt: skip
QWEN = COMMON | {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama2_7b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "tie_word_embeddings": False, "vocab_size": 32000, "_name_or_path": "x",
    },
    "smollm2_135m": LLAMA | {
        "attention_bias": False, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "llama3_2_1b": LLAMA3 | {"head_dim": 64, "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 16},
    "llama3_2_3b": LLAMA3 | {"head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 28},
    "qwen2_5_0_5b": QWEN | {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "sliding_window": 32768, "use_mrope": False,
    },
    "qwen3_0_6b": QWEN | {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024, "rope_scaling": None,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "sliding_window": None,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    },
    "gemma_2b": COMMON | {
        "model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
        "hidden_activation": None, "intermediate_size": 16384, "max_position_embeddings": 8192, "pad_token_id": 0,
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "pythia_160m": COMMON | {
        "model_type": "gpt_neox", "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
        "use_parallel_residual": True, "vocab_size": 50304,
    },
}  # fmt: skip
FOUND = ("dtype", "param_dtype", "init_std", "kernel_init")  # in the weights' file, or nowhere


def read(tmp_path, tree) -> mg.ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(tree))
    return pretrained_config(tmp_path)


def held(config: mg.ModelConfig) -> dict:
    full = dataclasses.asdict(config) | {
        "d_ff": config.ffn_dim,
        "d_head": config.head_dim,
        "n_kv_heads": config.kv_heads,
    }
    return {name: value for name, value in full.items() if name not in FOUND}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_shape_that_we_ship(tmp_path, name):
    config, shipped = read(tmp_path, PUBLISHED[name]), mg.load_config(CONFIGS / f"{name}.yaml").model
    assert held(config) == held(shipped)
    assert mg.param_table(config).total == mg.param_table(shipped).total


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_back(tmp_path, name):
    config = read(tmp_path, PUBLISHED[name])
    family = family_that_fits(config)
    assert family.model_type == PUBLISHED[name]["model_type"]
    assert held(read(tmp_path, family.config_tree(config))) == held(config)


def test_every_shape_that_we_ship_of_a_released_model_is_here():
    ours = {"minigpt", "minigpt_v512", "shakespeare", "finetune"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - ours == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_leaf_has_its_place(tmp_path, name):
    """Each leaf of the model is in one stored tensor, and no tensor is named twice."""
    config = read(tmp_path, PUBLISHED[name])
    leaves = mg.param_table(config).rows
    rows = family_that_fits(config).rows(config, {row.path for row in leaves})
    assert sorted(path for _, paths, _ in rows for path in paths) == sorted(row.path for row in leaves)
    assert len({name for name, _, _ in rows}) == len(rows)


@pytest.mark.parametrize(
    "name, key, field, value",
    [
        ("gpt2", "n_positions", "context_len", 1024),
        ("gpt2", "layer_norm_epsilon", "norm_eps", 1e-5),
        ("llama2_7b", "num_key_value_heads", "n_kv_heads", None),
        ("llama2_7b", "rms_norm_eps", "norm_eps", 1e-6),
        ("llama2_7b", "tie_word_embeddings", "tied", False),
        ("smollm2_135m", "rope_theta", "rope_base", 10000.0),
        ("qwen3_0_6b", "head_dim", "d_head", 128),
        ("gemma_2b", "head_dim", "head_dim", 256),
        ("gemma_2b", "tie_word_embeddings", "tied", True),
        ("pythia_160m", "rotary_pct", "rope_fraction", 0.25),
        ("pythia_160m", "use_parallel_residual", "parallel_residual", True),
        ("pythia_160m", "tie_word_embeddings", "tied", False),
    ],
)
def test_a_key_that_is_absent_means_what_transformers_takes(tmp_path, name, key, field, value):
    tree = {k: v for k, v in PUBLISHED[name].items() if k != key}
    assert getattr(read(tmp_path, tree), field) == value


def test_keys_of_transformers_5_mean_the_same(tmp_path):
    old = PUBLISHED["llama3_2_1b"]
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = SCALING | {"rope_theta": 500000.0}
    assert read(tmp_path, new) == read(tmp_path, old)
    old = PUBLISHED["pythia_160m"] | {"rotary_emb_base": 500, "rotary_pct": 0.5}
    new = {key: value for key, value in old.items() if not key.startswith("rotary")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}
    assert read(tmp_path, new) == read(tmp_path, old)
    assert (read(tmp_path, new).rope_base, read(tmp_path, new).rope_fraction) == (500, 0.5)


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("gpt2", {"model_type": "gemma2"}, "model_type is 'gemma2'; this package reads gpt2, llama"),
        ("gpt2", {"model_type": "gpt3"}, r"did you mean 'gpt2'\?"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'; this model has 'gelu_new' or"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"n_head": 7}, "d_model is 768; it must be a multiple of n_heads = 7"),
        ("gpt2", {"n_head": None}, "has no 'n_head'"),
        ("llama2_7b", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ("llama2_7b", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, "has no 'low_freq_factor'"),
        ("llama2_7b", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "has beta, which this model"),
        ("llama2_7b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama2_7b", {"logit_scale": 0.1}, "options that this model lacks or does not know: logit_scale = 0.1"),
        ("llama2_7b", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("llama2_7b", {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map"),
        ("llama2_7b", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama2_7b", {"hidden_size": "wide"}, "hidden_size|d_model"),
        ("qwen2_5_0_5b", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_0_6b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ("gemma_2b", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("pythia_160m", {"rotary_pct": 0.01}, "rope_fraction"),
    ],
)
def test_an_option_that_the_model_lacks_is_refused_by_name(tmp_path, name, change, words):
    with pytest.raises(mg.InputError, match=words) as caught:
        read(tmp_path, PUBLISHED[name] | change)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "option",
    [
        {"positions": "none"},
        {"rope_pairs": "interleaved", "positions": "rope"},
        {"qk_norm": True, "norm_unit_offset": True, "norm": "rmsnorm"},
        {"scale_embedding": True},
    ],
    ids=str,
)
def test_no_family_takes_what_it_would_not_compute(family, option):
    base = mg.ModelConfig(rope_pairs="half", ffn_bias=False)
    assert family.misfits(dataclasses.replace(base, **option))
