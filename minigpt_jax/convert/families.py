"""The families of tied models that can be read and written: for each, its names, its layouts and its options.

`config.json` is read strictly: an option that this package's model lacks is refused by name, never approximated.
"""

import dataclasses
import re
from typing import Any

from ..config import ModelConfig
from ..errors import InputError, nearest, require
from .layouts import SAME, THREE_COLUMNS, THREE_IN_EACH_HEAD, TRANSPOSED, Layout

# Rows of (their name, our paths, layout). {i} is the block's number. A row whose leaves the config lacks is left out.
Table = tuple[tuple[str, tuple[str, ...], Layout], ...]

BLOCK = "block_{i}/"


def _dense(theirs: str, ours: str, layout: Layout) -> Table:
    return (
        (f"{theirs}.weight", (f"{BLOCK}{ours}/kernel",), layout),
        (f"{theirs}.bias", (f"{BLOCK}{ours}/bias",), SAME),
    )


def _fused(theirs: str, layout: Layout) -> Table:
    names = [f"{BLOCK}attention/{name}" for name in ("query", "key", "value")]
    return (
        (f"{theirs}.weight", tuple(f"{name}/kernel" for name in names), layout),
        (f"{theirs}.bias", tuple(f"{name}/bias" for name in names), layout),
    )


def _norm(theirs: str, ours: str) -> Table:
    return (f"{theirs}.weight", (f"{ours}/scale",), SAME), (f"{theirs}.bias", (f"{ours}/bias",), SAME)


_GPT2 = (
    ("transformer.wte.weight", ("embed/embedding",), SAME),
    ("lm_head.weight", ("head/embedding_out",), SAME),
    ("transformer.wpe.weight", ("positions/table",), SAME),
    *_norm("transformer.h.{i}.ln_1", f"{BLOCK}norm_attention"),
    *_fused("transformer.h.{i}.attn.c_attn", THREE_COLUMNS),
    *_dense("transformer.h.{i}.attn.c_proj", "attention/out", SAME),
    *_norm("transformer.h.{i}.ln_2", f"{BLOCK}norm_ffn"),
    *_dense("transformer.h.{i}.mlp.c_fc", "ffn/up", SAME),
    *_dense("transformer.h.{i}.mlp.c_proj", "ffn/down", SAME),
    *_norm("transformer.ln_f", "norm_final"),
)
_LLAMA = (
    ("model.embed_tokens.weight", ("embed/embedding",), SAME),
    ("lm_head.weight", ("head/embedding_out",), SAME),
    *_norm("model.layers.{i}.input_layernorm", f"{BLOCK}norm_attention"),
    *_dense("model.layers.{i}.self_attn.q_proj", "attention/query", TRANSPOSED),
    *_dense("model.layers.{i}.self_attn.k_proj", "attention/key", TRANSPOSED),
    *_dense("model.layers.{i}.self_attn.v_proj", "attention/value", TRANSPOSED),
    *_dense("model.layers.{i}.self_attn.o_proj", "attention/out", TRANSPOSED),
    *_norm("model.layers.{i}.self_attn.q_norm", f"{BLOCK}attention/norm_query"),
    *_norm("model.layers.{i}.self_attn.k_norm", f"{BLOCK}attention/norm_key"),
    *_norm("model.layers.{i}.post_attention_layernorm", f"{BLOCK}norm_ffn"),
    *_dense("model.layers.{i}.mlp.gate_proj", "ffn/gate", TRANSPOSED),
    *_dense("model.layers.{i}.mlp.up_proj", "ffn/up", TRANSPOSED),
    *_dense("model.layers.{i}.mlp.down_proj", "ffn/down", TRANSPOSED),
    *_norm("model.norm", "norm_final"),
)
_NEOX = (
    ("gpt_neox.embed_in.weight", ("embed/embedding",), SAME),
    ("embed_out.weight", ("head/embedding_out",), SAME),
    *_norm("gpt_neox.layers.{i}.input_layernorm", f"{BLOCK}norm_attention"),
    *_fused("gpt_neox.layers.{i}.attention.query_key_value", THREE_IN_EACH_HEAD),
    *_dense("gpt_neox.layers.{i}.attention.dense", "attention/out", TRANSPOSED),
    *_norm("gpt_neox.layers.{i}.post_attention_layernorm", f"{BLOCK}norm_ffn"),
    *_dense("gpt_neox.layers.{i}.mlp.dense_h_to_4h", "ffn/up", TRANSPOSED),
    *_dense("gpt_neox.layers.{i}.mlp.dense_4h_to_h", "ffn/down", TRANSPOSED),
    *_norm("gpt_neox.final_layer_norm", "norm_final"),
)
# Buffers that old files carry along: masks and rotary frequencies, which follow from the config.
BUFFERS = re.compile(r"(.*\.)?((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)")

