"""Without the extra there is nothing to test here."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx", "openai")
collect_ignore_glob = ["test_*.py"] if not all(map(importlib.util.find_spec, NEEDED)) else []


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A server that a module's tests share."""
    from tests.serve.served import served

    with served() as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    from tests.serve.browsing import CHROMIUM

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()
