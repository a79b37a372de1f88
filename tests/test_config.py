"""Configurations: every field's limits, one-line refusals, YAML there and back."""

import dataclasses
import math
import pickle
from pathlib import Path

import pytest

from minigpt_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    Sampling,
    TrainConfig,
    config_from_dict,
    load_config,
    save_config,
)
from minigpt_jax.errors import InputError, InputTypeError, nearest

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
CLASSES = (ModelConfig, DataConfig, TrainConfig, Sampling)


def refusal(make, *args, **kwargs) -> InputError:
    """The `InputError` that the call raises; its message must be one line."""
    with pytest.raises(InputError) as caught:
        make(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message and "\r" not in message
    return caught.value


def fields(cls, kind):
    """Names of the fields whose default has type `kind`."""
    return [field.name for field in dataclasses.fields(cls) if type(field.default) is kind]


# Types: each field is tried with values of every other type


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in CLASSES for name in fields(cls, int)])
@pytest.mark.parametrize("value", [1.0, "1", True, None, [1]], ids=repr)
def test_integer_fields_take_integers_only(cls, name, value):
    error = refusal(cls, **{name: value})
    assert isinstance(error, InputTypeError) and isinstance(error, TypeError) and isinstance(error, ValueError)
    assert f"{cls.__name__}.{name} is {value!r}" in str(error) and "int" in str(error)


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in CLASSES for name in fields(cls, float)])
@pytest.mark.parametrize("value", ["much", True, [1.0]], ids=repr)
def test_float_fields_take_numbers_only(cls, name, value):
    error = refusal(cls, **{name: value})
    assert isinstance(error, InputTypeError)
    assert f"{cls.__name__}.{name} is {value!r}" in str(error) and "give a number" in str(error)


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in CLASSES for name in fields(cls, float)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan", "-inf"], ids=repr)
def test_float_fields_refuse_what_is_not_finite(cls, name, value):
    assert "finite" in str(refusal(cls, **{name: value}))


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in CLASSES for name in fields(cls, bool)])
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_boolean_fields_take_booleans_only(cls, name, value):
    error = refusal(cls, **{name: value})
    assert isinstance(error, InputTypeError) and f"{cls.__name__}.{name} is {value!r}" in str(error)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *[(ModelConfig, name) for name in ("n_kv_heads", "d_ff", "d_head", "rope_original_len")],
        (DataConfig, "window"),
        *[(Sampling, name) for name in ("top_k", "top_p")],
    ],
)
def test_optional_numbers_take_nothing_else(cls, name):
    for value in ("much", True, [1]):
        assert isinstance(refusal(cls, **{name: value}), InputTypeError)


def test_an_optional_boolean_takes_nothing_else():
    assert [ModelConfig(out_bias=value).out_bias for value in (None, True, False)] == [None, True, False]
    for value in (0, 1, "true"):
        error = refusal(ModelConfig, out_bias=value)
        assert isinstance(error, InputTypeError) and f"ModelConfig.out_bias is {value!r}" in str(error)


def test_windows_are_no_longer_than_the_context():
    assert Config(ModelConfig(context_len=9)).window == 9
    assert Config(ModelConfig(context_len=9), DataConfig(window=4)).window == 4
    assert "window is 10; it must be at most model.context_len = 9" in str(
        refusal(Config, model=ModelConfig(context_len=9), data=DataConfig(window=10))
    )
    assert "window is 0; it must be at least 1" in str(refusal(DataConfig, window=0))


def test_path_takes_text_only():
    assert isinstance(refusal(DataConfig, corpus="text", path=3), InputTypeError)


def test_sections_take_their_own_class_only():
    assert isinstance(refusal(Config, model={"d_model": 8}), InputTypeError)


LITERALS = {
    (ModelConfig, "norm"): ("layernorm", "rmsnorm"),
    (ModelConfig, "ffn"): ("gelu", "gelu_tanh", "swiglu", "geglu"),
    (ModelConfig, "positions"): ("rope", "learned", "none"),
    (ModelConfig, "rope_pairs"): ("interleaved", "half"),
    (ModelConfig, "kernel_init"): ("fan_in", "fixed"),
    (ModelConfig, "dtype"): ("float32", "bfloat16", "float16", "float64"),
    (ModelConfig, "param_dtype"): ("float32", "bfloat16", "float16", "float64"),
    (DataConfig, "corpus"): ("shakespeare", "verbs", "verbs_en", "text"),
    (DataConfig, "tokenizer"): ("char", "byte", "bpe", "word", "pretrained"),
}


