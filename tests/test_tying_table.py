"""One table or two, decided from a checkpoint's flag and its contents; and everything that `load_pretrained` refuses,
each in one line that names the file. The files are made from the golden ones by safetensors' NumPy writer: no torch.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import raw_safetensors as raw
from safetensors.numpy import save_file

import minigpt_jax as mg

GOLDEN = Path(__file__).parent / "golden"
# family: (golden folder, the table's name, the head's)
FAMILIES = {
    "gpt2": ("gpt2", "transformer.wte.weight", "lm_head.weight"),
    "llama": ("llama-untied", "model.embed_tokens.weight", "lm_head.weight"),
    "gpt_neox": ("gpt_neox", "gpt_neox.embed_in.weight", "embed_out.weight"),
}


class Checkpoint:
    """A golden checkpoint's parts to change, and then to write."""

    def __init__(self, name: str, folder: Path):
        self.folder = folder
        self.config = json.loads((GOLDEN / name / "config.json").read_text())
        self.tensors = raw.arrays(GOLDEN / name / "model.safetensors")

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        return self.folder


@pytest.fixture
def golden(tmp_path):
    return lambda name: Checkpoint(name, tmp_path / "checkpoint")


def refused(*words: str, load=mg.load_pretrained, **options):
    """Loading `folder` is an `InputError` of one line with all these words in it."""

    def check(folder):
        with pytest.raises(mg.InputError) as caught:
            load(folder, **options)
        message = str(caught.value)
        assert "\n" not in message and len(message) > 20
        for word in words:
            assert word in message, message
        return message

    return check


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# The table: what the flag says, and what the file holds.


@pytest.fixture(params=FAMILIES)
def parts(request, golden):
    """A checkpoint without flag and tables, the names of its tables, and two different ones."""
    name, table, head = FAMILIES[request.param]
    checkpoint = golden(name)
    values = checkpoint.tensors.pop(table)
    checkpoint.tensors.pop(head, None)
    checkpoint.config.pop("tie_word_embeddings", None)
    return checkpoint, table, head, values, values + np.float16(1)


@pytest.mark.parametrize("with_head", [False, True], ids=["no head", "equal head"])
def test_flag_true_and_no_or_an_equal_head_is_tied(parts, with_head):
    checkpoint, table, head, values, _ = parts
    checkpoint.config["tie_word_embeddings"] = True
    checkpoint.tensors[table] = values
    if with_head:
        checkpoint.tensors[head] = values.copy()
    params, config, _ = mg.load_pretrained(checkpoint.write())
    assert config.tied and "head" not in params
    mg.assert_tied(params, config)
    np.testing.assert_array_equal(params["embed"]["embedding"], values)


def test_flag_true_and_another_head_is_refused_unless_asked_for(parts):
    checkpoint, table, head, values, other = parts
    checkpoint.config["tie_word_embeddings"] = True
    checkpoint.tensors |= {table: values, head: other}
    folder = checkpoint.write()
    refused("tied=False", head, "checkpoint")(folder)
    params, config, _ = mg.load_pretrained(folder, tied=False)
    assert not config.tied
    np.testing.assert_array_equal(params["embed"]["embedding"], values)
    np.testing.assert_array_equal(params["head"]["embedding_out"], other)


def test_one_value_makes_another_head(parts):
    checkpoint, table, head, values, _ = parts
    checkpoint.config["tie_word_embeddings"] = True
    values = values.astype(np.float32)
    other = values.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(np.inf))
    checkpoint.tensors |= {table: values, head: other}
    refused("tied=False")(checkpoint.write())


def test_flag_false_and_a_head_is_untied(parts):
    checkpoint, table, head, values, other = parts
    checkpoint.config["tie_word_embeddings"] = False
    for second in (other, values.copy()):  # equal tables stay two: training would part them
        checkpoint.tensors |= {table: values, head: second}
        params, config, _ = mg.load_pretrained(checkpoint.write())
        assert not config.tied
        np.testing.assert_array_equal(params["embed"]["embedding"], values)
        np.testing.assert_array_equal(params["head"]["embedding_out"], second)


def test_flag_false_and_no_head_is_refused(parts):
    checkpoint, table, head, values, _ = parts
    checkpoint.config["tie_word_embeddings"] = False
    checkpoint.tensors[table] = values
    refused(head, "checkpoint")(checkpoint.write())


