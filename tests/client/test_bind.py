"""Binding: what is shared, what is copied, what stays tied, and that a misfit names everything and changes nothing."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from tests.client.conftest import RECEIPTS
from weightcached.client import BindReport, WeightSet, bind, meta_parameters
from weightcached.client.transfer import map_segments
from weightcached.protocol.config import CacheConfig
from weightcached.protocol.errors import BindError
from weightcached.protocol.manifest import Manifest
from weightcached.protocol.testing import TensorBytes, honest_grant

Weights = Callable[..., WeightSet]


class Block(nn.Module):
    """A module with everything: parameters, tied names, persistent and other buffers."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(4.0) + 1, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.inner(self.embed(tokens)))
        return self.head(hidden * self.inv_freq)


def float32(*shape: int, start: float = 0.0) -> TensorBytes:
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) / 16 + start
    return TensorBytes("float32", shape, values.numpy().tobytes())


def block_tensors() -> dict[str, TensorBytes]:
    return {
        "embed.weight": float32(6, 4),
        "inner.weight": float32(4, 4, start=1),
        "inner.bias": float32(4, start=2),
        "norm.weight": float32(4, start=3),
        "norm.bias": float32(4, start=4),
        "norm.running_mean": float32(4, start=5),
        "norm.running_var": float32(4, start=6),
    }


@pytest.fixture
def weights(config: CacheConfig) -> Iterator[Weights]:
    """``weights(tensors, **aliases)``: a weight set of these tensors, as from a daemon but without one."""
    with ExitStack() as stack:

        def make(tensors: dict[str, TensorBytes], **aliases: str) -> WeightSet:
            grant = stack.enter_context(
                honest_grant(
                    tensors,
                    config=config,
                    receipts=RECEIPTS,
                    aliases={name.replace("__", "."): target for name, target in aliases.items()},
                )
            )
            segments = map_segments([grant.fds[1]], [len(grant.segment)])
            manifest = Manifest.decode(grant.manifest)
            made = WeightSet(manifest, segments, source="disk", version="v", receipts_version="r", lease=None)
            return stack.enter_context(made)

        yield make


def built(**options: bool) -> Block:
    with meta_parameters():
        return Block(**options).eval()


