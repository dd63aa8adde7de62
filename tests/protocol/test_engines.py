"""Adapters are found by their entry points; what cannot be one is refused by name, with what the adapter said."""

from pathlib import Path

import pytest

from weightcached.protocol.config import Parallel
from weightcached.protocol.engines import EngineRequest, engine_key, find_adapter
from weightcached.protocol.errors import EngineFailed, InvalidOption

ADAPTER = """
class Adapter:
    name = {name!r}
    revision = {revision!r}
    def key(self, request):
        {key}
    def build(self, request, progress):
        raise NotImplementedError
ADAPTER = Adapter()
NOTHING = object()
"""
REQUEST = EngineRequest(model_dir=Path("/model"), parallel=Parallel(tp_size=1, tp_rank=0), arguments=("--packing", "4"))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(name)`` puts a package with that engine where Python looks, as an installer would."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(
        name="toy", module="an_adapter", target="ADAPTER", key="return {'version': '1'}", revision=1, called=None
    ):
        (tmp_path / f"{module}.py").write_text(ADAPTER.format(name=called or name, revision=revision, key=key))
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[weightcached.engines]\n{name} = {module}:{target}\n")
        return name

    return installed


def test_an_installed_adapter_is_found_and_says_its_key(install) -> None:
    install(revision=7, key="return {'arguments': list(request.arguments)}")
    assert find_adapter("toy").name == "toy"
    key = engine_key("toy", REQUEST)
    assert (key.name, key.revision, dict(key.entries)) == ("toy", 7, {"arguments": ("--packing", "4")})


def test_an_engine_that_is_not_installed_is_refused_with_those_that_are(install) -> None:
    install()
    with pytest.raises(InvalidOption, match=r"(?s)no such engine.*toy.*'other'.*weightcached\.engines"):
        find_adapter("other")


@pytest.mark.parametrize("layout", ["hf", "fused"])
def test_nobody_takes_the_name_of_a_layout_of_ours(install, layout: str) -> None:
    install(layout)
    with pytest.raises(InvalidOption, match="no such engine"):
        find_adapter(layout)


def test_two_packages_with_one_engine_are_refused_with_both(install) -> None:
    install(module="one_adapter")
    install(module="another_adapter")
    with pytest.raises(InvalidOption, match=r"another_adapter:ADAPTER, one_adapter:ADAPTER"):
        find_adapter("toy")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"target": "MISSING"}, "AttributeError"),
        ({"key": "nonsense ("}, "SyntaxError"),
        ({"target": "NOTHING"}, "no adapter"),
        ({"target": "Adapter"}, "no adapter"),
        ({"called": "somebody"}, "somebody"),
        ({"revision": "1"}, "revision"),
    ],
    ids=["no such object", "not importable", "something else", "a class", "another name", "no number"],
)
def test_what_is_no_adapter_is_refused_with_the_reason(install, wrong, said: str) -> None:
    install(**wrong)
    with pytest.raises(EngineFailed, match=said):
        find_adapter("toy")


def test_an_adapter_s_module_that_takes_itself_for_a_program_and_exits_cannot_be_imported(install, tmp_path) -> None:
    install()
    (tmp_path / "an_adapter.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(EngineFailed, match=r"cannot be imported.*SystemExit: 3"):
        find_adapter("toy")


@pytest.mark.parametrize("key", ["raise ValueError('out of luck')", "raise SystemExit('out of luck')"])
def test_what_the_adapter_raises_is_reported_in_its_own_words(install, key: str) -> None:
    install(key=key)
    with pytest.raises(EngineFailed, match="out of luck"):
        engine_key("toy", REQUEST)


def test_the_last_line_of_a_parser_that_exits_is_reported_and_still_printed(
    install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(key="import argparse; argparse.ArgumentParser(prog='toy').parse_args(['--no-such'])")
    with pytest.raises(EngineFailed, match=r"toy: error: unrecognized arguments: --no-such"):
        engine_key("toy", REQUEST)
    assert "usage: toy" in capsys.readouterr().err


def test_arguments_that_the_adapter_refuses_stay_invalid_options(install) -> None:
    install(key="from weightcached.protocol.errors import InvalidOption; raise InvalidOption('no such argument')")
    with pytest.raises(InvalidOption, match="no such argument"):
        engine_key("toy", REQUEST)
