"""Usage of an episode: its policy's answers, their tokens and cost."""

from __future__ import annotations

from dataclasses import dataclass

from ares_exp.llms.response import LLMResponse


@dataclass(slots=True)
class EpisodeUsage:
    """Totals over the steps of an episode, so far.

    Attributes:
        num_steps: Answers that were given.
        unanswered: Steps without an answer, because the time was up before.
        prompt_tokens, generated_tokens: Of the answers.
        cost: Of the answers, in US dollars.
        length_stops: Answers that ended at the bound on generated tokens.
    """

    num_steps: int = 0
    unanswered: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    length_stops: int = 0

    @property
    def step_count(self) -> int:
        """Time steps since FIRST."""
        return self.num_steps + self.unanswered

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def add(self, action: LLMResponse | object | None) -> None:
        """Counts one step and its response, if there is one. The cost of another package's action is not known."""
        if action is None:
            self.unanswered += 1
            return
        self.num_steps += 1
        if isinstance(action, LLMResponse):
            self.pay(action)

    def pay(self, answer: LLMResponse) -> None:
        """Counts what an answer costs, also if the episode does not get it."""
        self.prompt_tokens += answer.usage.prompt_tokens
        self.generated_tokens += answer.usage.generated_tokens
        self.cost += answer.cost
        self.length_stops += answer.finish_reason == "length"