def state(module: nn.Module) -> dict[str, tuple[int, str]]:
    """Every tensor of a module by identity and value, to see whether anything changed."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), "meta" if tensor.is_meta else str(tensor.tolist())) for name, tensor in named}


def misfit(module: nn.Module, weights: WeightSet, **options: object) -> str:
    """The error that binding raises, as text; the module must be what it was."""
    before = state(module)
    with pytest.raises(BindError) as caught:
        bind(module, weights, **options)  # type: ignore[arg-type]
    assert state(module) == before
    return str(caught.value)


def test_parameters_are_shared_and_buffers_are_copied(weights: Weights) -> None:
    module, held = built(), weights(block_tensors())
    report = bind(module, held)
    assert module.inner.weight.data_ptr() == held["inner.weight"].data_ptr()
    assert module.norm.running_mean is not None
    assert module.norm.running_mean.data_ptr() != held["norm.running_mean"].data_ptr()
    assert torch.equal(module.norm.running_mean, held["norm.running_mean"])
    assert report == BindReport(
        bound=("embed.weight", "head.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"),
        copied=("norm.running_mean", "norm.running_var"),
        ignored=(),
        nbytes_shared=4 * (24 + 16 + 4 + 4 + 4),
        nbytes_copied=4 * (4 + 4),
    )
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in module.parameters())


def test_the_module_computes_what_a_loaded_one_computes(weights: Weights) -> None:
    held = weights(block_tensors())
    loaded = Block().eval()
    loaded.load_state_dict({name: tensor.clone() for name, tensor in held.items()} | _rest(held), strict=False)
    bound = built()
    bind(bound, held)
    tokens = torch.tensor([[0, 3], [5, 1]])
    with torch.no_grad():
        hidden_loaded = loaded.head(loaded.norm(loaded.inner(loaded.embed(tokens[0]))) * loaded.inv_freq)
        hidden_bound = bound.head(bound.norm(bound.inner(bound.embed(tokens[0]))) * bound.inv_freq)
    assert torch.equal(hidden_loaded, hidden_bound)


def _rest(held: WeightSet) -> dict[str, torch.Tensor]:
    return {"head.weight": held["embed.weight"].clone()}


@pytest.mark.parametrize("stored", ["embed only", "head only", "both, one place", "both, two places"])
def test_tied_names_stay_one_parameter(stored: str, weights: Weights) -> None:
    tensors, aliases = block_tensors(), {}
    if stored == "head only":
        tensors["head.weight"] = tensors.pop("embed.weight")
    elif stored == "both, one place":
        aliases["head__weight"] = "embed.weight"
    elif stored == "both, two places":
        tensors["head.weight"] = tensors["embed.weight"]
    module, held = built(), weights(tensors, **aliases)
    report = bind(module, held)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, held["head.weight" if stored == "head only" else "embed.weight"])
    assert {"embed.weight", "head.weight"} <= set(report.bound)
    assert report.nbytes_shared == 4 * (24 + 16 + 4 + 4 + 4)


def test_tied_names_with_different_bytes_do_not_fit(weights: Weights) -> None:
    tensors = block_tensors()
    tensors["head.weight"] = float32(6, 4, start=9)
    assert "embed.weight = head.weight: tied in the module" in misfit(built(), weights(tensors))


def test_untied_names_over_one_place_are_two_parameters(weights: Weights) -> None:
    module = built(tied=False)
    bind(module, weights(block_tensors(), head__weight="embed.weight"))
    assert module.head.weight is not module.embed.weight
    assert module.head.weight.data_ptr() == module.embed.weight.data_ptr()


def test_a_misfit_names_everything_that_is_wrong(weights: Weights) -> None:
    tensors = block_tensors()
    del tensors["inner.bias"]
    tensors["inner.weight"] = float32(4, 5)
    tensors["norm.bias"] = TensorBytes("bfloat16", (4,), bytes(8))
    tensors["norm.running_var"] = float32(5)
    tensors["surplus.weight"] = float32(1)
    tensors["inv_freq"] = float32(4)  # not persistent: no checkpoint decides it
    text = misfit(built(), weights(tensors))
    for part in (
        "in 6 places",
        "inner.bias: missing from the weights",
        "inner.weight: the module has float32[4, 4], the weights have float32[4, 5]",
        "norm.bias: the module has float32[4], the weights have bfloat16[4]",
        "norm.running_var: the module has float32[4], the weights have float32[5]",
        "surplus.weight: left over",
        "inv_freq: left over",
    ):
        assert part in text


def test_left_over_weights_may_be_allowed_by_whole_names(weights: Weights) -> None:
    held = weights({**block_tensors(), "old.position_ids": float32(1), "old.position_ids_too": float32(1)})
    assert "old.position_ids_too: left over" in misfit(built(), held, ignore_unexpected=["*.position_ids", "ids"])
    module = built()
    report = bind(module, held, ignore_unexpected=["*.position_ids", "old.position_ids_t?o"])
    assert report.ignored == ("old.position_ids", "old.position_ids_too")


def test_a_persistent_buffer_that_no_checkpoint_has_keeps_its_value(weights: Weights) -> None:
    module = built()
    bind(module, weights(block_tensors()))
    assert module.norm.num_batches_tracked is not None
    assert module.norm.num_batches_tracked.item() == 0


def test_nothing_may_stay_on_the_meta_device(weights: Weights) -> None:
    with torch.device("meta"):
        module = Block()
    text = misfit(module, weights(block_tensors()))
    assert "inv_freq: a buffer on the meta device" in text
    assert "norm.num_batches_tracked: a buffer on the meta device" in text
    assert "running_mean" not in text


def test_a_buffer_on_the_meta_device_is_made_from_the_weights(weights: Weights) -> None:
    module = built()
    module.norm.running_mean = torch.empty(4, device="meta")
    held = weights(block_tensors())
    bind(module, held)
    assert torch.equal(module.norm.running_mean, held["norm.running_mean"])
    module.norm.running_mean.fill_(0)
    held.verify()


def test_a_lazy_parameter_is_uninitialised(weights: Weights) -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    text = misfit_of_lazy(module, weights({"0.weight": float32(4, 4), "0.bias": float32(4)}))
    assert "0.weight: not initialised" in text


def misfit_of_lazy(module: nn.Module, weights: WeightSet) -> str:
    with pytest.raises(BindError) as caught:
        bind(module, weights)
    return str(caught.value)


def test_binding_a_module_with_real_parameters_replaces_them(weights: Weights) -> None:
    module, held = Block().eval(), weights(block_tensors())
    bind(module, held)
    assert module.inner.weight.data_ptr() == held["inner.weight"].data_ptr()
    assert module.head.weight is module.embed.weight


def test_bound_modules_outlive_the_set(weights: Weights) -> None:
    module, held = built(), weights(block_tensors())
    bind(module, held)
    held.close()
    assert module.inner.bias[0].item() == 2.0


def test_meta_parameters_leaves_buffers_real_and_other_threads_alone() -> None:
    elsewhere: list[nn.Module] = []
    with meta_parameters():
        module = Block()
        thread = threading.Thread(target=lambda: elsewhere.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    assert module.head.weight is module.embed.weight
    assert not elsewhere[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_meta_parameters_keeps_a_tie_that_is_made_through_a_variable() -> None:
    with meta_parameters():
        shared = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        module = nn.Module()
        module.one, module.other = nn.Linear(2, 2), nn.Linear(2, 2)
        module.one.weight = shared
        module.other.weight = shared
    assert module.one.weight is module.other.weight
    assert module.one.weight.is_meta
    assert not module.one.weight.requires_grad


def test_meta_parameters_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError), meta_parameters():
        raise RuntimeError
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_parameter_with_memory_stays_the_object_that_it_is_and_gives_its_memory_up(weights: Weights) -> None:
    """Engines hang attributes on their parameters, and hold them in more places than their module's table."""

    class OfAnEngine(nn.Parameter):
        weight_loader = "the class's"

    module, held = Block().eval(), weights(block_tensors())
    module.inner.weight = OfAnEngine(torch.empty(4, 4))
    module.inner.weight.weight_loader = "the parameter's own"
    before = dict(module.named_parameters(remove_duplicate=False))
    bind(module, held)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert type(after["inner.weight"]) is OfAnEngine
    assert after["inner.weight"].weight_loader == "the parameter's own"
    assert all(after[name].data_ptr() == held[name].data_ptr() for name in held if name in after)
    assert after["head.weight"].data_ptr() == held["embed.weight"].data_ptr()
    assert not any(parameter.requires_grad for parameter in after.values())


def test_only_what_may_be_missing_keeps_the_values_it_was_built_with(weights: Weights) -> None:
    module, held = Block().eval(), weights(block_tensors())
    module.inner.scale = nn.Parameter(torch.tensor(-1.0))
    module.inner.other = nn.Parameter(torch.tensor(-2.0))
    assert "inner.other: missing from the weights" in misfit(module, held, keep_missing={"inner.scale"})
    report = bind(module, held, keep_missing={"inner.scale", "inner.other", "inner.weight"})
    assert report.kept == ("inner.scale", "inner.other")
    assert module.inner.scale.item() == -1.0
    assert module.inner.weight.data_ptr() == held["inner.weight"].data_ptr()


def test_a_parameter_on_the_meta_device_has_no_values_to_keep(weights: Weights) -> None:
    module, held = built(), weights(block_tensors())
    with meta_parameters():
        module.inner.scale = nn.Parameter(torch.tensor(-1.0))
    assert "inner.scale: missing from the weights" in misfit(module, held, keep_missing={"inner.scale"})
