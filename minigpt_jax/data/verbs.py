"""The course's verb grammar: 20 verbs x 6 tenses x 3 persons, each English cell with its Spanish pair. No download.

**How English fits V = 64.** Ids 0, 1, 2 are <pad>, <bos>, <eos>. Bases and third-person forms are whole words (20 + 20,
with ``is`` and ``has``), since agreement is what the grammar tests: ``works`` is ONE token. ``am``, ``are`` and the
irregular pasts are whole too (was were had did went came saw ate wrote). Two suffix tokens follow a base: ``-ed`` for
the regular past and participle (work -ed = worked, study -ed = studied), ``-en`` for irregular participles (be -en =
been, do -en = done); the participles of come and have are the words ``come`` and ``had``. With I, you, he, will, going,
to and the comma that makes 63 ids, one to spare. Over-regular forms have a spelling as well (go -ed = goed), so that a
model's mistakes can be read and probed.

**Spanish** adds its word forms whole, and ``es:``, ``en:``, ``/``: 272 ids, below 512. A spelling that both languages
share (he, come, has) is one id.

**Held out** for validation: the "going to" future of eight verbs, all persons; stratified by (verb, tense), as one of
the course's two splits is. Its other split holds out four verbs whole, which says something of a model that reads
letters or stems; here a word is a token, and a row of the table that training never reads can't be right.
"""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from minigpt_jax.data.tokenizers import WordTokenizer

REGULAR = ("work", "play", "walk", "talk", "listen", "watch", "study", "finish", "start", "look", "want", "like")
# Base: third person, past (1st, 2nd, 3rd person), participle.
IRREGULAR = {
    "be": ("is", ("was", "were", "was"), "been"),
    "have": ("has", ("had",) * 3, "had"),
    "do": ("does", ("did",) * 3, "done"),
    "go": ("goes", ("went",) * 3, "gone"),
    "come": ("comes", ("came",) * 3, "come"),
    "see": ("sees", ("saw",) * 3, "seen"),
    "eat": ("eats", ("ate",) * 3, "eaten"),
    "write": ("writes", ("wrote",) * 3, "written"),
}
VERBS = (*REGULAR, *IRREGULAR)
TENSES = ("infinitive", "present_simple", "past_simple", "past_participle", "future_will", "future_going_to")
PERSONS = ("1sg", "2sg", "3sg")
HELD_OUT = ("walk", "talk", "finish", "start", "see", "come", "eat", "write")
HELD_OUT_TENSE = "future_going_to"

# Infinitive; present, preterite; participle; future stem. Regular ones by their ending.
SPANISH = {
    "work": "trabajar", "walk": "caminar", "talk": "hablar", "listen": "escuchar", "watch": "mirar",
    "study": "estudiar", "finish": "terminar", "look": "mirar", "like": "gustar", "eat": "comer",
    "play": ("jugar", "juego juegas juega", "jugué jugaste jugó", "jugado", "jugar"),
    "start": ("empezar", "empiezo empiezas empieza", "empecé empezaste empezó", "empezado", "empezar"),
    "want": ("querer", "quiero quieres quiere", "quise quisiste quiso", "querido", "querr"),
    "be": ("ser", "soy eres es", "fui fuiste fue", "sido", "ser"),
    "have": ("tener", "tengo tienes tiene", "tuve tuviste tuvo", "tenido", "tendr"),
    "do": ("hacer", "hago haces hace", "hice hiciste hizo", "hecho", "har"),
    "go": ("ir", "voy vas va", "fui fuiste fue", "ido", "ir"),
    "come": ("venir", "vengo vienes viene", "vine viniste vino", "venido", "vendr"),
    "see": ("ver", "veo ves ve", "vi viste vio", "visto", "ver"),
    "write": ("escribir", "escribo escribes escribe", "escribí escribiste escribió", "escrito", "escribir"),
}  # fmt: skip
_SPANISH_REGULAR = {"ar": ("o as a", "é aste ó", "ado"), "er": ("o es e", "í iste ió", "ido")}


class Cell(NamedTuple):
    """One cell of the grid. The infinitive is the same for all persons."""

    english: str
    spanish: str
    lemma: str
    tense: str
    person: str


def cells() -> list[Cell]:
    """All 360 cells, verb by verb."""
    return [
        Cell(_english(lemma, tense, person), _spanish(lemma, tense, person), lemma, tense, PERSONS[person])
        for lemma in VERBS
        for tense in TENSES
        for person in range(3)
    ]


def sentences(seed: int = 0, spanish: bool = False) -> list[str]:
    """Every training example once, in an order that `seed` decides; 420 English ones, 640 with `spanish`.

    English: each cell ("he will work"), and per verb and tense the drill "I work , you work , he works" (8 tokens).
    With `spanish`: each pair in both directions ("es: yo trabajo / en: I work", "en: I work / es: yo trabajo").
    """
    return [text for _, text in _shuffled(seed, spanish)]


def split(seed: int = 0, spanish: bool = False) -> tuple[list[str], list[str]]:
    """(train, validation) sentences. Validation is `HELD_OUT_TENSE` of the `HELD_OUT` verbs: combinations that training
    lacks, of words that it has."""
    examples = _shuffled(seed, spanish)
    train = [text for cell, text in examples if not _held_out(cell)]
    return train, [text for cell, text in examples if _held_out(cell)]


