"""Per-tensor sharing by torch.multiprocessing, as other weight caches do it: a producer process and its consumers."""