# Keys of config.json that change nothing that the model computes, but for training.
_HARMLESS = re.compile(
    r"_.*|.*_token_id|.*dropout|.*_pdrop|summary_.*|transformers.*|output_.*|architectures|do_sample|dtype"
    r"|gradient_checkpointing|id2label|initializer_range|is_decoder|is_llama_config|label2id|max_window_layers|model_type"
    r"|n_ctx|predict_special_tokens|pretraining_tp|problem_type|reorder_and_upcast_attn|return_dict|task_specific_params"
    r"|torch_dtype|use_cache"
)
# Fields of ours that a checkpoint does not hold: how the model was drawn and trained, and the types of computation.
_NOT_HELD = ("init_std", "kernel_init", "residual_init_scale", "dropout", "dtype", "param_dtype", "bf16_dots", "remat")
# Rotary scaling: the kind's keys and our fields.
_LINEAR = {"factor": "rope_factor"}
_LLAMA3 = _LINEAR | {
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}
_SCALINGS = {"default": {}, "linear": _LINEAR, "llama3": _LLAMA3}
_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face's `config.json`."""

    model_type: str
    architecture: str
    table: Table
    fields: dict[str, tuple[str, Any]]
    """Their key: our field, and what `transformers` takes where the key is absent."""
    activations: dict[str, str]
    """Their activation to our `ffn`."""
    ours: dict[str, Any]
    """Fields of ours that the family fixes."""
    activation_key: str = "hidden_act"
    only: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys that may have this one value."""
    ignored: tuple[str, ...] = ()
    """Keys without effect, given the values of `only`."""
    tied: bool = False
    """`tie_word_embeddings` where config.json does not say."""

    @property
    def prefix(self) -> str:
        """What begins all names but the head's; some files leave it out."""
        return self.table_name.split(".")[0] + "."

    @property
    def table_name(self) -> str:
        return self.table[0][0]

    @property
    def head_name(self) -> str:
        return self.table[1][0]

    def rows(self, config: ModelConfig, paths) -> Table:
        """Their names, our paths and the layouts of all that a model with the leaves `paths` consists of."""
        rows = []
        for name, ours, layout in self.table:
            for i in range(config.n_layers) if "{i}" in name else [0]:
                leaves = tuple(path.format(i=i) for path in ours)
                if leaves[0] in paths:
                    rows.append((name.format(i=i), leaves, layout))
        return tuple(rows)

    def model_config(self, tree: dict, where: str) -> ModelConfig:
        """The config of a `config.json`. The types are the defaults: the weights' own are in their file."""
        for key in ("rope_parameters", "rope_scaling"):
            value = tree.get(key)
            require(
                value is None or isinstance(value, dict), f"{where}: {key} is {value!r}; it must map names to values"
            )
        left = _flat_rope({key: value for key, value in tree.items() if value is not None}, self.fields)
        values = dict(self.ours)
        for key, (field, default) in self.fields.items():
            values[field] = left.pop(key, default)
            require(values[field] is not _REQUIRED, f"{where} has no {key!r}")
        activation = left.pop(self.activation_key, next(iter(self.activations)))
        _check_value(where, self.activation_key, activation, self.activations)
        values |= {"ffn": self.activations[activation], "tied": left.pop("tie_word_embeddings", self.tied)}
        if values["positions"] == "rope":
            values |= _scaling(left.pop("rope_scaling", {}), where)
        for key, allowed in self.only.items():
            _check_value(where, key, left.pop(key, allowed), [allowed])
        windowed = sorted(set(left.pop("layer_types", ())) - {"full_attention"})
        require(not windowed, f"{where}: layer_types has {', '.join(windowed)}; this model has full_attention only")
        unknown = [key for key in left if key not in self.ignored and not _HARMLESS.fullmatch(key)]
        require(
            not unknown,
            f"{where} has options that this model lacks or does not know: "
            f"{', '.join(f'{key} = {left[key]!r}' for key in unknown[:5])}; take out what changes no computation",
        )
        try:
            return _plain(ModelConfig(**values))
        except InputError as error:
            raise type(error)(f"{where}: {error}") from None

    def config_tree(self, config: ModelConfig) -> dict:
        """`config.json` of this config."""
        full = _explicit(config)
        tree = {"model_type": self.model_type, "architectures": [self.architecture]}
        tree |= {key: getattr(full, field) for key, (field, _) in self.fields.items()}
        activation = [name for name, ffn in self.activations.items() if ffn == config.ffn]
        tree[self.activation_key] = (activation or list(self.activations))[0]
        kind = "llama3" if config.rope_original_len else "linear" if config.rope_factor != 1 else "default"
        if kind != "default":
            tree["rope_scaling"] = {"rope_type": kind}
            tree["rope_scaling"] |= {key: getattr(config, field) for key, field in _SCALINGS[kind].items()}
        return tree | {"tie_word_embeddings": config.tied, "initializer_range": config.init_std}

    def misfits(self, config: ModelConfig) -> list[str]:
        """The options of `config` that this family can't express: those that `config_tree` does not bring back."""
        try:
            back = _explicit(self.model_config(self.config_tree(config), "config.json"))
        except InputError as error:
            return [str(error)]
        names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in _NOT_HELD]
        full = _explicit(config)
        return [f"{name} = {getattr(full, name)!r}" for name in names if getattr(full, name) != getattr(back, name)]


