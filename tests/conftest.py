"""What every test folder shares: tests that need root are skipped for others, how hard hypothesis tries, and a CUDA
driver that needs no GPU. All other fixtures live beside their tests.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fakecuda import CudaHere, FakeCuda, build, fake_cuda_in_memory
from weightcached.protocol.memory.cuda import driver

# A shell that starts something in the background has it ignore Ctrl-C, which is handed on to all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline for one example: a busy machine is not a bug. What never ends is pytest's timeout to find.
settings.register_profile("quick", deadline=None)
settings.register_profile(
    "thorough", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `root` unless we are root: only root can become another user or mount."""
    if os.geteuid() == 0:
        return
    needs_root = pytest.mark.skip(reason="needs root, to become another user")
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(needs_root)


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``libcuda.so.1`` and ``libnvidia-ml.so.1`` of tests/fakecuda, built once."""
    return build(tmp_path_factory.mktemp("fakecuda"))


@pytest.fixture
def fake_cuda(cuda_libraries: Path) -> Iterator[FakeCuda]:
    """One device for the processes that are given ``fake_cuda.environment``. In the end nobody holds any of it."""
    with fake_cuda_in_memory(cuda_libraries) as fake:
        yield fake
        assert (fake.memory(), fake.contexts()) == ([], [])


@pytest.fixture
def cuda_here(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaHere]:
    """The same for this process. In the end it has given back all it had."""
    monkeypatch.setenv("FAKECUDA", str(fake_cuda.directory))
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "FAKECUDA_FAIL"):
        monkeypatch.delenv(variable, raising=False)
    here = CudaHere(fake_cuda)
    driver.initialise.cache_clear()
    yield here
    left = here.live()
    here.reset()
    driver.initialise.cache_clear()
    assert left == ""
