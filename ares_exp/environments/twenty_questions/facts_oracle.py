"""The oracle without a model: yes or no from the facts of the request, by the words of the question."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ares_exp.environments.twenty_questions.oracle_model import Answer, known_facts
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import Policy

FACTS_MODEL = "facts"

_SAME = {
    "living": "alive", "human": "person", "people": "person", "larger": "bigger", "big": "bigger", "large": "bigger",
    "edible": "eaten", "electric": "electricity", "electrical": "electricity", "wooden": "wood", "manmade": "man-made",
    "wear": "worn", "home": "house", "noise": "sound", "aquatic": "water", "wheeled": "wheel", "musical": "music",
}  # fmt: skip
"""Words of questions, and those of facts that they stand for."""

_SKIPPED = frozenset({
    "a", "an", "the", "it", "its", "this", "that", "these", "is", "are", "was", "were", "be", "been", "do", "does",
    "did", "can", "could", "will", "would", "has", "have", "had", "having", "of", "to", "in", "on", "at", "by",
    "with", "for", "from", "as", "than", "and", "you", "your", "we", "i", "my", "one", "ones", "any", "some",
    "something", "someone", "anything", "thing", "things", "object", "kind", "type", "sort", "made", "make",
    "makes", "making", "used", "use", "uses", "using", "found", "find", "usually", "typically", "normally",
    "commonly", "considered", "often", "generally", "there", "which", "what", "who", "more", "so", "ok", "okay",
})  # fmt: skip
"""Words without significance."""

_NEGATIONS = frozenset({"not", "no", "never", "without", "neither", "nor", "isn", "doesn", "can't", "cannot"})


class FactsOracle(Policy):
    """Answers yes or no when the facts cover every significant word of a question; else "don't know".

    Of several facts in one question all have to be true, after an "or" any. It knows no grammar: use it for first steps
    and tests, and a model (`policy@env.oracle=…`) for a run whose numbers count.
    """

    def __init__(self, vocabulary: Iterable[str] = ()) -> None:
        """Keeps the vocabulary.

        Args:
            vocabulary: Facts and names that are false of an object unless it has them; see `ObjectSet`.
        """
        self._vocabulary = [_words(text) for text in vocabulary]

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers the question in a request for the oracle."""
        true = [_words(fact) for fact in known_facts(request)]
        answer = self._answer(str(request.messages[0]["content"]), true)
        return LLMResponse.from_text(answer.value, model=FACTS_MODEL, finish_reason="stop")

    def _answer(self, question: str, true: Sequence[frozenset[str]]) -> Answer:
        if _NEGATIONS & set(re.findall(r"[a-z']+", question.lower())) or "n't" in question:
            return Answer.UNKNOWN
        answers = [self._of_clause(_words(clause), true) for clause in re.split(r"\bor\b", question, flags=re.I)]
        if Answer.YES in answers:
            return Answer.YES
        return Answer.UNKNOWN if Answer.UNKNOWN in answers else Answer.NO

    def _of_clause(self, words: frozenset[str], true: Sequence[frozenset[str]]) -> Answer:
        meant = {fact for fact in (*true, *self._vocabulary) if fact and fact <= words}
        meant = {fact for fact in meant if not any(fact < larger for larger in meant)}
        if not words or frozenset().union(*meant) != words:
            return Answer.UNKNOWN
        return Answer.YES if meant <= set(true) else Answer.NO


def _words(text: str) -> frozenset[str]:
    """Splits a text into its significant words, each as its stem."""
    words = (word for word in re.findall(r"[^\W_]+(?:-[^\W_]+)*", text.casefold()))
    return frozenset(_stem(_SAME.get(word, word)) for word in words if word not in _SKIPPED)


def _stem(word: str) -> str:
    """Cuts endings off: the same, roughly, for `write`, `writes` and `writing`, for `egg` and `eggs`."""
    for ending in ("ing", "ies", "es", "s", "ed", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word
