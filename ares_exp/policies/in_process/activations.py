"""Hidden states of a model during generation. They can be saved to files, or changed by the user's functions.

A state is the output of a module at one position of the token sequence. The option `positions: generated` saves, for
each token of a response, the state from which the token was sampled: first the state at the prompt's last position.

Each state is a row of a float32 `.npy` file, which numpy can memory-map. The states of a response are collected in
memory, and saved when the response is complete.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as settings

from ares_exp.config.targets import import_target
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import WarnOnce
from ares_exp.policies.in_process.sampling import Row
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.records.run_dir import atomic_file

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_UNSAFE = re.compile(r"[^\w.-]+")


@settings(frozen=True, kw_only=True, config={"extra": "forbid"})
class SelectedModule:
    """A module of the model.

    Attributes:
        layer: Index of a decoder layer, starting at 0. Negative indices count from the end. The states of a layer are
            the residual stream after the layer.
        module: Name of any module, instead of `layer`. For example, `model.layers.3.mlp`.
    """

    layer: int | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` unless exactly one of `layer` and `module` is set."""
        if (self.layer is None) == (self.module is None):
            raise ValueError("expected either `layer` or `module`")


@settings(frozen=True, kw_only=True, config={"extra": "forbid"})
class KeptStates(SelectedModule):
    """The hidden states to save: the outputs of one module, at some positions.

    Attributes:
        positions: `generated`, `prompt`, `all` (both), or a list of indices of generated tokens, starting at 0.
    """

    positions: Literal["generated", "prompt", "all"] | list[Annotated[int, Field(ge=0)]] = "generated"


