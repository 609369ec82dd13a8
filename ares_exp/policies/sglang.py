"""The policy of an SGLang server, with its token ids, whose weights can be changed."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ares_exp.errors import ConfigError
from ares_exp.llms.openai_chat_stream import StreamedCompletion
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.policy import Weights
from ares_exp.policies.token_endpoint import TokenEndpointPolicy


class SglangPolicy(TokenEndpointPolicy):
    """Answers by an SGLang server, and has it load weights that `update` names by their directory."""

    option: ClassVar[str] = "sglang"

    async def send_weights(self, version: str, weights: Weights) -> None:
        """As `TokenEndpointPolicy.send_weights`: a directory that the server can read, too."""
        if not isinstance(weights, Path):
            raise ConfigError(
                "policy=sglang takes new weights as a directory of a saved model that its server can read, got "
                f"{type(weights).__name__}."
            )
        wire = EndpointWire(self.option, "update_weights_from_disk", "success", StreamedCompletion)
        server = self._endpoint.beside(wire, base_url=self._endpoint.base_url.removesuffix("/v1"))
        try:
            body = {"model_path": str(weights), "weight_version": version}
            await server.post(body, timeout_sec=self.timeout_sec)
        finally:
            await server.close()
