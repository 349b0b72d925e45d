"""Fixtures of the tests of GGUF files."""

from pathlib import Path

import pytest

from tests.checkpoints.gguf_files import ARCHITECTURES, write_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder / f"{name}.gguf", name) for name in ARCHITECTURES}
