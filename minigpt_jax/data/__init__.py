"""Corpora, tokenizers, and batches as a pure function of (seed, step). NumPy only, so it imports at once."""

from minigpt_jax.data.dataset import (
    Batch,
    Dataset,
    Rows,
    Source,
    Windows,
    iter_text,
    load_dataset,
    open_tokens,
    read_text,
    tokenize_to_file,
)
from minigpt_jax.data.hf import HFTokenizer
from minigpt_jax.data.ngram import ngram_cross_entropy
from minigpt_jax.data.pretrained import gpt2_tokenizer, load_pretrained_tokenizer, write_pretrained_tokenizer
from minigpt_jax.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    StreamDecoder,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_from_dict,
)
from minigpt_jax.data.verbs import entropy_floor
from minigpt_jax.data.wheels import cache_dir

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "CharTokenizer",
    "Dataset",
    "HFTokenizer",
    "Rows",
    "Source",
    "StreamDecoder",
    "Tokenizer",
    "Windows",
    "WordTokenizer",
    "cache_dir",
    "entropy_floor",
    "gpt2_tokenizer",
    "iter_text",
    "load_dataset",
    "load_pretrained_tokenizer",
    "load_tokenizer",
    "ngram_cross_entropy",
    "open_tokens",
    "read_text",
    "save_tokenizer",
    "tokenize_to_file",
    "tokenizer_from_dict",
    "write_pretrained_tokenizer",
]
