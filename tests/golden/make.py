"""Makes the checkpoints beside it, with what `transformers` computes from them: `python tests/golden/make.py`.

Needs the extra `parity`. Each folder has config.json, model.safetensors and expected.json. The same versions of torch
and transformers make the same bytes. The logits are computed in float64 from the file's values and then rounded to
seven digits, so that they do not depend on the machine.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import hf_models as hf  # noqa: E402
import raw_safetensors as raw  # noqa: E402

PROMPT, NEW = 4, 8
LLAMA = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "n_inner": 12}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
# Of 4 frequencies 1 stays, 1 is divided in part and 2 are divided wholly.
LLAMA3 = {**hf.ROPE_LLAMA3, "rope_theta": 500.0, "original_max_position_embeddings": 24}
# folder: (variant, changes, type of the file's values)
FOLDERS = {
    "gpt2": ("gpt2", GPT2, torch.float16),
    "gpt2-bare": ("gpt2", GPT2, torch.bfloat16),
    "llama-llama3": ("llama-llama3", {**LLAMA, "head_dim": 8, "rope_parameters": LLAMA3}, torch.bfloat16),
    "llama-untied": ("llama", LLAMA, torch.float16),
    "qwen2": ("qwen2", {**LLAMA, "num_key_value_heads": 1}, torch.float32),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 6}, torch.bfloat16),
    "gemma": ("gemma", {**LLAMA, "head_dim": 6}, torch.bfloat16),
    "gpt_neox": (
        "gpt_neox",
        {**NEOX, "num_attention_heads": 2, "rope_parameters": {**hf.ROPE, "partial_rotary_factor": 0.5}},
        torch.float16,
    ),
}


def as_released(name: str, folder: Path) -> None:
    """Fields and names of some released files where they differ from what transformers 5 writes."""
    rope = json.loads((folder / "config.json").read_text()).get("rope_parameters", {})
    if name in ("llama-llama3", "llama-untied", "gemma"):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaling = None if rope["rope_type"] == "default" else scaling
        fields = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
        hf.edit_config(folder, drop=("rope_parameters", "dtype"), torch_dtype="bfloat16", **fields)
    if name == "llama-untied":
        hf.edit_config(folder, torch_dtype="float16")
    if name == "gemma":
        hf.edit_config(folder, hidden_act="gelu")
    if name == "gpt_neox":
        fields = {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
        hf.edit_config(folder, drop=("rope_parameters", "dtype"), torch_dtype="float16", **fields)
    if name == "gpt2-bare":
        hf.edit_config(folder, drop=("tie_word_embeddings", "add_cross_attention"), n_ctx=GPT2["n_positions"])
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        tensors = {key.removeprefix("transformer."): value for key, value in tensors.items()}
        tensors["lm_head.weight"] = tensors.pop("wte.weight")
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def seven_digits(values: torch.Tensor):
    return [[float(f"{value:.7g}") for value in row] for row in values.tolist()]


def expected(model) -> dict | None:
    """What `transformers` computes from the model's weights, in float64; None where that would show little."""
    with hf.float32_means_float64(), torch.no_grad():
        double = hf.double_of(model)
        ids = torch.tensor([[3, 7, 1, 9, 0, 2, 8, 5, 10, 4, 6, 7]])
        logits = double(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        written = double.generate(ids[:, :PROMPT], do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)
        best = double(written[:, :-1]).logits[0, PROMPT - 1 :].topk(2).values
    close = (best[:, 0] - best[:, 1]).min() < 1e-2  # rounding to float32 must not decide
    if close or len(written[0, PROMPT:].unique()) < 5 or logits.abs().max() > 10:
        return None
    return {
        "ids": ids[0].tolist(),
        "logits": seven_digits(logits[0]),
        "loss": float(f"{loss.item():.7g}"),
        "prompt": written[0, :PROMPT].tolist(),
        "continuation": written[0, PROMPT:].tolist(),
    }


def make(name: str) -> None:
    variant, changes, dtype = FOLDERS[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    for seed in itertools.count():
        model = hf.randomized(hf.empty_model(hf.config_of(variant, **changes)), scale=0.5, seed=seed).to(dtype)
        if expected(model) is not None:
            break
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    as_released(name, folder)
    if name != "gpt2-bare":  # transformers itself wants the table under its own name
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    values = expected(model)
    values["made_with"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    values["sha256"] = raw.sha256(raw.read_folder(folder))
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    (folder / "expected.json").write_text(f"{{\n{lines}\n}}\n")
    print(name, "seed", seed, sum(path.stat().st_size for path in folder.iterdir()), "bytes", values["continuation"])


if __name__ == "__main__":
    for name in FOLDERS:
        make(name)