def test_every_field_is_covered_here():
    for cls in CLASSES:
        strings = set(fields(cls, str))
        assert strings == {name for owner, name in LITERALS if owner is cls}
        optional = {f.name for f in dataclasses.fields(cls) if "None" in str(f.type)}
        assert (
            optional
            == {
                ModelConfig: {"n_kv_heads", "d_ff", "d_head", "rope_original_len", "out_bias"},
                DataConfig: {"path", "window"},
                TrainConfig: {"clip_norm"},
                Sampling: {"top_k", "top_p", "min_p"},
            }[cls]
        )


@pytest.mark.parametrize(("cls", "name"), LITERALS)
def test_choices(cls, name):
    allowed = LITERALS[cls, name]
    if cls is ModelConfig:
        for value in allowed:
            assert getattr(cls(**{name: value}), name) == value
    for value in (allowed[0] + "x", allowed[0].upper(), "", None, 3, [allowed[0]]):
        message = str(refusal(cls, **{name: value}))
        assert f"{cls.__name__}.{name} is {value!r}" in message
        assert all(choice in message for choice in allowed)


def test_a_misspelt_choice_names_the_nearest():
    assert "(did you mean 'rmsnorm'?)" in str(refusal(ModelConfig, norm="rms_norm"))
    assert "(did you mean 'swiglu'?)" in str(refusal(ModelConfig, ffn="swigelu"))
    assert "did you mean" not in str(refusal(ModelConfig, ffn="relu6000000"))


# Ranges: (class, field, the values just inside, the values just outside)

AT_LEAST_1 = [(ModelConfig, name) for name in ("vocab_size", "context_len", "n_layers", "d_ff")]
AT_LEAST_1 += [
    (TrainConfig, name)
    for name in ("steps", "batch_size", "accumulate", "steps_per_call", "eval_windows", "keep_checkpoints")
]
AT_LEAST_0 = [
    (TrainConfig, name) for name in ("warmup_steps", "eval_every", "checkpoint_every", "sample_every", "inspect_every")
]
LIMITS = [
    *[(cls, name, [1, 10**6], [0, -1]) for cls, name in AT_LEAST_1 if name != "accumulate"],
    (TrainConfig, "accumulate", [1, 32], [0, -1]),
    *[(cls, name, [0, 1, 10**6], [-1]) for cls, name in AT_LEAST_0],
    (ModelConfig, "d_model", [8, 64], [0, -8]),
    (ModelConfig, "n_heads", [1, 32], [0, -4]),
    (ModelConfig, "n_kv_heads", [None, 1, 2, 4], [0, -1]),
    (ModelConfig, "norm_eps", [1e-12, 1], [0, -1e-5]),
    (ModelConfig, "d_head", [None, 2, 100], [0, -2]),
    (ModelConfig, "rope_fraction", [0.125, 0.5, 1], [0, -0.5, 1.001]),
    (ModelConfig, "rope_factor", [1, 1.5, 32], [0.999, 0, -2]),
    (ModelConfig, "rope_original_len", [None, 1, 8192], [0, -1]),
    (ModelConfig, "rope_low_freq_factor", [0.5, 1, 8], [0, -1]),
    (ModelConfig, "rope_high_freq_factor", [0.5, 1, 4], [0, -1]),
    (ModelConfig, "rope_base", [1.5, 1e6], [1, 0, -10000]),
    (ModelConfig, "init_std", [0, 0.02], [-0.02]),
    (ModelConfig, "dropout", [0, 0.999], [1, -0.1, 1.5]),
    (DataConfig, "val_fraction", [0, 0.999], [1, -0.1]),
    (DataConfig, "bpe_vocab", [256, 50257], [255, 0, -1]),
    (TrainConfig, "seed", [0, 2**32 - 1], [-1, 2**32]),
    (TrainConfig, "peak_lr", [1, 3e-5], [0, -1e-3]),
    (TrainConfig, "floor_lr", [0, 3e-4], [-1e-9, 3.1e-4]),
    (TrainConfig, "beta1", [0, 0.999], [1, -0.1]),
    (TrainConfig, "beta2", [0, 0.999], [1, -0.1]),
    (TrainConfig, "adam_eps", [1e-12], [0, -1e-8]),
    (TrainConfig, "weight_decay", [0, 10], [-0.1]),
    (TrainConfig, "lookup_gradient_scale", [0, 1, 10], [-0.1]),
    (TrainConfig, "clip_norm", [None, 1e-3, 100], [0, -1]),
    (Sampling, "temperature", [0, 1e-8, 100], [-1e-8, -1]),
    (Sampling, "top_k", [None, 1, 10**6], [0, -1]),
    (Sampling, "top_p", [None, 0, 1e-9, 1], [-1e-9, 1.0001, -1, 2]),
    (Sampling, "min_p", [None, 0, 1e-9, 1], [-1e-9, 1.0001, -1, 2]),
    (Sampling, "repetition_penalty", [1e-3, 1, 2], [0, -1]),
]