def _check_value(where: str, key: str, value, allowed) -> None:
    require(value in allowed, f"{where}: {key} is {value!r}; this model has {' or '.join(map(repr, allowed))} only")


def _explicit(config: ModelConfig) -> ModelConfig:
    """The same model, with what follows from other fields written out."""
    return dataclasses.replace(
        config, d_head=config.head_dim, n_kv_heads=config.kv_heads, d_ff=config.ffn_dim, out_bias=config.has_out_bias
    )


def _plain(config: ModelConfig) -> ModelConfig:
    """The same model, with what follows from other fields left out."""
    full, plain = _explicit(config), config
    for name in ("d_head", "n_kv_heads", "d_ff", "out_bias"):
        try:
            without = dataclasses.replace(plain, **{name: None})
        except InputError:  # a width of heads that does not divide d_model
            continue
        plain = without if _explicit(without) == full else plain
    return plain


def _flat_rope(tree: dict, fields: dict) -> dict:
    """transformers 5 keeps rotary options in `rope_parameters`, 4 keeps the base and the share beside `rope_scaling`;
    GPT-NeoX has names of its own for those two. The result is as in 4."""
    scaling = tree.pop("rope_parameters", {}) | tree.pop("rope_scaling", {})
    scaling = {key: value for key, value in scaling.items() if value is not None}
    for key, old in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        value = scaling.pop(key, tree.pop(key, None))
        if value is not None and (key, value) != ("partial_rotary_factor", 1):
            tree[old if old in fields else key] = value
    return tree | ({"rope_scaling": scaling} if scaling else {})


