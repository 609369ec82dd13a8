"""The rule on real tokens: each is as likely now, after what stands before it in its row, as when it was sampled."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.policies.transformers_policy import TransformersPolicy
from ares_exp.training.sequences import TrainingSequence, sequences_of
from tests.tiny_model import largest_gap, tiny_model, tiny_tokenizer
from tests.unit.training.counted_tasks import TASKS, options

pytestmark = pytest.mark.train

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Sequence[TrainingSequence]]:
    """A model, and rows of episodes that it answered together: of two turns, and forked by a rewritten history."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("sampled"))
        return asyncio.run(sample(options(Path("options").absolute())))


async def sample(folder: Path) -> tuple[Any, Sequence[TrainingSequence]]:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    rows: list[TrainingSequence] = []
    for forgets in ("false", "true"):
        policy = TransformersPolicy.of(model, tokenizer, max_output_tokens=12)
        overrides = ["env=counted", f"env.forgets={forgets}", f"hydra.run.dir=run-{forgets}", "tracker=none"]
        async with ares_exp.driven(overrides, policy=policy, config_dirs=[folder]) as driver:
            async for episode in driver.submit(TASKS, n=2):
                assert episode.trajectory is not None
                rows += sequences_of(episode.trajectory).rows
    return model, rows


async def test_sampled_tokens_are_equally_likely_now(sampled: Any) -> None:
    model, rows = sampled
    assert {row.made for row in rows} == {"clean", "forked"}
    assert {len(row.steps) for row in rows} == {1, 2}
    assert largest_gap(model, rows) < TOLERANCE


async def test_shifted_mask_is_detected(sampled: Any) -> None:
    model, rows = sampled
    shifted = [replace(row, mask=(0, *row.mask[:-1]), logprobs=(0.0, *row.logprobs[:-1])) for row in rows]
    assert largest_gap(model, shifted) > 10 * TOLERANCE


async def test_retokenized_text_is_detected(sampled: Any) -> None:
    """As a template or a tokenizer changes them: one token of the context is another one."""
    model, rows = sampled
    for row in rows:
        place = row.mask.index(1) - 1
        again = replace(row, ids=(*row.ids[:place], (row.ids[place] + 1) % 250, *row.ids[place + 1 :]))
        assert largest_gap(model, [again]) > 10 * TOLERANCE
