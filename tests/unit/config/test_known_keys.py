"""Which key a word stands for that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ares_exp.config.explain import suggest_key
from ares_exp.config.hydra_setup import set_up_hydra

MODELS = "`policy=anthropic` or `policy=openai` or another one"


@pytest.fixture(autouse=True)
def _options(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "nim.yaml").write_text("# a game\n_target_: nowhere.Nim\nmatches: [3]\n")
    set_up_hydra([tmp_path])
    yield
    set_up_hydra([])


@pytest.mark.parametrize(
    ("word", "argv", "expected"),
    [
        ("atempts", [], " Did you mean `attempts`?"),
        ("env.attempts", [], " Did you mean `attempts`?"),
        ("policy.temprature", ["policy=openai"], " Did you mean `policy.temperature`?"),
        (
            "policy.temprature",
            ["-m", "policy=openai,oracle", "seed=1,2"],
            " Did you mean `policy.temperature`?",
        ),
        ("policy.modl", ["experiment=pass_at_k"], " Did you mean `policy.model`?"),
        ("policy.model", [], f" It is an argument of {MODELS}: choose that option, too."),
        ("policy.modl", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("model", [], f" Did you mean `policy.model`, an argument of {MODELS}?"),
        ("env.dataste", ["env=swebench"], " Did you mean `env.dataset`?"),
        ("env.matchs", ["env=nim"], " Did you mean `env.matches`?"),
        ("env.matches", ["env=harbor"], " It is an argument of `env=nim`; `env=harbor` does not take it."),
        ("env.matches", [], " It is an argument of `env=nim`: choose that option, too."),
        (
            "env.oracle.modl",
            ["env=twenty_questions", "policy@env.oracle=openai"],
            " Did you mean `env.oracle.model`?",
        ),
        ("collector.jsn", ["collector=[json,jsonl]"], " Did you mean `collector.json`?"),
        ("collector.path", [], " Did you mean `collector.jsonl.path`, an argument of `collector=jsonl`?"),
        ("tracker.project", ["tracker=wandb"], " Did you mean `tracker.wandb.project`?"),
        ("agent.zzz", [], ""),
        ("zzz", ["budget=5", "nonsense", "env=gone"], ""),
    ],
)
def test_the_nearest_key_is_named(word: str, argv: list[str], expected: str) -> None:
    assert suggest_key(word, argv) == expected