@pytest.mark.parametrize(("cls", "name", "inside", "outside"), LIMITS, ids=lambda x: getattr(x, "__name__", None))
def test_limits(cls, name, inside, outside):
    for value in inside:
        assert getattr(cls(**{name: value}), name) == value
    for value in outside:
        message = str(refusal(cls, **{name: value}))
        assert f"{cls.__name__}.{name} is {value}" in message.replace(".0;", ";")


def test_every_number_has_a_limit_here():
    covered = {(cls, name) for cls, name, _, _ in LIMITS}
    for cls in CLASSES:
        for field in dataclasses.fields(cls):
            optional = ("n_kv_heads", "d_ff", "d_head", "rope_original_len", "clip_norm", "top_k")
            if type(field.default) in (int, float) or field.name in optional:
                assert (cls, field.name) in covered


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (ModelConfig, {"d_model": 66}, "d_model is 66; it must be a multiple of n_heads = 4"),
        (ModelConfig, {"n_kv_heads": 3}, "n_kv_heads is 3; it must divide n_heads = 4"),
        (ModelConfig, {"n_kv_heads": 8}, "n_kv_heads is 8; it must divide n_heads = 4"),
        (ModelConfig, {"d_model": 12}, "3 of a head's 3 dimensions rotate"),
        (ModelConfig, {"d_model": 12}, "it must be even"),
        (ModelConfig, {"d_head": 7}, "7 of a head's 7 dimensions rotate"),
        (ModelConfig, {"rope_fraction": 0.2}, "3 of a head's 16 dimensions rotate"),  # int(3.2)
        (ModelConfig, {"rope_fraction": 0.06}, "0 of a head's 16 dimensions rotate"),
        (ModelConfig, {"rope_original_len": 8, "rope_high_freq_factor": 1}, "above rope_low_freq_factor = 1.0"),
        (ModelConfig, {"rope_original_len": 8, "rope_low_freq_factor": 5}, "rope_high_freq_factor is 4.0; it must be"),
        (ModelConfig, {"norm_unit_offset": True}, "norm_unit_offset goes with norm rmsnorm, not layernorm"),
        (TrainConfig, {"batch_size": 10, "accumulate": 4}, "batch_size is 10; it must be a multiple of accumulate = 4"),
        (TrainConfig, {"peak_lr": 1e-5}, "floor_lr"),
        (ModelConfig, {"bf16_dots": True, "dtype": "bfloat16"}, "bf16_dots goes with dtype float32, not bfloat16"),
        (ModelConfig, {"bf16_dots": True, "dtype": "float16"}, "bf16_dots goes with dtype float32, not float16"),
        (ModelConfig, {"bf16_dots": True, "dtype": "float64"}, "bf16_dots goes with dtype float32, not float64"),
        (DataConfig, {"corpus": "text"}, "path"),
        (DataConfig, {"path": "a.txt"}, "path"),
        (DataConfig, {"corpus": "verbs"}, "word"),
        (DataConfig, {"corpus": "verbs_en", "tokenizer": "byte"}, "word"),
        (DataConfig, {"tokenizer": "word"}, "word"),
    ],
)
def test_fields_that_must_agree(cls, options, words):
    assert words in str(refusal(cls, **options))


