"""Train for a few seconds, then look inside: the two uses of the one table, and what each layer would say.

Run: python examples/look_inside.py [FILE]
"""

import sys

import jax

import minigpt_jax as mg

data = mg.DataConfig(corpus="text", path=sys.argv[1]) if len(sys.argv) > 1 else mg.DataConfig("verbs_en", None, "word")
dataset = mg.load_dataset(data, context_len=32)
tokenizer = dataset.tokenizer
texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
model = mg.ModelConfig(vocab_size=max(64, tokenizer.vocab_size))
config = mg.Config(model=model, train=mg.TrainConfig(steps=256, peak_lr=3e-3, floor_lr=3e-4, warmup_steps=30))

state = mg.init_state(config)
train_step = jax.jit(mg.make_train_step(config))
inspected_step = jax.jit(mg.make_train_step(config, inspect=True))  # the same step, and the statistics of the split
print("step    loss  head share by L2, L2 squared, L1   cosine of the update with -lookup, -head")
for step in range(1, config.train.steps + 1):
    look = step.bit_count() == 1  # 1, 2, 4, 8 ...
    batch = dataset.train.batch(config.train.seed, step - 1, config.train.batch_size)
    state, metrics = (inspected_step if look else train_step)(state, batch)
    if look:
        tied = metrics["tied"]
        shares = "  ".join(f"{tied[f'head_share_{norm}']:10.3f}" for norm in ("l2", "l2_squared", "l1"))
        cosines = "  ".join(f"{tied[f'update_cosine_{part}']:10.3f}" for part in ("lookup", "head"))
        print(f"{step:>4}  {metrics['loss']:6.3f}  {shares}   {cosines}")

split = mg.tied_gradient(state.params, batch, model)
print(f"\nrows of E, largest head part first\n{mg.token_table(split, batch, texts).render(limit=8)}\n")

prompt = batch.tokens[0][batch.mask[0]][:24]  # without padding
print(mg.lens_table(state.params, prompt, model, vocab_limit=len(texts)).render(texts))

token = int(prompt[1])
ids, cosines = mg.neighbours(state.params, token, k=5, vocab_limit=len(texts))
near = ", ".join(f"{texts[i]!r} {cosine:.2f}" for i, cosine in zip(ids, cosines, strict=True))
print(f"\nnearest to {texts[token]!r} in E: {near}")
