"""What an engine was asked for: the keys of ``--model-loader-extra-config``, as one frozen value.

Owns :class:`LoaderOptions` and :func:`parse`. The words are those of :func:`weightcached.client.attach`. Looks at no
file, daemon or model, and imports neither vLLM nor torch: `weightcached launch` uses it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from weightcached.client.options import LONGEST_TIMEOUT_S, checked_digest, checked_heartbeat, checked_want
from weightcached.protocol.errors import InvalidOption, WeightCacheError
from weightcached.protocol.filesystems import checked_name
from weightcached.protocol.frozen import Frozen
from weightcached.protocol.places import DEFAULT_NAME, DEFAULT_RUNTIME_DIR, Place, runtime_directory
from weightcached.protocol.quantization import Quantization
from weightcached.protocol.text import shown

LOAD_FORMAT = "weightcached"
Mode = Literal["off", "client", "require", "daemon"]


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """Any other value than ``check`` takes is an error of its key, so that all of them are told together."""

    def checked(value: Any) -> Any:
        try:
            check(value)
        except WeightCacheError as error:
            raise ValueError(error.message if error.expected is None else f"expected {error.expected}") from error
        return value

    return AfterValidator(checked)


def _place_name(name: str) -> None:
    Place(DEFAULT_RUNTIME_DIR, name, "host")


_Timeout = Annotated[float, Field(ge=0, le=LONGEST_TIMEOUT_S)]
_Ids = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32 - 1)], ...], Field(strict=False)]


class LoaderOptions(Frozen):
    """The options of one engine; every worker has the same. Values are of their types, and never converted."""

    model_config = ConfigDict(strict=True)

    weight_cache_mode: Mode = "client"
    """``off``: vLLM's own loader. ``client``: the daemon's weights; vLLM's own loader where no socket is. ``require``:
    the daemon's weights or none. ``daemon``: each worker starts its rank's daemon, which ends with it.
    """
    name: Annotated[str, _checked(_place_name)] = DEFAULT_NAME
    draft_name: Annotated[str, _checked(_place_name)] | None = None
    """The name under which a speculative draft model is cached; without one vLLM loads it itself."""
    runtime_dir: Annotated[str, _checked(runtime_directory)] | None = None
    layout: Literal["fused", "vllm"] = "fused"
    """``fused``: made by this project's tables. ``vllm``: made by vLLM itself, in the daemon's worker (`serve --engine
    vllm`)."""
    stage: Literal["before", "after"] = "before"
    """Of layout ``vllm``: whether the daemon's vLLM has post-processed the weights already (`--weight-cache-stage`)."""
    dtype: Literal["engine", "auto", "bfloat16", "float16", "float32"] = "engine"
    """What the daemon was told. ``engine``: ``auto`` where the checkpoint is in vLLM's dtype, else that dtype."""
    quantization: Annotated[str, _checked(Quantization.named)] = "none"
    want: Annotated[str, _checked(checked_want)] = "checkpoint"
    digest: Annotated[str, _checked(lambda digest: checked_digest(digest, "checkpoint"))] | None = None
    timeout_s: _Timeout = 600.0
    wait_for_daemon_s: _Timeout = 0.0
    heartbeat_s: Annotated[float, _checked(checked_heartbeat)] = 5.0
    on_stale: Literal["keep", "exit"] = "keep"
    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    allow_uids: _Ids = ()
    allow_gids: _Ids = ()
    trusted_filesystems: Annotated[tuple[Annotated[str, _checked(checked_name)], ...], Field(strict=False)] = ()

    @field_validator("draft_name")
    @classmethod
    def _of_its_own(cls, draft_name: str | None, info: ValidationInfo) -> str | None:
        if draft_name is not None and draft_name == info.data.get("name"):
            raise ValueError("the draft model needs another name than the model")
        return draft_name


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
    checked_digest(options.digest, options.want)
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


def _require_of_vllm(options: LoaderOptions) -> None:
    serve = "weightcached serve --engine vllm -- …"
    for key, usable, why, next_step in (
        (
            "quantization",
            options.quantization == "none",
            "vLLM quantizes a layout of its own, by its own arguments",
            "leave it out: quantized checkpoints need none, and layout fused takes the daemon's methods",
        ),
        (
            "weight_cache_mode",
            options.weight_cache_mode != "daemon",
            "a daemon that vLLM fills is started by itself",
            f"start it (`{serve}`), and use mode client or require",
        ),
    ):
        if not usable:
            found = f"layout 'vllm' and {key} {getattr(options, key)!r}"
            raise InvalidOption(why, found=found, next_step=next_step)


def _problem(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg'].removeprefix('Value error, ')}, not {shown(error['input'])}"
    near = get_close_matches(key, LoaderOptions.model_fields, n=1)
    return f"{key}: unknown" + (f", did you mean {near[0]}?" if near else "")
