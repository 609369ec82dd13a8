"""Hidden states of a model during generation. They can be saved to files, or changed by the user's functions.

A state is the output of a module at one position of the token sequence. The option `positions: generated` saves, for
each token of a response, the state from which the token was sampled: first the state at the prompt's last position.

Each state is a row of a float32 `.npy` file, which numpy can memory-map. Complete files get their final names.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as settings

from ares_exp.config.targets import import_target
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.in_process.sampling import Row
from ares_exp.policies.policy import EpisodeSpec

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

HEADER_BYTES = 128
_UNSAFE = re.compile(r"[^\w.-]+")

Positions = Literal["generated", "prompt", "all"]


@settings(frozen=True, config={"extra": "forbid"})
class KeptStates:
    """The hidden states to save: the outputs of one module, at some positions.

    Attributes:
        layer: Index of a decoder layer, starting at 0. Negative indices count from the end. The saved state is the
            residual stream after the layer.
        module: Name of any module, instead of `layer`. For example, `model.layers.3.mlp`.
        positions: `generated`, `prompt`, `all` (both), or a list of indices of generated tokens, starting at 0.
    """

    layer: int | None = None
    module: str | None = None
    positions: Positions | list[Annotated[int, Field(ge=0)]] = "generated"

    def __post_init__(self) -> None:
        """Raises `ValueError` unless exactly one of `layer` and `module` is set."""
        if (self.layer is None) == (self.module is None):
            raise ValueError("expected either `layer` or `module`")


@settings(frozen=True, config={"extra": "forbid", "arbitrary_types_allowed": True})
class Hook:
    """A function that receives the states of a module in every forward pass, and may replace them.

    Attributes:
        function: Dotted name of the function, for example `my_module.steer`, or the function itself in a script. It
            receives the states, with shape (1, positions, width), and a `ForwardPass`. It returns new states, or
            `None` to leave them unchanged.
        layer: Index of a decoder layer; see `KeptStates`.
        module: Name of a module; see `KeptStates`.
    """

    function: str | Callable[[Any, Any], Any]
    layer: int | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` unless exactly one of `layer` and `module` is set."""
        if (self.layer is None) == (self.module is None):
            raise ValueError("expected either `layer` or `module`")


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


def module_name(model: Any, layer: int | None, module: str | None) -> str:
    """Returns the name of the module that `layer` or `module` selects.

    Raises:
        PreflightError: The model has no such module.
    """
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
        self._directory = None if output_dir is None else output_dir / "activations"
        self._max_bytes = max_bytes
        self._left: int | None = None
        self._states: _States | None = None
        self._is_full = False

    def check(self, model: Any) -> None:
        """Checks that the model has all selected modules.

        Raises:
            PreflightError: The model has no such module.
        """
        selected: list[KeptStates | Hook] = [*self._kept, *(hook for hook, _ in self._hooks)]
        for one in selected:
            module_name(model, one.layer, one.module)

    @contextlib.contextmanager
    def watching(self, model: Any, row: Row) -> Iterator[None]:
        """Saves and changes states while the response `row` is generated.

        Registers hooks in the model on entry, and removes them on exit. Deletes the files of an incomplete response.
        """
        modules = dict(model.named_modules())
        handles = []
        self._states = None
        try:
            for hook, function in self._hooks:
                name = module_name(model, hook.layer, hook.module)
                see = functools.partial(_change, name=name, function=function, row=row, passes=itertools.count())
                handles.append(modules[name].register_forward_hook(see))
            for kept in self._kept:
                name = module_name(model, kept.layer, kept.module)
                see = functools.partial(self._keep, kept, name, row, itertools.count())
                handles.append(modules[name].register_forward_hook(see))
            yield
        finally:
            for handle in handles:
                handle.remove()
            if row.finish is None and self._states is not None:
                self._give_back(self._states.drop())

    def links(self) -> Mapping[str, Any] | None:
        """Completes the files of the last response. Returns its `activations`; `None` if no states were saved."""
        states, self._states = self._states, None
        return None if states is None or states.is_dropped else states.complete()

    def _keep(self, kept: KeptStates, name: str, row: Row, passes: Iterator[int], *seen: Any) -> None:
        states, number = _states_of(seen[-1], name)[0], next(passes)
        if row.finish is not None or row.given_up.is_set():
            return
        first = 0
        if number:
            chosen = states[-1:] if _wants(kept.positions, number) else states[:0]
        else:
            chosen = _of_prompt(kept.positions, states)
            first = 0 if kept.positions in ("prompt", "all") else len(row.prompt) - 1
        if self._states is None:
            self._states = _States(self._place(row.spec))
        if self._states.is_dropped:
            return
        rows = chosen.detach().float().cpu().numpy()
        if self._take(rows.nbytes):
            self._states.append(name, kept.positions, first, rows)
        else:
            self._give_back(self._states.drop())

    def _take(self, size: int) -> bool:
        """Reserves `size` bytes for saved states. Returns `False` if this would exceed `max_bytes`."""
        assert self._directory is not None
        if self._left is None:
            there = sum(file.stat().st_size for file in self._directory.rglob("*.npy"))
            self._left = self._max_bytes - there
        if size > self._left:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    f"{self._directory} has reached policy.activations_max_bytes={self._max_bytes:,}. The "
                    "activations of further responses are not stored."
                )
            return False
        self._left -= size
        return True

    def _give_back(self, size: int) -> None:
        if self._left is not None:
            self._left += size

    def _place(self, spec: EpisodeSpec) -> Path:
        assert self._directory is not None
        episode = f"{_UNSAFE.sub('_', spec.task_name) or '_'}__{spec.attempt}__{spec.retry}"
        for number in itertools.count():
            place = self._directory / episode / f"{number:05d}"
            with contextlib.suppress(FileExistsError):
                place.mkdir(parents=True)
                return place
        raise AssertionError("unreachable")