def test_an_odd_head_is_fine_without_rope():
    assert ModelConfig(d_model=12, positions="learned").head_dim == 3
    assert ModelConfig(rope_fraction=0.2, positions="none").rope_fraction == 0.2


def test_the_order_of_factors_matters_only_where_they_are_used():
    assert ModelConfig(rope_low_freq_factor=5.0).rope_original_len is None


def test_derived_sizes():
    config = ModelConfig(d_model=48, n_heads=6, n_kv_heads=2)
    assert (config.head_dim, config.kv_heads, config.ffn_dim) == (8, 2, 192)
    assert ModelConfig(d_ff=100).ffn_dim == 100 and ModelConfig().kv_heads == 4
    wide = ModelConfig(d_model=66, d_head=10, rope_fraction=0.45)  # 66 is no multiple of 4; int(4.5) dimensions rotate
    assert (wide.head_dim, wide.rope_dim, config.rope_dim) == (10, 4, 8)


def test_defaults_are_the_course_s():
    m, t = ModelConfig(), TrainConfig()
    assert (m.vocab_size, m.d_model, m.n_layers, m.n_heads, m.ffn_dim, m.context_len) == (64, 64, 2, 4, 256, 32)
    assert (m.norm, m.norm_eps, m.positions, m.rope_base, m.rope_pairs) == (
        "layernorm", 1e-5, "rope", 10000.0, "interleaved",
    )  # fmt: skip
    assert (m.attention_bias, m.ffn_bias, m.tied, m.init_std, m.bf16_dots) == (False, True, True, 0.02, False)
    assert (t.beta1, t.beta2, t.adam_eps, t.weight_decay) == (0.9, 0.95, 1e-8, 0.1)
    assert (t.peak_lr, t.floor_lr, t.clip_norm, t.decay_embedding) == (3e-4, 3e-5, 1.0, True)


# Frozen and hashable: a config is a static argument of jit


@pytest.mark.parametrize("cls", [*CLASSES, Config])
def test_frozen_hashable_and_equal_by_value(cls):
    a, b = cls(), cls()
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert pickle.loads(pickle.dumps(a)) == a
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(a, field.name, getattr(a, field.name))


def test_equal_numbers_of_other_types_are_one_config():
    # 1 and 1.0 hash alike, but a config that kept the int would be another static value for repr and YAML.
    a, b = ModelConfig(dropout=0, norm_eps="1e-5"), ModelConfig(dropout=0.0, norm_eps=1e-5)
    assert a == b and repr(a) == repr(b)
    assert type(a.dropout) is float


def test_replace_checks_again():
    refusal(dataclasses.replace, ModelConfig(), n_heads=5)


# YAML


def written(tmp_path, text, name="some.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_come_back_equal(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "again.yaml")
    assert load_config(tmp_path / "again.yaml") == config


def test_the_shipped_configs_are_all_here():
    names = {
        "gpt2",
        "llama2_7b",
        "minigpt",
        "minigpt_v512",
        "shakespeare",
        "smollm2_135m",
        "llama3_2_1b",
        "llama3_2_3b",
    }
    names |= {"qwen2_5_0_5b", "qwen3_0_6b", "gemma_2b", "pythia_160m"}
    assert names <= {path.stem for path in CONFIGS}
    assert load_config(next(path for path in CONFIGS if path.stem == "minigpt")).model == ModelConfig(d_ff=256)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            ModelConfig(
                vocab_size=97, d_model=36, n_heads=6, n_kv_heads=2, d_ff=50, tied=False, dropout=1e-7, bf16_dots=True
            ),
            DataConfig("text", "a folder/ä: #1 'x' \"y\".txt", "byte", 300, 0.0),
            TrainConfig(clip_norm=None, peak_lr=1e-20, floor_lr=0.0, weight_decay=0.1 + 0.2, seed=2**31),
        ),
        # Paths that YAML could take for another type
        *[Config(data=DataConfig("text", path)) for path in ("null", "1e3", "yes", "12", "~", "2001-01-01", "", " a ")],
    ],
)
def test_save_and_load(config, tmp_path):
    path = tmp_path / "c.yaml"
    save_config(config, path)
    assert load_config(path) == config
    text = path.read_bytes().decode("utf-8")
    for part in (config.model, config.data, config.train):
        for field in dataclasses.fields(part):
            assert f"  {field.name}:" in text  # every field, so that a run does not depend on later defaults