@settings(frozen=True, kw_only=True, config={"extra": "forbid", "arbitrary_types_allowed": True})
class Hook(SelectedModule):
    """A function that receives the states of a module in every forward pass, and may replace them.

    Attributes:
        function: Dotted name of the function, for example `my_module.steer`, or the function itself in a script. It
            receives the states, with shape (1, positions, width), and a `ForwardPass`. It returns new states, or
            `None` to leave them unchanged.
    """

    function: str | Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The forward pass in which the function of a `Hook` is called.

    Attributes:
        module: Name of the module.
        episode: Episode of the response.
        prompt_length: Number of prompt tokens.
        num_generated: Number of generated tokens before this pass; 0 for the pass over the prompt.
    """

    module: str
    episode: EpisodeSpec
    prompt_length: int
    num_generated: int


def module_name(model: Any, selected: SelectedModule) -> str:
    """Returns the name of a selected module.

    Raises:
        PreflightError: The model has no such module.
    """
    layer, module = selected.layer, selected.module
    names = [name for name, _ in model.named_modules()]
    if module is not None:
        if module not in names:
            raise PreflightError(f"The model has no module {module!r}. Its modules are: {', '.join(names[1:]):.400}…")
        return module
    assert layer is not None
    count = model.config.get_text_config().to_dict()["num_hidden_layers"]
    number = layer + count if layer < 0 else layer
    found: str | None = next(
        (name for name in names if re.search(rf"(^|\.)(layers|h|blocks|block)\.{number}$", name)), None
    )
    if found is None or not 0 <= number < count:
        raise PreflightError(f"The model has no layer {layer}, only {count} layers. Set another `layer`, or `module`.")
    return found


class StateWatcher:
    """Saves and changes the hidden states of a model while it generates one response at a time."""

    def __init__(
        self, kept: Sequence[KeptStates], hooks: Sequence[Hook], output_dir: Path | None, max_bytes: int
    ) -> None:
        """Imports the functions of the hooks. `max_bytes` is the maximum total size of the saved states of a run."""
        if kept and output_dir is None:
            raise ConfigError("policy.activations needs a directory for the states: set policy.output_dir.")
        self._kept = kept
        self._hooks = [(hook, import_target(hook.function) if isinstance(hook.function, str) else hook.function)
                       for hook in hooks]  # fmt: skip
        self._directory = (output_dir or Path()) / "activations"
        self._max_bytes = self._left = max_bytes
        self._warn_once = WarnOnce(logger)
        self._size = 0
        self._states: dict[str, list[np.ndarray[Any, Any]]] = {}
        self._links: dict[str, dict[str, Any]] = {}

    def check(self, model: Any) -> None:
        """Checks that the model has all selected modules. Measures the states that earlier sessions saved.

        Raises:
            PreflightError: The model has no such module.
        """
        for selected in (*self._kept, *(hook for hook, _ in self._hooks)):
            module_name(model, selected)
        if self._kept:
            self._left = self._max_bytes - sum(file.stat().st_size for file in self._directory.rglob("*.npy"))

    @contextlib.contextmanager
    def watching(self, model: Any, row: Row) -> Iterator[None]:
        """Collects and changes states while the response `row` is generated.

        Registers hooks in the model on entry, and removes them on exit.
        """
        modules = dict(model.named_modules())
        self._size, self._states, self._links = 0, {}, {}
        watched: list[tuple[SelectedModule, Callable[..., Any]]] = [
            *((hook, functools.partial(_change, function)) for hook, function in self._hooks),
            *((kept, functools.partial(self._keep, kept)) for kept in self._kept),
        ]
        with contextlib.ExitStack() as registered:
            for selected, see in watched:
                name = module_name(model, selected)
                handle = modules[name].register_forward_hook(functools.partial(see, name, row, itertools.count()))
                registered.callback(handle.remove)
            try:
                yield
            finally:
                if row.finish is None:  # `save` is not called for an incomplete response
                    self._states = {}

    def save(self, spec: EpisodeSpec) -> Mapping[str, Any] | None:
        """Saves the states of the last response, a response of the episode `spec`.

        Returns its `activations`; `None` if it has no states, or if they would exceed the maximum size.
        """
        import numpy as np

        states, self._states = self._states, {}
        if not states:
            return None
        if self._size > self._left:
            self._warn_once(
                f"{self._directory} has reached policy.activations_max_bytes={self._max_bytes:,}. The "
                "activations of further responses are not stored."
            )
            return None
        self._left -= self._size
        place = self._new_place(spec)
        for name, parts in states.items():
            path, rows = place / f"{name}.npy", np.concatenate(parts)
            with atomic_file(path, sync=False) as file:
                np.save(file, rows)
            self._links[name] |= {"file": path.relative_to(self._directory.parent).as_posix(), "rows": len(rows)}
        return self._links

    def _keep(self, kept: KeptStates, name: str, row: Row, passes: Iterator[int], *seen: Any) -> None:
        states, number = _states_of(seen[-1], name)[0], next(passes)
        if row.finish is not None or row.given_up.is_set() or self._size > self._left:
            return
        is_whole_prompt = number == 0 and kept.positions in ("prompt", "all")
        chosen = states if is_whole_prompt else states[-1:] if _wants(kept.positions, number) else states[:0]
        rows = chosen.detach().float().cpu().numpy().copy()  # the array would share the memory of a tensor on the CPU
        self._size += rows.nbytes
        self._states.setdefault(name, []).append(rows)
        if isinstance(kept.positions, list):
            about: dict[str, Any] = {"positions": "tokens", "tokens": list(kept.positions)}
        else:
            about = {"positions": kept.positions, "first_position": 0 if is_whole_prompt else len(row.prompt) - 1}
        self._links.setdefault(name, about)

    def _new_place(self, spec: EpisodeSpec) -> Path:
        episode = f"{_UNSAFE.sub('_', spec.task_name) or '_'}__{spec.attempt}__{spec.retry}"
        for number in itertools.count():
            place = self._directory / episode / f"{number:05d}"
            with contextlib.suppress(FileExistsError):
                place.mkdir(parents=True)
                return place
        raise AssertionError("unreachable")


def _change(function: Any, name: str, row: Row, passes: Iterator[int], module: Any, given: Any, output: Any) -> Any:
    made = function(_states_of(output, name), ForwardPass(name, row.spec, len(row.prompt), next(passes)))
    if made is None:
        return None
    return (made, *output[1:]) if isinstance(output, tuple) else made


def _states_of(output: Any, name: str) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    if states.ndim != 3:
        raise ConfigError(f"Expected {name} to return (rows, positions, width), got the shape {tuple(states.shape)}.")
    return states


def _wants(positions: Any, token: int) -> bool:
    """Returns whether to save the state from which generated token number `token` (starting at 0) was sampled."""
    return token in positions if isinstance(positions, list) else positions in ("generated", "all")


def read_activations(run_dir: Path, response: LLMResponse) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the saved states of a response as memory-mapped arrays. Keys are the names of the modules.

    Args:
        run_dir: Directory of the run.
        response: Response from a trajectory.

    Raises:
        ConfigError: A file of states is missing, or is not in the run directory.
    """
    import numpy as np

    found = {}
    for name, link in (response.activations or {}).items():
        path = (run_dir / link["file"]).resolve()
        if not path.is_relative_to(run_dir.resolve()) or not path.is_file():
            raise ConfigError(f"Expected {link['file']!r} of {name} to be the path of a file in {run_dir}.")
        found[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    return found