class _States:
    def __init__(self, place: Path) -> None:
        self._place = place
        self._arrays: dict[str, GrowingArray] = {}
        self._links: dict[str, dict[str, Any]] = {}
        self.is_dropped = False

    def append(self, name: str, positions: Any, first: int, rows: np.ndarray[Any, Any]) -> None:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = GrowingArray(self._place / f"{name}.npy")
            at = {"tokens": list(positions)} if isinstance(positions, list) else {"first_position": first}
            file = array.path.relative_to(self._place.parents[2]).as_posix()
            self._links[name] = {"file": file, "positions": positions if isinstance(positions, str) else "tokens"} | at
        array.append(rows)

    def complete(self) -> Mapping[str, Any]:
        for name, array in self._arrays.items():
            array.complete()
            self._links[name]["rows"] = array.count
        return self._links

    def drop(self) -> int:
        self.is_dropped = True
        size = sum(array.drop() for array in self._arrays.values())
        self._arrays = {}
        with contextlib.suppress(OSError):
            self._place.rmdir()
        return size


@dataclass(slots=True)
class GrowingArray:
    """A `.npy` file of float32 rows that is written row by row. Its name ends with `.part` until it is complete."""

    path: Path
    count: int = 0
    width: int = 0
    _file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def _part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part")

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        """Writes rows to the end of the file. `rows` has the shape (rows, width)."""
        if self._file is None:
            self._file = self._part.open("xb")
            self._file.write(bytes(HEADER_BYTES))
        self._file.write(rows.astype("<f4").tobytes())
        self.count, self.width = self.count + rows.shape[0], rows.shape[1]

    def complete(self) -> None:
        """Writes the header, which contains the number of rows, and renames the file to its final name."""
        assert self._file is not None
        about = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self.count}, {self.width}), }}"
        with self._file as file:
            file.seek(0)
            length = HEADER_BYTES - 10
            file.write(b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + about.ljust(length - 1).encode() + b"\n")
        self._part.rename(self.path)

    def drop(self) -> int:
        """Deletes the incomplete file. Returns the total size of the appended rows in bytes."""
        if self._file is not None:
            self._file.close()
        self._part.unlink(missing_ok=True)
        return self.count * self.width * 4


def _change(module: Any, given: Any, output: Any, *, name: str, function: Any, row: Row, passes: Iterator[int]) -> Any:
    made = function(_states_of(output, name), ForwardPass(name, row.spec, len(row.prompt), next(passes)))
    if made is None:
        return None
    return (made, *output[1:]) if isinstance(output, tuple) else made


def _states_of(output: Any, name: str) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    if states.ndim != 3:
        raise ConfigError(f"Expected {name} to return (rows, positions, width), got the shape {tuple(states.shape)}.")
    return states


def _of_prompt(positions: Any, prompt: Any) -> Any:
    if positions in ("prompt", "all"):
        return prompt
    return prompt[-1:] if _wants(positions, 0) else prompt[:0]


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
