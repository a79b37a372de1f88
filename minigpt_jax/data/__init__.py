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
from minigpt_jax.data.ngram import ngram_cross_entropy
from minigpt_jax.data.shakespeare import cache_dir
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

__all__ = [
    "BPETokenizer",
    "Batch",
    "ByteTokenizer",
    "CharTokenizer",
    "Dataset",
    "Rows",
    "Source",
    "StreamDecoder",
    "Tokenizer",
    "Windows",
    "WordTokenizer",
    "cache_dir",
    "entropy_floor",
    "iter_text",
    "load_dataset",
    "load_tokenizer",
    "ngram_cross_entropy",
    "open_tokens",
    "read_text",
    "save_tokenizer",
    "tokenize_to_file",
    "tokenizer_from_dict",
]
