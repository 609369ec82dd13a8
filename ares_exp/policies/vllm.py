"""The policy of a vLLM server, with its token ids."""

from __future__ import annotations

from typing import ClassVar

from ares_exp.policies.token_endpoint import TokenEndpointPolicy


class VllmPolicy(TokenEndpointPolicy):
    """Answers by a vLLM server. With a temperature other than 1, start it with `--logprobs-mode processed_logprobs`."""

    option: ClassVar[str] = "vllm"
