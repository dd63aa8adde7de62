"""What weightcached needs to know of this engine: what changes its state's bytes, and how it is built."""

from __future__ import annotations

from typing import Any

from weightcached.protocol.engines import Built, EngineRequest, NamedTensor, Progress
from weightcached.protocol.errors import InvalidOption

VERSION = "1.0"


class ToyAdapter:
    """Of the engine `toy`. Imports the engine, and with it torch, when it is asked for something."""

    name = "toy"
    revision = 1

    def key(self, request: EngineRequest) -> dict[str, Any]:
        import torch

        from toy_engine.engine import reversed_packing

        options = _options(request)
        return {
            "version": VERSION,
            "torch": torch.__version__,
            "stage": "after",
            "dtype": str(options.dtype).removeprefix("torch."),
            "packing": options.packing,
            "reversed": reversed_packing(),
        }

    def build(self, request: EngineRequest, progress: Progress) -> Built:
        from toy_engine.engine import load

        progress("load toy model")
        parallel = request.parallel
        model = load(request.model_dir, _options(request), rank=parallel.tp_rank, size=parallel.tp_size)
        return Built(
            module=model, tensors=[NamedTensor("table", model.table, "attribute")], scalars={"scale": model.scale}
        )


def _options(request: EngineRequest) -> Any:
    from toy_engine.engine import Options

    try:
        return Options.parse(request.arguments, request.dtype)
    except ValueError as error:
        raise InvalidOption("toy-engine does not take these arguments", found=error) from error


ADAPTER = ToyAdapter()