def test_no_table_at_all_is_refused(parts):
    checkpoint, table, _, _, _ = parts
    checkpoint.config["tie_word_embeddings"] = True
    refused(table.removeprefix("transformer."), "checkpoint")(checkpoint.write())


def test_a_head_alone_is_no_lookup(parts):
    checkpoint, table, head, values, _ = parts
    checkpoint.config["tie_word_embeddings"] = False
    checkpoint.tensors[head] = values
    refused(table.removeprefix("transformer."), "checkpoint")(checkpoint.write())


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_table_under_either_name_or_both(prefix, golden):
    names = [f"{prefix}wte.weight"], ["lm_head.weight"], [f"{prefix}wte.weight", "lm_head.weight"]
    loaded = []
    for tables in names:
        checkpoint = golden("gpt2")
        values = checkpoint.tensors.pop("transformer.wte.weight")
        renamed = {prefix + name.removeprefix("transformer."): value for name, value in checkpoint.tensors.items()}
        checkpoint.tensors = renamed | {name: values.copy() for name in tables}
        loaded.append(mg.load_pretrained(checkpoint.write()))
    tokens = np.array([1, 5, 2, 10, 0])
    logits = [mg.forward(params, tokens, config) for params, config, _ in loaded]
    for params, config, _ in loaded[1:]:
        assert config == loaded[0][1] and config.tied
        same(params, loaded[0][0])
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


@pytest.mark.parametrize(("name", "tied"), [("gpt2", True), ("llama-untied", False)])
def test_without_a_flag_the_familys_default_holds(name, tied, golden):
    checkpoint = golden(name)
    assert checkpoint.config.pop("tie_word_embeddings", tied) is tied
    assert mg.load_pretrained(checkpoint.write())[1].tied is tied


# Names, shapes and types of tensors.


def test_unknown_and_missing_names_are_listed(golden):
    checkpoint = golden("llama-untied")
    missing = "model.layers.1.mlp.up_proj.weight"
    unknown = "model.layers.1.mlp.sideways_proj.weight"
    checkpoint.tensors[unknown] = checkpoint.tensors.pop(missing)
    refused("model.layers.1.mlp.up_proj", unknown, "checkpoint")(checkpoint.write())


@pytest.mark.parametrize("name", ["gpt2", "llama-untied", "qwen3", "gemma", "gpt_neox"])
def test_every_single_tensor_is_needed(name, golden):
    checkpoint = golden(name)
    tensors, table = checkpoint.tensors, FAMILIES.get(name, ("", "", ""))[1]
    for missing in tensors:
        if missing != table:
            checkpoint.tensors = {key: value for key, value in tensors.items() if key != missing}
            refused(missing.removeprefix("transformer."))(checkpoint.write())


