"""The values of `durability`: how much of a run a power cut may lose."""

from __future__ import annotations

from typing import Literal

Durability = Literal["none", "episode", "step"]
"""Data that a power cut may lose: `none` all that the kernel had not written yet, `episode` only running episodes,
`step` only the last moments. `kill -9` loses nothing with any of them: written data is in the kernel."""
