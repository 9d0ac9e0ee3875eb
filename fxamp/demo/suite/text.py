"""Real text for the suite: the source of Python's standard library, as characters or as subwords."""

import collections
import functools
import itertools
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from fxamp.demo.tasks import CHARACTERS, OTHER

WORD = re.compile(r" ?\w+|\s+|[^\w\s]+")
STDLIB = Path(sysconfig.get_paths()["stdlib"])
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
COMMON_WORDS = 800
"""How many of the most frequent words decide the merges."""


@functools.cache
def library() -> dict[str, str]:
    """The source of each module at the top of the standard library, by path."""
    return _read(STDLIB.glob("*.py"))


@functools.cache
def library_with_packages() -> dict[str, str]:
    """That of the modules in its packages too, without tests and without what was installed beside it."""
    files = (file for file in STDLIB.rglob("*.py") if not LEFT_OUT & {*file.relative_to(STDLIB).parts})
    return _read(files)


def _read(files: Iterable[Path]) -> dict[str, str]:
    return {str(file): file.read_text(encoding="utf-8", errors="replace") for file in sorted(files)}


def split(texts: Iterable[str]) -> tuple[str, str]:
    """Nine texts of ten to learn, and every tenth held out, each in one."""
    every = list(texts)
    return "\n".join(text for number, text in enumerate(every) if number % 10), "\n".join(every[::10])


def characters(text: str) -> Tensor:
    """Their numbers."""
    numbers = dict(zip(CHARACTERS, range(OTHER), strict=True))
    return torch.tensor([numbers.get(character, OTHER) for character in text], dtype=torch.uint8)


class Subwords:
    """Byte-pair encoding, learnt from a text.

        symbols = Subwords(text, size=256)
        symbols.encode("return self")

    A word becomes the longest known pieces from its start; a character that is in no piece becomes `OTHER`.
    """

    def __init__(self, text: str, size: int) -> None:
        words = collections.Counter(WORD.findall(text)).most_common(COMMON_WORDS)
        pieces = [(list(word), count) for word, count in words]
        self.numbers = dict(zip(CHARACTERS, range(OTHER), strict=True))
        while len(self.numbers) + 1 < size:
            self.numbers.setdefault(_merge(pieces), len(self.numbers) + 1)
        self.encode_word = functools.cache(self._encode_word)

    def encode(self, text: str) -> Tensor:
        """The numbers of its pieces."""
        return torch.tensor([number for word in WORD.findall(text) for number in self.encode_word(word)])

    def _encode_word(self, word: str) -> list[int]:
        numbers = []
        while word:
            end = next((end for end in range(len(word), 0, -1) if word[:end] in self.numbers), 1)
            numbers.append(self.numbers.get(word[:end], OTHER))
            word = word[end:]
        return numbers


def _merge(words: list[tuple[list[str], int]]) -> str:
    """Join the most frequent pair of neighbours everywhere; returns the new piece."""
    pairs: collections.Counter[tuple[str, str]] = collections.Counter()
    for pieces, count in words:
        for pair in itertools.pairwise(pieces):
            pairs[pair] += count
    left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
    for pieces, _ in words:
        for place in range(len(pieces) - 2, -1, -1):
            if pieces[place] == left and pieces[place + 1 : place + 2] == [right]:
                pieces[place : place + 2] = [left + right]
    return left + right