def _scaling(scaling: dict, where: str) -> dict:
    """Our fields of a `rope_scaling`."""
    left = dict(scaling)
    kind = left.pop("rope_type", left.pop("type", "default"))
    left.pop("type", None)
    _check_value(where, "rope_type", kind, _SCALINGS)
    values = {}
    for key, field in _SCALINGS[kind].items():
        require(key in left, f"{where}: rope_scaling of type {kind!r} has no {key!r}")
        values[field] = left.pop(key)
    require(not left, f"{where}: rope_scaling of type {kind!r} has {', '.join(left)}, which this model lacks")
    return values


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    table=_GPT2,
    fields={
        "vocab_size": ("vocab_size", _REQUIRED),
        "n_embd": ("d_model", _REQUIRED),
        "n_layer": ("n_layers", _REQUIRED),
        "n_head": ("n_heads", _REQUIRED),
        "n_inner": ("d_ff", None),
        "n_positions": ("context_len", 1024),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
    },
    activation_key="activation_function",
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"},
    ours={"positions": "learned", "attention_bias": True, "kernel_init": "fixed"},
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    tied=True,
)
_LLAMA_FIELDS = {
    "vocab_size": ("vocab_size", _REQUIRED),
    "hidden_size": ("d_model", _REQUIRED),
    "num_hidden_layers": ("n_layers", _REQUIRED),
    "num_attention_heads": ("n_heads", _REQUIRED),
    "num_key_value_heads": ("n_kv_heads", None),
    "intermediate_size": ("d_ff", _REQUIRED),
    "max_position_embeddings": ("context_len", _REQUIRED),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "rope_theta": ("rope_base", 10000.0),
}
_LLAMA_OURS = {"norm": "rmsnorm", "positions": "rope", "rope_pairs": "half", "ffn_bias": False}
LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    table=_LLAMA,
    fields=_LLAMA_FIELDS
    | {
        "head_dim": ("d_head", None),
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("ffn_bias", False),
    },
    activations={"silu": "swiglu"},
    ours=_LLAMA_OURS,
    only={"rope_interleaved": False},
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    table=_LLAMA,
    fields=_LLAMA_FIELDS,
    activations={"silu": "swiglu"},
    ours=_LLAMA_OURS | {"attention_bias": True, "out_bias": False},
    only={"use_sliding_window": False, "use_mrope": False},
    ignored=("sliding_window",),
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    table=_LLAMA,
    fields=_LLAMA_FIELDS | {"head_dim": ("d_head", 128), "attention_bias": ("attention_bias", False)},
    activations={"silu": "swiglu"},
    ours=_LLAMA_OURS | {"qk_norm": True},
    only={"use_sliding_window": False, "use_mrope": False},
    ignored=("sliding_window",),
)
GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    table=_LLAMA,
    fields=_LLAMA_FIELDS | {"head_dim": ("d_head", 256), "attention_bias": ("attention_bias", False)},
    # The first files say gelu and mean the tanh form, as transformers takes it.
    activations={"gelu_pytorch_tanh": "geglu", "gelu": "geglu"},
    ours=_LLAMA_OURS | {"norm_unit_offset": True, "scale_embedding": True},
    only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    tied=True,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    table=_NEOX,
    fields={
        "vocab_size": ("vocab_size", _REQUIRED),
        "hidden_size": ("d_model", _REQUIRED),
        "num_hidden_layers": ("n_layers", _REQUIRED),
        "num_attention_heads": ("n_heads", _REQUIRED),
        "intermediate_size": ("d_ff", _REQUIRED),
        "max_position_embeddings": ("context_len", 2048),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "rotary_emb_base": ("rope_base", 10000.0),
        "rotary_pct": ("rope_fraction", 0.25),
        "use_parallel_residual": ("parallel_residual", True),
        "attention_bias": ("attention_bias", True),
    },
    activations={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    ours={"positions": "rope", "rope_pairs": "half"},
)
# In the order in which an export looks for one that fits.
FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, QWEN3, GEMMA, GPT_NEOX)}


def family_of(tree: dict, where: str) -> Family:
    """The family that a `config.json` names."""
    kind = tree.get("model_type")
    require(kind in FAMILIES, f"{where}: model_type is {kind!r}; this package reads {', '.join(FAMILIES)}{_kin(kind)}")
    return FAMILIES[kind]


def _kin(kind) -> str:
    """A word on the near relatives that look alike and are not."""
    if kind in ("gemma2", "gemma3", "gemma3_text"):
        return " (Gemma 2 and 3 have more norms, capped logits and windows, which this model lacks)"
    return nearest(str(kind), FAMILIES)


def family_that_fits(config: ModelConfig) -> Family:
    """The first family that can express `config`."""
    misfits = {name: family.misfits(config) for name, family in FAMILIES.items()}
    fitting = [name for name, wrong in misfits.items() if not wrong]
    nearest_one = min(misfits, key=lambda name: len(misfits[name]))
    require(
        bool(fitting),
        f"no family of transformers has this model's options: nearest is {nearest_one}, which lacks "
        f"{', '.join(misfits[nearest_one])}",
    )
    return FAMILIES[fitting[0]]