def _held_out(cell: Cell) -> bool:
    return cell.lemma in HELD_OUT and cell.tense == HELD_OUT_TENSE


def word_tokenizer(spanish: bool = False) -> WordTokenizer:
    """63 ids for English; below 512 with Spanish. The same in every run."""
    words = [*WordTokenizer.specials, "I", "you", "he", ",", "will", "going", "to", "-ed", "-en", *VERBS]
    words += [_third(lemma) for lemma in VERBS] + ["am", "are"]
    words += [past for _, pasts, _ in IRREGULAR.values() for past in pasts]
    if spanish:
        words += ["es:", "en:", "/", *sorted({word for cell in cells() for word in cell.spanish.split()})]
    compounds = {_add(base, suffix): (base, suffix) for base in VERBS for suffix in ("-ed", "-en")}
    return WordTokenizer(dict.fromkeys(words), compounds)


def token_rows(texts: Iterable[str], tokenizer: WordTokenizer) -> list[np.ndarray]:
    """Each text as <bos> ... <eos>, int32."""
    return [np.array([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id], np.int32) for text in texts]


def entropy_floor(rows: Sequence[Sequence[int]]) -> float:
    """Mean entropy, in nats per token, of the next token given its whole prefix in the row; the first token is given.

    The lowest mean cross-entropy that any causal model can reach on exactly these rows, repeats included.
    """
    rows = [tuple(int(token) for token in row) for row in rows]
    prefixes = collections.Counter(row[:t] for row in rows for t in range(1, len(row)))
    continued = collections.Counter(row[: t + 1] for row in rows for t in range(1, len(row)))
    nats = sum(count * math.log(prefixes[path[:-1]] / count) for path, count in continued.items())
    return nats / max(1, prefixes.total())


def _shuffled(seed: int, spanish: bool) -> list[tuple[Cell, str]]:
    grid = cells()
    if spanish:
        pairs = [(c, f"es: {c.spanish}", f"en: {c.english}") for c in grid]
        examples = [(c, f"{a} / {b}") for c, x, y in pairs for a, b in ((x, y), (y, x))]
    else:
        drills = [grid[i : i + 3] for i in range(0, len(grid), 3) if grid[i].tense != "infinitive"]
        examples = [(c, c.english) for c in grid]
        examples += [(drill[0], " , ".join(c.english for c in drill)) for drill in drills]
    examples = list({text: (cell, text) for cell, text in examples}.values())
    order = np.random.Generator(np.random.Philox(np.random.SeedSequence((0x7E5B, seed)))).permutation(len(examples))
    return [examples[i] for i in order]


def _english(lemma: str, tense: str, person: int) -> str:
    pronoun = ("I", "you", "he")[person]
    am = ("am", "are", "is")[person]
    if tense == "infinitive":
        return f"to {lemma}"
    if tense == "present_simple":
        form = am if lemma == "be" else _third(lemma) if person == 2 else lemma
        return f"{pronoun} {form}"
    if tense == "past_simple":
        return f"{pronoun} {IRREGULAR[lemma][1][person] if lemma in IRREGULAR else _add(lemma, '-ed')}"
    if tense == "past_participle":
        participle = IRREGULAR[lemma][2] if lemma in IRREGULAR else _add(lemma, "-ed")
        return f"{pronoun} {'has' if person == 2 else 'have'} {participle}"
    return f"{pronoun} will {lemma}" if tense == "future_will" else f"{pronoun} {am} going to {lemma}"


def _third(lemma: str) -> str:
    if lemma in IRREGULAR:
        return IRREGULAR[lemma][0]
    if lemma.endswith(("ch", "sh")):
        return lemma + "es"
    return lemma[:-1] + "ies" if lemma == "study" else lemma + "s"


def _add(base: str, suffix: str) -> str:
    """The spelling of a base and -ed or -en; a right participle in -en where there is one."""
    if suffix == "-en" and base in IRREGULAR and base not in ("have", "come"):
        return IRREGULAR[base][2]
    if base == "study":
        return "studi" + suffix[1:]
    return base + suffix[2:] if base.endswith("e") else base + suffix[1:]


def _spanish(lemma: str, tense: str, person: int) -> str:
    entry = SPANISH[lemma]
    if isinstance(entry, str):
        stem, ending = entry[:-2], entry[-2:]
        present, past, participle = _SPANISH_REGULAR[ending]
        entry = (
            entry,
            " ".join(stem + end for end in present.split()),
            " ".join(stem + end for end in past.split()),
            stem + participle,
            entry,
        )
    infinitive, present, past, participle, future = entry
    if tense == "infinitive":
        return infinitive
    subject = ("yo", "tú", "él")[person]
    if lemma == "like":  # what is liked is the subject: always third person
        subject, person = ("me", "te", "le")[person], 2
    verb = {
        "present_simple": present.split()[person],
        "past_simple": past.split()[person],
        "past_participle": f"{('he', 'has', 'ha')[person]} {participle}",
        "future_will": future + ("é", "ás", "á")[person],
        "future_going_to": f"{('voy', 'vas', 'va')[person]} a {infinitive}",
    }[tense]
    return f"{subject} {verb}"
