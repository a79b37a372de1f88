"""Train the Mini-GPT in your own loop: the pure `train_step`, no trainer. Run: python examples/optax_loop.py [FILE]"""

import sys

import jax

import minigpt_jax as mg

if len(sys.argv) > 1:  # your text, by characters
    data = mg.DataConfig(corpus="text", path=sys.argv[1])
else:  # the course's verb grammar: "I work , you work , he works"
    data = mg.DataConfig(corpus="verbs_en", tokenizer="word")

dataset = mg.load_dataset(data, context_len=32)
config = mg.Config(
    model=mg.ModelConfig(vocab_size=max(64, dataset.tokenizer.vocab_size)),
    train=mg.TrainConfig(steps=300, batch_size=32, peak_lr=3e-3, floor_lr=3e-4, warmup_steps=30),
)
state = mg.init_state(config)
train_step = jax.jit(mg.make_train_step(config), donate_argnums=0)

for step in range(config.train.steps):
    state, metrics = train_step(state, dataset.train.batch(config.train.seed, step, config.train.batch_size))
    if (step + 1) % 50 == 0:
        print(f"step {step + 1:>4}  loss {metrics['loss']:.3f}  gradient norm {metrics['grad_norm']:.3f}")

grads = jax.grad(mg.loss)(state.params, dataset.train.batch(0, 0, 8), config.model)
print("gradient of the tied table:", grads["embed"]["embedding"].shape)
