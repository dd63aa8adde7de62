"""What a module's parameters hold, in words that two processes can compare.

Imported by engines' processes, from the folder that their scripts lie in: it imports nothing of this project.
"""

import hashlib


def parameters_of(module) -> dict:
    """What parameters hold. Zero-size ones have no memory to share, and are told apart as objects."""
    import torch

    names: dict = {}
    tensors = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else id(tensor)
        names.setdefault(place, []).append(name)
    return {
        name: {
            "dtype": str(tensors[name].dtype).removeprefix("torch."),
            "shape": list(tensors[name].shape),
            "sha256": hashlib.sha256(
                tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().data
            ).hexdigest(),
            "names": sorted(tied),
        }
        for tied in names.values()
        for name in tied
    }
