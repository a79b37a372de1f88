"""Look inside a released model: what its one table holds, and what each layer of it would say.

Run: python examples/inspect_gpt2.py DIR [PROMPT]

DIR is a folder with config.json, model.safetensors and a tokenizer, as for GPT-2, SmolLM2, Llama 3.2, Qwen2.5, Qwen3,
Gemma or Pythia. Without one the example draws a small GPT-2 of random weights, to show what chance looks like.
"""

import sys
from pathlib import Path

import jax
import numpy as np

import minigpt_jax as mg
from minigpt_jax.data import ByteTokenizer

if len(sys.argv) > 1:
    params, config, tokenizer = mg.load_pretrained(Path(sys.argv[1]))
    if tokenizer is None:
        sys.exit(f"{sys.argv[1]} has no tokenizer")
else:
    shape = {"positions": "learned", "ffn": "gelu_tanh", "attention_bias": True, "context_len": 64}
    config, tokenizer = mg.ModelConfig(vocab_size=256, d_model=64, n_layers=4, n_heads=4, **shape), ByteTokenizer()
    params = mg.init(config, jax.random.key(0))
prompt = sys.argv[2] if len(sys.argv) > 2 else "The capital of France is"
texts, V = tokenizer.texts(), tokenizer.vocab_size
ids = np.array([i for i in (tokenizer.bos_id,) if i is not None] + tokenizer.encode(prompt).tolist(), np.int32)

table = mg.param_table(config)
print(f"{table.total:,} parameters, {table.embedding / table.total:.1%} of them the table E ({V:,} tokens)")
norms = np.linalg.norm(np.asarray(params["embed"]["embedding"][:V], np.float32), axis=1)
order = np.argsort(norms)
for words, few in (("shortest", order[:6]), ("longest", order[:-7:-1])):
    print(f"{words} rows: " + ", ".join(f"{texts[i]!r} {norms[i]:.2f}" for i in few))

print("\nnearest in E, by cosine:")
for i in dict.fromkeys(ids.tolist()):
    near, cosines = mg.neighbours(params, i, k=5, vocab_limit=V)
    print(f"  {texts[i]!r:>12}: " + ", ".join(f"{texts[j]!r} {c:.2f}" for j, c in zip(near, cosines, strict=True)))

lens = mg.lens_table(params, ids, config, vocab_limit=V)
print(f"\nthe next token after {prompt!r}, by layer:")
for layer, ranked, shares in zip(lens.points, lens.top_ids[:, -1], lens.top_probs[:, -1], strict=True):
    print(f"  {layer:>14}: " + ", ".join(f"{texts[j]!r} {p:.1%}" for j, p in zip(ranked, shares, strict=True)))

if config.tied:
    batch = mg.Batch(ids[None, :-1], ids[None, 1:])
    stats = mg.tied_stats(mg.tied_gradient(params, batch, config))
    print(
        f"\ngradient of E on this prompt: the head makes {stats['head_share_l2']:.0%} of it by L2 norm; "
        f"cosine with the lookup's part {stats['cosine']:+.2f}"
    )