def test_exponents_without_a_point_are_numbers(tmp_path):
    # YAML 1.1 reads 1e-3 as a string.
    path = written(
        tmp_path, "train: {peak_lr: 1e-3, floor_lr: 1E-4, adam_eps: 1e-10, clip_norm: 5e-1}\nmodel: {norm_eps: 1e-6}"
    )
    config = load_config(path)
    assert (config.train.peak_lr, config.train.floor_lr, config.train.clip_norm) == (1e-3, 1e-4, 0.5)
    assert config.model.norm_eps == 1e-6 and type(config.train.peak_lr) is float


@pytest.mark.parametrize(
    "text", ["", "\n", "# nothing\n", "model:\n", "model: {}\ntrain:\n", "\ufeffmodel:\n", "model:\r\n"]
)
def test_what_is_left_out_has_its_default(text, tmp_path):
    assert load_config(written(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: {d_modle: 8}", ["model.d_modle", "did you mean 'd_model'?", "vocab_size"]),
        ("train: {learning_rate: 1}", ["train.learning_rate", "peak_lr"]),
        ("model: {zzz: 8}", ["model.zzz", "known: vocab_size"]),
        ("model: {3: 8}", ["model.3"]),
        ("modle: {d_model: 8}", ["'modle'", "did you mean 'model'?", "model, data, train"]),
        ("d_model: 8", ["'d_model'", "model, data, train"]),
        ("3: 8", ["3", "model, data, train"]),
        ("model: 8", ["'model'", "int", "map names to values"]),
        ("model: [8]", ["'model'", "list"]),
        ("- model", ["list", "map names to values"]),
        ("[]", ["list"]),
        ("hello", ["str"]),
        ("false", ["bool"]),
        ("model: {d_model: 65}", ["ModelConfig.d_model is 65", "n_heads = 4"]),
        ("model: {d_model: '64'}", ["ModelConfig.d_model is '64' (str)"]),
        ("model: {tied: 1}", ["ModelConfig.tied is 1"]),
        ("model: {norm: batch}", ["ModelConfig.norm is 'batch'", "layernorm, rmsnorm"]),
        ("train: {peak_lr: fast}", ["TrainConfig.peak_lr is 'fast'"]),
        ("model: {d_model: 64", ["not YAML", "line 1"]),
        ("model:\n\td_model: 64", ["not YAML", "line 2"]),
        ("model: !!python/object:os.system {}", ["not YAML"]),
        (b"model: \xff", ["not UTF-8 at byte 7"]),
        ("model: {}\n# caf\u00e9\n".encode("latin-1"), ["not UTF-8 at byte 15"]),
        ("model: {}\x00", ["not YAML"]),
    ],
    ids=str,
)
def test_what_is_wrong_in_a_file(text, words, tmp_path):
    path = written(tmp_path, text)
    message = str(refusal(load_config, path))
    assert message.startswith(f"{path}: ") or message.startswith(f"{path} holds")
    for word in words:
        assert word in message


def test_a_type_error_stays_one_in_a_file(tmp_path):
    assert isinstance(refusal(load_config, written(tmp_path, "model: {d_model: 1.5}")), InputTypeError)


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        message = str(refusal(load_config, path))
        assert str(path) in message and "configs/minigpt.yaml" in message


def test_from_dict_names_its_source():
    assert str(refusal(config_from_dict, {"model": {"d_model": 0}})).startswith("config: ModelConfig.d_model is 0")
    assert config_from_dict({"model": {"d_model": 8}}).model.d_model == 8
    assert config_from_dict(None) == Config()
    assert config_from_dict(dataclasses.asdict(Config())) == Config()


def test_nearest():
    assert nearest("d_modl", ["d_model", "d_ff"]) == " (did you mean 'd_model'?)"
    assert nearest("qqqq", ["d_model", "d_ff"]) == ""


def test_every_field_is_explained():
    """The command line shows the text below each field; a field without one would be shown bare."""
    import ast
    import inspect

    import minigpt_jax.config as module

    tree = ast.parse(inspect.getsource(module))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        if cls.name not in {c.__name__ for c in CLASSES}:
            continue
        for node, after in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                assert isinstance(after, ast.Expr) and isinstance(after.value.value, str), node.target.id
