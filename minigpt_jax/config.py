"""Configurations: frozen, hashable dataclasses, checked when they are made, saved and loaded as YAML.

Letters used for axes in the whole package (array names end in them, as in ``x_BxTxD``):

    B batch    T time (positions)    V vocabulary    D d_model (residual stream)
    H query heads    G key/value heads    K width of one head    F width of the feed-forward layer
    L layers    S length of a key/value cache    N = B * T flattened positions
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import InputError, nearest, replacing, require
from .fields import Checked

DType = Literal["float32", "bfloat16", "float16", "float64"]


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """The shape and kind of the model. The defaults are the course's Mini-GPT: 103,680 parameters."""

    vocab_size: int = 64
    """V: rows of the tied table. May exceed the tokenizer's vocabulary; rows without a token are never sampled."""
    d_model: int = 64
    """D: width of the residual stream."""
    n_layers: int = 2
    """L: number of blocks."""
    n_heads: int = 4
    """H: query heads."""
    d_head: int | None = None
    """K: width of one head; default D / H."""
    n_kv_heads: int | None = None
    """G: key/value heads (grouped-query attention); default: as many as query heads."""
    d_ff: int | None = None
    """F: width of the feed-forward layer; default 4 D."""
    context_len: int = 32
    """Training length T. A wall for learned positions only; RoPE runs on beyond it."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm has scale and bias, rmsnorm only scale."""
    norm_eps: float = 1e-5
    """Added to the variance inside every norm."""
    norm_unit_offset: bool = False
    """RMSNorm multiplies by 1 + scale, and the scale starts at 0, as in Gemma."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before RoPE, with learned scales of K values, as in Qwen3."""
    ffn: Literal["gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    """gelu is the exact (erf) form, gelu_tanh GPT-2's approximation; swiglu and geglu are gated."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """Rotary embedding of queries and keys, a learned table added to the embedding, or nothing."""
    rope_base: float = 10000.0
    """Frequencies are rope_base ** (-2k / K), K being the dimensions of a head that rotate."""
    rope_pairs: Literal["interleaved", "half"] = "interleaved"
    """Pair (2k, 2k+1) as in the RoFormer paper, or (k, k + K/2) as in Llama's released weights."""
    rope_fraction: float = 1.0
    """The first int(K * rope_fraction) dimensions of each head rotate, the rest pass through; GPT-NeoX has 0.25."""
    rope_factor: float = 1.0
    """Frequencies are divided by it, for longer texts: all of them (position interpolation, arXiv:2306.15595), or by
    Llama 3.1's rule where rope_original_len is set."""
    rope_original_len: int | None = None
    """Llama 3.1's rule: only wavelengths that are long beside this training length are divided by rope_factor."""
    rope_low_freq_factor: float = 1.0
    """Wavelengths beyond rope_original_len / rope_low_freq_factor are divided in full."""
    rope_high_freq_factor: float = 4.0
    """Wavelengths below rope_original_len / rope_high_freq_factor stay; between the two, a linear mix."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    out_bias: bool | None = None
    """Bias on attention's output projection; default: as attention_bias. Qwen2 has the other three alone."""
    ffn_bias: bool = True
    """Biases on the feed-forward layer's projections."""
    parallel_residual: bool = False
    """y = x + attention(norm(x)) + ffn(norm(x)), as in GPT-NeoX: both read the same stream."""
    scale_embedding: bool = False
    """Looked-up rows are multiplied by sqrt(D), rounded to dtype, as in Gemma; the head's table is not."""
    tied: bool = True
    """One table for lookup and head. False gives a separate head of the same shape, for comparisons only."""
    init_std: float = 0.02
    """Standard deviation of the table at init, and of the kernels where kernel_init is fixed."""
    kernel_init: Literal["fan_in", "fixed"] = "fan_in"
    """Kernels start at 1 / sqrt(fan_in), which suits any width; or all at init_std, as in GPT-2."""
    residual_init_scale: bool = True
    """Projections that write to the residual stream start smaller by 1 / sqrt(2 L), as in GPT-2."""
    dropout: float = 0.0
    """Rate on the embedding, the attention weights and both residual branches; active only where a key is given."""
    dtype: DType = "float32"
    """Compute type of the blocks. Softmax, norm statistics, logits and loss are float32 at least."""
    param_dtype: DType = "float32"
    """Storage type of the parameters."""
    bf16_dots: bool = False
    """Dense layers multiply bfloat16 roundings of their float32 inputs and add up in float32: less exact, and faster
    where the processor multiplies bfloat16."""
    remat: bool = False
    """Recompute each block in the backward pass: less memory, more time. On a CPU that takes the compiler's
    memory-optimized schedule, which the trainer asks for."""

    def check(self) -> None:
        self._at_least(1, "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "context_len")
        self._at_least(1, "rope_factor", "rope_original_len")
        require(
            self.d_head is not None or self.d_model % self.n_heads == 0,
            f"ModelConfig.d_model is {self.d_model}; it must be a multiple of n_heads = {self.n_heads}, or set d_head",
        )
        require(
            self.n_heads % self.kv_heads == 0,
            f"ModelConfig.n_kv_heads is {self.n_kv_heads}; it must divide n_heads = {self.n_heads}",
        )
        require(0 < self.rope_fraction <= 1, f"ModelConfig.rope_fraction is {self.rope_fraction}; it must be in (0, 1]")
        require(
            self.positions != "rope" or (self.rope_dim >= 2 and self.rope_dim % 2 == 0),
            f"ModelConfig: {self.rope_dim} of a head's {self.head_dim} dimensions rotate (d_model / n_heads or d_head, "
            "times rope_fraction); RoPE rotates pairs, so it must be even and at least 2",
        )
        for name in ("rope_low_freq_factor", "rope_high_freq_factor"):
            require(getattr(self, name) > 0, f"ModelConfig.{name} is {getattr(self, name)}; it must be above 0")
        require(
            self.rope_original_len is None or self.rope_high_freq_factor > self.rope_low_freq_factor,
            f"ModelConfig.rope_high_freq_factor is {self.rope_high_freq_factor}; it must be above "
            f"rope_low_freq_factor = {self.rope_low_freq_factor}",
        )
        require(
            not self.norm_unit_offset or self.norm == "rmsnorm",
            f"ModelConfig.norm_unit_offset goes with norm rmsnorm, not {self.norm}",
        )
        require(self.norm_eps > 0, f"ModelConfig.norm_eps is {self.norm_eps}; it must be above 0")
        require(self.rope_base > 1, f"ModelConfig.rope_base is {self.rope_base}; it must be above 1")
        self._at_least(0, "init_std")
        self._within(0, 1, "dropout")
        require(
            not self.bf16_dots or self.dtype == "float32",
            f"ModelConfig.bf16_dots goes with dtype float32, not {self.dtype}",
        )

    @property
    def head_dim(self) -> int:
        """K."""
        return self.d_model // self.n_heads if self.d_head is None else self.d_head

    @property
    def rope_dim(self) -> int:
        """How many dimensions of a head rotate."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def has_out_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias if self.out_bias is None else self.out_bias

    @property
    def ffn_dim(self) -> int:
        """F."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """What to train on, and how text becomes tokens."""

    corpus: Literal["shakespeare", "verbs", "verbs_en", "text"] = "shakespeare"
    """38 plays; the course's verb grammar (English with Spanish, or English alone); or a UTF-8 text file."""
    path: str | None = None
    """The text file, where corpus is text."""
    tokenizer: Literal["char", "byte", "bpe", "word", "pretrained"] = "char"
    """Characters of the text, UTF-8 bytes, byte-pair encoding trained on the text, the verb grammar's words, or the
    tokenizer that came with imported weights."""
    bpe_vocab: int = 512
    """Vocabulary of the byte-pair encoding: 256 bytes and the merges."""
    val_fraction: float = 0.1
    """The tail of the text that is held out for evaluation."""
    window: int | None = None
    """T: tokens in a window of the text; default: the model's context_len."""

    def check(self) -> None:
        self._within(0, 1, "val_fraction")
        self._at_least(256, "bpe_vocab")
        self._at_least(1, "window")
        verbs = self.corpus.startswith("verbs")
        require(
            (self.corpus == "text") == (self.path is not None),
            f"DataConfig.corpus is {self.corpus!r} and path is {self.path!r}; a path goes with corpus 'text' only",
        )
        require(
            verbs == (self.tokenizer == "word"),
            f"DataConfig.tokenizer is {self.tokenizer!r} and corpus is {self.corpus!r}; 'word' goes with the verb "
            "corpora, and they with it",
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """Optimizer, schedule and the trainer's rhythm. A step is one update of the parameters."""

    steps: int = 2000
    """Updates in all."""
    batch_size: int = 32
    """Windows of context_len tokens per update."""
    accumulate: int = 1
    """Micro-batches that one update is split into, to save memory; the result is the same."""
    peak_lr: float = 3e-4
    """Learning rate after warm-up."""
    floor_lr: float = 3e-5
    """Learning rate of the last update; a cosine leads there."""
    warmup_steps: int = 100
    """Update t <= warmup_steps has learning rate peak_lr * t / warmup_steps."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices; biases and norm scales never decay."""
    decay_embedding: bool = True
    """Whether the token table (and an untied head) decays too."""
    clip_norm: float | None = 1.0
    """Clip the gradient to this global L2 norm; null for no clipping."""
    seed: int = 0
    """Decides init, data order and dropout, each through a key of its own."""
    steps_per_call: int = 8
    """Updates per compiled call; only speed depends on it."""
    eval_every: int = 250
    """Evaluate on part of the held-out text after every so many updates; 0: only at the end."""
    eval_windows: int = 400
    """Windows in such an evaluation, evenly spread. The final one takes all."""
    checkpoint_every: int = 500
    """Save after every so many updates; 0: only at the end or on Ctrl-C."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted."""
    sample_every: int = 0
    """Print a sample after every so many updates; 0: never."""
    inspect_every: int = 0
    """Record both parts of the tied gradient after every so many updates, and 1, 2, 4 ... before; 0: never. Such an
    update adds the parts up itself, so parameters differ by float32 rounding from those of a run without."""
    lookup_gradient_scale: float = 1.0
    """Multiply the lookup part of the tied gradient; an experiment, 1 changes nothing."""
    clip_head_gradient: bool = False
    """Scale the head part of the tied gradient down to the L2 norm of the lookup part; an experiment."""

    def check(self) -> None:
        self._at_least(1, "steps", "batch_size", "accumulate", "steps_per_call", "eval_windows", "keep_checkpoints")
        self._at_least(0, "warmup_steps", "eval_every", "checkpoint_every", "sample_every", "weight_decay")
        self._at_least(0, "inspect_every", "lookup_gradient_scale")
        self._within(0, 1, "beta1", "beta2")
        self._within(0, 2**32, "seed")
        require(self.peak_lr > 0, f"TrainConfig.peak_lr is {self.peak_lr}; it must be above 0")
        require(
            0 <= self.floor_lr <= self.peak_lr,
            f"TrainConfig.floor_lr is {self.floor_lr}; it must be in [0, peak_lr = {self.peak_lr}]",
        )
        require(self.adam_eps > 0, f"TrainConfig.adam_eps is {self.adam_eps}; it must be above 0")
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"TrainConfig.clip_norm is {self.clip_norm}; it must be above 0, or null for no clipping",
        )
        require(
            self.batch_size % self.accumulate == 0,
            f"TrainConfig.batch_size is {self.batch_size}; it must be a multiple of accumulate = {self.accumulate}",
        )


@dataclasses.dataclass(frozen=True)
class Sampling(Checked):
    """How the next token is drawn. In this order: repetition penalty, temperature, top-k, top-p, min-p, draw."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens; k >= V keeps all. Ties go to the lower id."""
    top_p: float | None = None
    """Keep the smallest set of most likely tokens with probability mass >= top_p; 1 keeps all."""
    min_p: float | None = None
    """Keep tokens at least min_p times as likely as the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the text holds already are divided by it, or multiplied where negative; 1: no change."""

    def check(self) -> None:
        self._at_least(0, "temperature")
        self._at_least(1, "top_k")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= 1, f"Sampling.{name} is {value}; it must be in [0, 1]")
        require(
            self.repetition_penalty > 0,
            f"Sampling.repetition_penalty is {self.repetition_penalty}; it must be above 0",
        )


@dataclasses.dataclass(frozen=True)
class Config(Checked):
    """A whole run: what `configs/*.yaml` hold and what every run directory keeps as `config.yaml`."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def check(self) -> None:
        t = self.train
        require(
            self.window <= self.model.context_len,
            f"DataConfig.window is {self.window}; it must be at most model.context_len = {self.model.context_len}",
        )
        require(
            self.model.tied or not (t.inspect_every or t.clip_head_gradient or t.lookup_gradient_scale != 1),
            "train.inspect_every, lookup_gradient_scale and clip_head_gradient are about the two uses of one table; "
            "this model is untied (tied: false): leave them out, or set inspect_every to 0 (--train.inspect-every 0)",
        )
        require(
            self.model.param_dtype != "float16",
            "ModelConfig.param_dtype is float16; AdamW's epsilon is 0 there: train parameters in float32 or bfloat16 "
            "(model.dtype, the type of computation, may be float16)",
        )

    @property
    def window(self) -> int:
        """T of training and evaluation."""
        return self.data.window or self.model.context_len


def config_from_dict(tree: Any, source: str = "config") -> Config:
    """Nested dict to `Config`. Unknown sections and keys are refused, with the nearest known name."""
    sections = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    parts = {}
    for section, values in _mapping(tree, source).items():
        require(
            section in sections,
            f"{source}: unknown section {section!r}; known: {', '.join(sections)}{nearest(str(section), sections)}",
        )
        cls = sections[section]
        known = [field.name for field in dataclasses.fields(cls)]
        for key in _mapping(values, f"{source}: section {section!r}"):
            require(
                key in known,
                f"{source}: unknown key {section}.{key}{nearest(str(key), known)}; known: {', '.join(known)}",
            )
        try:
            parts[section] = cls(**(values or {}))
        except InputError as error:
            raise type(error)(f"{source}: {error}") from None
    return Config(**parts)


def _mapping(value: Any, where: str) -> dict:
    require(
        value is None or isinstance(value, dict), f"{where} holds {type(value).__name__}; it must map names to values"
    )
    return value or {}


def load_config(path: str | Path) -> Config:
    """Read a YAML file. Raises `InputError` with the file's name for everything that is wrong in it."""
    path = Path(path)
    require(path.is_file(), f"{path}: no such config file; try configs/minigpt.yaml")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    return config_from_dict(tree, str(path))


def save_config(config: Config, path: str | Path) -> None:
    """Write every field, so that a run does not depend on later defaults."""
    with replacing(path) as file:
        file.write(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False).encode())
