"""Fixtures of the tests of LTD's training: logged trees, their outcomes, and a ground made of them."""

from __future__ import annotations

import pytest

from research.ltd.candidates import CandidateTrees, log_candidates
from research.ltd.grounds import LoggedGround
from research.ltd.outcomes import Outcomes, split
from tests.research.ltd.engines import COSTS, LOGGING, OPTIONS, PROMPTS, SHAPE, engine


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> CandidateTrees:
    return log_candidates(
        engine(), PROMPTS, tmp_path_factory.mktemp("candidates"), LOGGING, name="toy"
    )


@pytest.fixture(scope="session")
def logged(trees: CandidateTrees) -> Outcomes:
    return Outcomes.of(list(trees.answers()), SHAPE, COSTS)


@pytest.fixture
def ground(trees: CandidateTrees) -> LoggedGround:
    return LoggedGround(*split([trees], SHAPE, COSTS, 0.2), OPTIONS)
