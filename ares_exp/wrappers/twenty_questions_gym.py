"""`TwentyQuestionsGym`: twenty questions as a `gymnasium.Env`. It is what `ares_exp/TwentyQuestions-v0` makes."""

from __future__ import annotations

from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.wrappers.source_gym import SourceGym


class TwentyQuestionsGym(SourceGym):
    """Plays twenty questions: arguments of `TwentyQuestionsEnvironments` (`objects`, `questions`, …), of `SourceGym`.

    It needs neither container nor agent: those two arguments change nothing.
    """

    source = TwentyQuestionsEnvironments
