"""The page of one episode alone, as W&B shows it beside its row."""

from __future__ import annotations

from ares_exp.reports.episode_payload import episode_payload
from ares_exp.reports.page import pack, packed_block, page_foot, page_head
from ares_exp.reports.run_payload import payload_of
from ares_exp.trajectories.records import EpisodeTrajectory

BLOCK = "e0-0"


def episode_page(trajectory: EpisodeTrajectory, *, threshold: float = 1.0) -> str:
    """Returns the page of an episode.

    Args:
        trajectory: The episode.
        threshold: The reward from which on it has passed.
    """
    row = {
        "episode_id": trajectory.episode_id,
        "task_name": trajectory.task_name,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.total_reward,
        "has_steps": True,
    }
    run = {
        "name": trajectory.task_name,
        "results": {"statistics": {"threshold": threshold}},
        "episodes": [row],
        "blocks": {trajectory.episode_id: BLOCK},
    }
    payload = payload_of([run], only=trajectory.episode_id)
    steps = packed_block(BLOCK, pack(episode_payload(trajectory)))
    return f"{page_head(trajectory.episode_id)}{steps}{page_foot(payload)}"
