from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse


class Model:
    def __init__(self, *replies: str | LLMResponse) -> None:
        self.requests: list[LLMRequest] = []
        self._replies = [one if isinstance(one, LLMResponse) else LLMResponse.from_text(one) for one in replies]

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.requests.append(request)
        return self._replies.pop(0)

    @property
    def told(self) -> list[str]:
        return [str(request.messages[-1]["content"]) for request in self.requests]
