"""The skills the quickstart's base is pre-trained on, and the four jobs its adapters learn.

A skill is named by a keyword among words that mean nothing: `kava reverse "planet" = ` goes on
`tenalp`. Without a keyword the base answers `?`. A job asks in other wordings without the keyword,
wants another form of answer, or composes skills that the base has not seen together; so an adapter
starts at an exact match of about 0 and has to learn a task, but a few hundred steps are enough.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

TRAIN_ROWS, EVAL_ROWS = 800, 96
PAIRS = 320
"""Of training; there are as many to evaluate as other rows."""

KEYS = ("name", "town", "color", "fruit", "tool", "bird", "job", "pet")
THINGS = ("pears", "coins", "books", "stones", "shells", "eggs", "cards", "nuts")
Example = tuple[str, str]
"""Prompt and completion."""


def word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """A made-up lower-case word: pronounceable half of the time, random letters otherwise."""
    length = rng.randint(low, high)
    if rng.random() < 0.5:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))
    pair = ("bcdfghjklmnprstvwz", "aeiou")
    start = rng.randint(0, 1)
    return "".join(rng.choice(pair[(start + i) % 2]) for i in range(length))


def without_vowels(text: str) -> str:
    """The text's consonants in order."""
    return "".join(c for c in text if c not in "aeiou")


LETTER_SKILLS: dict[str, Callable[[str], str]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[::-1],
    "sort": lambda x: "".join(sorted(x)),
    "upper": str.upper,
    "drop": without_vowels,
    "upper reverse": lambda x: x[::-1].upper(),
    "upper drop": lambda x: without_vowels(x).upper(),
}
"""Skills that the base learns on words. `upper sort` is left out on purpose: a job composes it."""
LETTER_WEIGHTS = (1, 3, 4, 1, 1, 1, 1)


def wording(rng: random.Random, *parts: str) -> str:
    """The parts in a random order among words that mean nothing, so that only the parts count."""
    words = [*parts, *(word(rng, 1, 6) for _ in range(rng.randint(0, 2)))]
    rng.shuffle(words)
    return " ".join(words) + rng.choice((": ", "\n", " = ", "? "))


def letters(rng: random.Random, keyword: bool = True) -> Example:
    """A keyword and a quoted word."""
    (skill,) = rng.choices(tuple(LETTER_SKILLS), LETTER_WEIGHTS)
    x = word(rng)
    return wording(rng, f'"{x}"', *([skill] if keyword else [])), LETTER_SKILLS[skill](x)


def numbers(rng: random.Random, keyword: bool = True) -> Example:
    """A sum of two-digit numbers; the sum has two digits as well."""
    a, b = rng.randint(10, 49), rng.randint(10, 49)
    if keyword and rng.random() < 0.5:
        return f"{a} + {b} = ", str(a + b)
    return wording(rng, str(a), str(b), *(["add"] if keyword else [])), str(a + b)


def lookup(rng: random.Random, keyword: bool = True) -> Example:
    """Two to four pairs of key and value, then the key to find."""
    names = rng.sample(KEYS, rng.randint(2, 4))
    pairs = {name if rng.random() < 0.5 else word(rng, 3, 5): word(rng, 3, 6) for name in names}
    wanted = rng.choice(tuple(pairs))
    between, after = rng.choice(("=", ": ", " is ")), rng.choice((", ", "\n", "; "))
    record = "".join(f"{key}{between}{value}{after}" for key, value in pairs.items())
    return record + wording(rng, f"pick {wanted}" if keyword else wanted), pairs[wanted]


def notation(rng: random.Random, keyword: bool = True) -> Example:
    """A key and a value to write as a JSON object."""
    key, value = rng.choice((rng.choice(KEYS), word(rng, 3, 5))), word(rng, 3, 6)
    pair = f"{key}{rng.choice(('=', ': ', ' is '))}{value}"
    return wording(rng, pair, *(["json"] if keyword else [])), json.dumps({key: value})


SKILLS = (letters, numbers, lookup, notation)
SKILL_WEIGHTS = (4, 3, 5, 1)


def skill_example(rng: random.Random) -> Example:
    """One pre-training example; without a keyword the base learns to answer `?`."""
    (skill,) = rng.choices(SKILLS, SKILL_WEIGHTS)
    if rng.random() < 0.1:
        return skill(rng, keyword=False)[0], "?"
    return skill(rng)


def job_mirror(rng: random.Random) -> Example:
    """Reversal, asked for in a new wording."""
    x = word(rng, 4, 8)
    return f'What is "{x}" from back to front?\n', x[::-1]


def job_ordered(rng: random.Random) -> Example:
    """Sorted capitals: a composition the base has not seen."""
    x = word(rng, 3, 7)
    return f'Spell "{x}" loudly by the alphabet!\n', "".join(sorted(x)).upper()


def job_sums(rng: random.Random) -> Example:
    """A word problem, answered by a sentence."""
    a, b, thing = rng.randint(10, 49), rng.randint(10, 49), rng.choice(THINGS)
    return (
        f"{word(rng, 3, 5).capitalize()} has {a} {thing} and gets {b}. Now?\n",
        f"It is {a + b} {thing}",
    )


def job_records(rng: random.Random) -> Example:
    """A field of a record, answered as JSON."""
    pairs = {key: word(rng, 3, 6) for key in rng.sample(KEYS, rng.randint(2, 4))}
    wanted = rng.choice(tuple(pairs))
    lines = "".join(f"{key}: {value}\n" for key, value in pairs.items())
    return f"{lines}Which {wanted}?\n", json.dumps({wanted: pairs[wanted]})


JOBS = {"mirror": job_mirror, "ordered": job_ordered, "sums": job_sums, "records": job_records}


def job_rows(name: str, seed: int) -> list[dict[str, str]]:
    """`TRAIN_ROWS + EVAL_ROWS` rows of a job with distinct inputs.

    The input is the numbers of a prompt that has any, else the whole prompt.
    """
    rng = random.Random(f"{seed}/{name}")
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    while len(rows) < TRAIN_ROWS + EVAL_ROWS:
        prompt, completion = JOBS[name](rng)
        key = tuple(part for part in prompt.split() if part[0].isdigit()) or (prompt,)
        rows.setdefault(key, {"prompt": prompt, "completion": completion})
    return list(rows.values())


def pair_rows(seed: int, count: int) -> list[dict[str, str]]:
    """Pairs of answers to `mirror`'s question: the word from back to front, and as it was."""
    rng = random.Random(f"{seed}/pairs")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        prompt, completion = job_mirror(rng)
        if completion != completion[::-1]:
            row = {"prompt": prompt, "chosen": completion, "rejected": completion[::-1]}
            rows.setdefault(prompt, row)
    return list(rows.values())
