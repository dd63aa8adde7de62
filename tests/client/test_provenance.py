"""What people are told when the daemon's weights come from elsewhere: warnings, and never more than that."""

import json
from pathlib import Path

import pytest

from weightcached.client import provenance
from weightcached.protocol.config import Provenance, provenance_of


@pytest.fixture
def model_with_tokenizer(tmp_path: Path) -> Path:
    directory = tmp_path / "snapshots" / "abc123"
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return directory


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelname == "WARNING"]


def test_equal_provenance_says_nothing(model_with_tokenizer: Path, log: pytest.LogCaptureFixture) -> None:
    provenance.compare(provenance.ours(model_with_tokenizer), provenance_of(model_with_tokenizer), where="here")
    assert log.records == []


@pytest.mark.parametrize("field", ["tokenizer_sha256", "revision"])
def test_another_tokenizer_or_revision_is_a_warning(
    field: str, model_with_tokenizer: Path, log: pytest.LogCaptureFixture
) -> None:
    theirs = provenance_of(model_with_tokenizer).model_dump() | {field: "f" * 64}
    provenance.compare(provenance.ours(model_with_tokenizer), Provenance(**theirs), where="here")
    assert len(warnings(log)) == 1
    assert "f" * 64 in warnings(log)[0]
    assert field.split("_")[0] in warnings(log)[0]


def test_another_host_or_path_is_no_warning(model_with_tokenizer: Path, log: pytest.LogCaptureFixture) -> None:
    theirs = provenance_of(model_with_tokenizer).model_dump() | {"path": "/elsewhere", "host": "other"}
    provenance.compare(provenance.ours(model_with_tokenizer), Provenance(**theirs), where="here")
    assert warnings(log) == []
    assert "/elsewhere on other" in log.records[0].getMessage()


def test_a_tokenizer_that_changed_is_looked_at_again(model_with_tokenizer: Path, log: pytest.LogCaptureFixture) -> None:
    before = provenance_of(model_with_tokenizer)
    provenance.compare(provenance.ours(model_with_tokenizer), before, where="here")
    (model_with_tokenizer / "tokenizer.json").write_text(json.dumps({"version": "2.0", "longer": True}))
    provenance.compare(provenance.ours(model_with_tokenizer), before, where="here")
    assert len(warnings(log)) == 1


def test_what_cannot_be_compared_is_a_warning(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    provenance.compare(provenance.ours(tmp_path / "gone"), Provenance(path="/x", host="y"), where="here")
    assert "cannot be compared" in warnings(log)[0]


def test_a_link_to_nothing_does_not_matter(model_with_tokenizer: Path, log: pytest.LogCaptureFixture) -> None:
    (model_with_tokenizer / "onnx").symlink_to("/nothing")
    provenance.compare(provenance.ours(model_with_tokenizer), provenance_of(model_with_tokenizer), where="here")
    assert log.records == []
