"""Fixtures of all tests: the embedded default model, and the number of torch's threads."""

import contextlib
import faulthandler
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  before anything imports the distutils of Python itself, which setuptools then refuses

import pytest
import torch

from specengine.checkpoints import embedded
from specengine.errors import CacheFolderError
from specengine.files import cache_dir
from tests.costs.kept import unlawful
from tests.slices import leave_the_rest

STARTED = time.time()
TESTS = Path(__file__).parent
# of a case: whether coverage records it
RECORDED = pytest.StashKey[bool]()
# folders of tests of the package beside those that are named as its folders are
OF_THE_PACKAGE = "graphs", "kernels"

with contextlib.suppress(ImportError):  # a machine with a GPU and no network may have no Hypothesis
    from hypothesis import settings

    # the same examples in every run, all or a quarter of them; or others each time, kept where one fails;
    # --hypothesis-profile picks one
    settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
    settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
    settings.register_profile("explore", settings.get_profile("default"), deadline=None)
    settings.load_profile("ci" if os.environ.get("CI") else "explore")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_configure() -> None:
    # what a shell starts in the background ignores Ctrl-C, and so would the processes that tests start
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # tiny models gain nothing from more threads, and tests that compare timings suffer from oversubscription
    if "PYTEST_XDIST_WORKER" in os.environ:  # other workers have the other cores
        os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(4, _usable_cores()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--most-seconds",
        type=float,
        default=0,
        help="a longer test ends its process, with a traceback; under -n it has then failed, and the others go on",
    )
    parser.addoption(
        "--most-minutes",
        type=float,
        default=0,
        help="tests that have not begun by then are skipped and counted; files run in an order of the commit's own",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    most = item.config.getoption("--most-seconds")
    if not most:
        return (yield)
    # also where a kernel never ends and Python does not run
    faulthandler.dump_traceback_later(most, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_setup(item: pytest.Item) -> None:
    most = item.config.getoption("--most-minutes")
    if most and time.time() - STARTED > 60 * most:
        pytest.skip(f"the {most:g} minutes of this run were over")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(
        session.config, "workerinput"
    ):  # the process that started the workers looks for all of them
        return
    with contextlib.suppress(CacheFolderError):
        if faulty := unlawful(cache_dir() / "costs", STARTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print("\nkept costs break a law:", *faulty, sep="\n")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_the_rest(items)
    if config.getoption(
        "--most-minutes"
    ):  # what one commit's run leaves out, another's begins with
        ask = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(ask, cwd=TESTS, capture_output=True, check=False).stdout
        items.sort(key=lambda item: hashlib.sha256(commit + _file(item)).digest())
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    functions = set[str]()
    for item in session.items:
        function = item.nodeid.partition("[")[0]
        item.stash[RECORDED] = function not in functions and _is_of_the_package(item.path)
        functions.add(function)


def _file(item: pytest.Item) -> bytes:
    return item.nodeid.partition("::")[0].encode()  # the same wherever the clone stands


def _is_of_the_package(file: Path) -> bool:
    folders = file.parent.relative_to(TESTS).parts if file.is_relative_to(TESTS) else ()
    folder = folders[0] if folders else ""  # tests of single modules stand in none
    return folder in OF_THE_PACKAGE or (TESTS.parent / "specengine" / folder).is_dir()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Coverage records the first case of each test of the package; its tracer takes longer than the tests themselves.

    Not by pytest-cov's `no_cover`, which does nothing in the workers of pytest-xdist.
    """
    tracer = sys.gettrace()
    if item.stash[RECORDED] or not type(tracer).__module__.startswith("coverage"):
        return (yield)
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models only lose by more threads, and larger ones do where other work runs beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The embedded default model, fetched and converted on first use; for tests marked `model`."""
    return embedded.path()
