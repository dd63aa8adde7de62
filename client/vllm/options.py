"""What an engine was asked for: the keys of ``--model-loader-extra-config``, as one frozen value.

Owns :class:`LoaderOptions` and :func:`parse`. The words are those of :func:`weightcached.client.attach`. Looks at no
file, daemon or model, and imports neither vLLM nor torch: `weightcached launch` uses it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from weightcached.protocol.errors import InvalidOption
from weightcached.protocol.frozen import Frozen
from weightcached.protocol.places import DEFAULT_NAME
from weightcached.protocol.quantization import Quantization
from weightcached.protocol.text import shown

LOAD_FORMAT = "weightcached"
Mode = Literal["off", "client", "require", "daemon"]


class LoaderOptions(Frozen):
    """The options of one engine; every worker has the same."""

    weight_cache_mode: Mode = "client"
    """``off``: vLLM's own loader. ``client``: the daemon's weights; vLLM's own loader where no socket is. ``require``:
    the daemon's weights or none. ``daemon``: each worker starts its rank's daemon, which ends with it.
    """
    name: str = DEFAULT_NAME
    draft_name: str | None = None
    """The name under which a speculative draft model is cached; without one vLLM loads it itself."""
    runtime_dir: str | None = None
    layout: Literal["fused", "vllm"] = "fused"
    """``fused``: made by this project's tables. ``vllm``: made by vLLM itself, in the daemon's worker (`serve --engine
    vllm`)."""
    stage: Literal["before", "after"] = "before"
    """Of layout ``vllm``: whether the daemon's vLLM has post-processed the weights already (`--weight-cache-stage`)."""
    dtype: Literal["engine", "auto", "bfloat16", "float16", "float32"] = "engine"
    """What the daemon was told. ``engine``: ``auto`` where the checkpoint is in vLLM's dtype, else that dtype."""
    quantization: str = "none"
    want: str = "checkpoint"
    digest: str | None = None
    timeout_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    wait_for_daemon_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    heartbeat_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    on_stale: Literal["keep", "exit"] = "keep"
    cache_dir: str | None = None
    allow_uids: tuple[int, ...] = ()
    allow_gids: tuple[int, ...] = ()
    trusted_filesystems: tuple[str, ...] = ()

    @field_validator("quantization")
    @classmethod
    def _known(cls, spelled: str) -> str:
        Quantization.named(spelled)  # raises InvalidOption, which names what there is
        return spelled


def parse(extra_config: object) -> LoaderOptions:
    """The options in ``extra_config``. Raises one InvalidOption that names every key that cannot be used."""
    if not isinstance(extra_config, Mapping):
        raise InvalidOption(
            "the loader's options are not an object",
            expected='--model-loader-extra-config \'{"weight_cache_mode": "client", …}\'',
            found=shown(extra_config),
        )
    try:
        options = LoaderOptions.model_validate(dict(extra_config))
    except ValidationError as error:
        raise InvalidOption(
            f"--model-loader-extra-config cannot be used by load format {LOAD_FORMAT}",
            expected=", ".join(LoaderOptions.model_fields),
            found="; ".join(_problem(one) for one in error.errors()),
        ) from error
    _require_compatible(options)
    return options


def _require_compatible(options: LoaderOptions) -> None:
    if options.layout == "vllm":
        _require_of_vllm(options)
    elif options.stage != "before":
        raise InvalidOption(
            "layout fused is what vLLM has before post-processing",
            found=f"stage {options.stage!r}",
            next_step="--layout vllm, and a daemon of `serve --engine vllm -- --weight-cache-stage after`",
        )
    if options.quantization != "none" and options.weight_cache_mode in ("off", "client"):
        raise InvalidOption(
            "vLLM's own loader cannot quantize as the daemon does, so there is nothing to fall back to",
            expected="weight_cache_mode 'require' or 'daemon' with a quantization",
            found=f"weight_cache_mode {options.weight_cache_mode!r}, quantization {options.quantization!r}",
        )


def _require_usual(options: LoaderOptions) -> None:
    """What only layout ``fused`` has, layout ``vllm`` is refused with."""
    for key, usable, why in (
        ("quantization", options.quantization == "none", "vLLM quantizes a layout of its own, by its own arguments"),
        ("weight_cache_mode", options.weight_cache_mode != "daemon", "a daemon that vLLM fills is started by itself"),
    ):
        if not usable:
            raise InvalidOption(why, found=f"layout 'vllm' and {key} {getattr(options, key)!r}")


def _require_of_vllm(options: LoaderOptions) -> None:
    for key, usable, why in (
        ("quantization", options.quantization == "none", "vLLM quantizes a layout of its own, by its own arguments"),
        ("weight_cache_mode", options.weight_cache_mode != "daemon", "a daemon that vLLM fills is started by itself"),
    ):
        if not usable:
            raise InvalidOption(why, found=f"layout 'vllm' and {key} {getattr(options, key)!r}")


def _problem(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg']}, not {shown(error['input'])}"
    near = get_close_matches(key, LoaderOptions.model_fields, n=1)
    return f"{key}: unknown" + (f", did you mean {near[0]}?" if near else "")