@pytest.mark.parametrize("extra", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_a_layer_or_a_bias_more_than_the_config_says(extra, golden):
    checkpoint = golden("llama-untied")
    checkpoint.tensors[extra] = np.zeros((12, 8), np.float16)
    refused(extra)(checkpoint.write())


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("gpt2", ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")),
        ("llama-untied", ("model.layers.{}.self_attn.rotary_emb.inv_freq",)),
        (
            "gpt_neox",
            tuple(f"gpt_neox.layers.{{}}.attention.{x}" for x in ("bias", "masked_bias", "rotary_emb.inv_freq")),
        ),
    ],
)
def test_buffers_of_old_files_are_passed_over(name, buffers, golden):
    checkpoint = golden(name)
    plain = mg.load_pretrained(checkpoint.write())
    for buffer in buffers:
        for layer in range(2):
            value = np.ones((1, 1, 16, 16), bool) if buffer.endswith(".bias") else np.float32([1, 0.01])
            checkpoint.tensors[buffer.format(layer)] = value
    same(mg.load_pretrained(checkpoint.write())[0], plain[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_shapes(family, golden):
    name = FAMILIES[family][0]
    for key in golden(name).tensors:
        checkpoint = golden(name)
        value = checkpoint.tensors[key]
        for wrong in (value[:-1], value[None], value.T if value.ndim == 2 and value.shape[0] != value.shape[1] else []):
            if np.size(wrong):
                checkpoint.tensors[key] = np.ascontiguousarray(wrong)
                refused(key.removeprefix("transformer."), "checkpoint")(checkpoint.write())


def test_values_that_are_no_floats(golden):
    checkpoint = golden("llama-untied")
    checkpoint.tensors["model.norm.weight"] = np.ones(8, np.int32)
    refused("model.norm.weight", "checkpoint")(checkpoint.write())


# Options that the model does not have.


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-untied", {"model_type": "gemma2"}, ["gemma2", "model_type"]),
        ("llama-untied", {"model_type": "mistral"}, ["mistral", "model_type"]),
        ("llama-untied", {"model_type": None}, ["model_type"]),
        ("llama-untied", {"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ("llama-untied", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn"]),
        ("llama-untied", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn"]),
        ("llama-untied", {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["longrope"]),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, ["yarn"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window"]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping"]),
        ("llama-untied", {"logits_scaling": 8.0}, ["logits_scaling"]),
        ("llama-untied", {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ("gemma", {"hidden_act": "silu", "hidden_activation": "silu"}, ["silu"]),
        ("gpt2", {"activation_function": "relu"}, ["activation_function", "relu"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("gpt_neox", {"hidden_act": "relu"}, ["hidden_act", "relu"]),
    ],
    ids=lambda value: None if not isinstance(value, dict) else ",".join(map(str, value.items())).replace(" ", ""),
)
def test_what_the_model_lacks_is_refused_by_name(name, changes, words, golden):
    checkpoint = golden(name)
    checkpoint.config |= changes
    refused(*words, "config.json")(checkpoint.write())


def test_gpt2_reader_takes_gpt2_alone(golden):
    refused("llama", load=mg.load_gpt2)(golden("llama-untied").write())


# Files that are broken.


def test_pickled_weights_are_not_opened(golden):
    folder = golden("gpt2").write()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refused("pytorch_model.bin", "safetensors")(folder)
    assert "pickle" in message or "code" in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_are_not_there(name, golden):
    folder = golden("gpt2").write()
    (folder / name).unlink()
    refused(name, "checkpoint")(folder)


def test_folders_that_are_none(tmp_path):
    refused("nowhere")(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    refused("file")(tmp_path / "file")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"model_type": "gpt2"'])
def test_config_that_is_no_json_object(text, golden):
    folder = golden("gpt2").write()
    (folder / "config.json").write_bytes(text)
    refused("config.json")(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "eight"},
        {"hidden_size": None},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 0},
        {"rms_norm_eps": -1.0},
        {"rope_theta": "large"},
        {"rope_scaling": "llama3"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"tie_word_embeddings": "yes"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_config_with_impossible_values(changes, golden):
    checkpoint = golden("llama-untied")
    checkpoint.config |= changes
    refused("config.json")(checkpoint.write())


def test_a_size_that_is_missing(golden):
    checkpoint = golden("llama-untied")
    del checkpoint.config["vocab_size"]
    refused("vocab_size", "config.json")(checkpoint.write())


@pytest.mark.parametrize("kept", [0, 4, 100, -1000, -1])
def test_truncated_safetensors(kept, golden):
    folder = golden("llama-untied").write()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused("model.safetensors")(folder)


@pytest.mark.parametrize("start", [b"\xff" * 8, (10).to_bytes(8, "little") + b"not JSON!!"], ids=["length", "header"])
def test_safetensors_with_a_broken_header(start, golden):
    folder = golden("llama-untied").write()
    path = folder / "model.safetensors"
    path.write_bytes(start + path.read_bytes()[len(start) :])
    refused("model.safetensors")(folder)


@pytest.fixture
def sharded(golden):
    """A folder of two shards, and a function that writes its index."""
    checkpoint = golden("llama-untied")
    folder, names = checkpoint.write(), sorted(checkpoint.tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:]), 1):
        shard = f"model-{i:05}-of-00002.safetensors"
        save_file({name: checkpoint.tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)

    def write_index(text: str | None = None, **changes) -> Path:
        index = {"metadata": {}, "weight_map": weight_map | changes}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index) if text is None else text)
        return folder

    return write_index


def test_shards_are_one_checkpoint(sharded):
    same(mg.load_pretrained(sharded())[0], mg.load_pretrained(GOLDEN / "llama-untied")[0])


def test_index_names_a_shard_that_is_missing(sharded):
    folder = sharded()
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused("model-00002-of-00002.safetensors")(folder)


def test_index_names_a_tensor_that_no_shard_has(sharded):
    folder = sharded()
    path = folder / "model-00002-of-00002.safetensors"
    tensors = raw.arrays(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    refused("model.norm.weight", "checkpoint")(folder)


def test_a_truncated_shard(sharded):
    folder = sharded()
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused("model-00002-of-00002.safetensors")(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 1}}'])
def test_broken_index(text, sharded):
    refused("model.safetensors.index.json")(sharded(text))
