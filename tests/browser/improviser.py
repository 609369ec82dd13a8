"""A policy without a model, whose episodes are worth looking at: it looks around, errs, and solves some tasks."""

from random import Random

from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ThinkingData, Usage
from ares_exp.policies.policy import EpisodeSpec, Policy

LOOK = "I look at what is there first.\n\n```bash\nls -la . ; head -n 20 *.* 2>/dev/null | head -n 60\n```"
THINK = "The task names files in /app. I had better see them before I change anything, and keep a note of my plan."
NOTE = "I write down my plan.\n\n```bash\nprintf 'plan: look, change, check\\n' > notes.md\n```"
ERR = "Let me run the tests.\n\n```bash\npython3 -m pytest -q tests/ ; exit 2\n```"
SOLVED = "Now I know what to do.\n\n```bash\n/solution/solve.sh\n```"
SUBMIT = "That should be it.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
MORE = "That failed.\n\n```bash\nprintf 'there are no tests of ours here\\n' >> notes.md && cat notes.md\n```"
PRICE = 2e-6


class Improviser(Policy):
    """Solves a task as often as its skill says; the rest of an episode is the same each time."""

    needs_solution = True
    model_name = "improviser"

    def __init__(self, *, skill: float = 0.6, temperature: float = 0.0) -> None:
        self._skill = skill - temperature / 4
        self._temperature = temperature

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        random = Random(f"{episode.task_name} {episode.attempt} {self._skill}")
        ease = 0.3 * (len(episode.task_name) % 3 - 1)
        replies = [
            LOOK,
            NOTE,
            *([ERR, MORE] * random.randrange(3)),
            *([SOLVED] if random.random() < self._skill + ease else []),
            SUBMIT,
        ]
        return _Run(replies, random)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        raise NotImplementedError


class _Run:
    def __init__(self, replies: list[str], random: Random) -> None:
        self._replies = iter(replies)
        self._random = random

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        reply = next(self._replies)
        prompt = sum(len(str(message["content"])) for message in request.messages) // 4
        usage = Usage(prompt, len(reply) // 4 + self._random.randrange(40), reasoning_tokens=len(THINK) // 4)
        thinking = [ThinkingData(THINK)] if reply == LOOK else []
        return LLMResponse(
            [*thinking, TextData(reply)], usage.total_tokens * PRICE, usage, finish_reason="stop", model="improviser"
        )
