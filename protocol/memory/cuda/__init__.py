"""CUDA's driver behind checked calls: devices by identity, memory that descriptors share, legacy memory, copies.

Owns every call that the project makes of the driver (``driver.call`` is the only way to one) and the lifetimes of what
they give. Knows nothing of generations, segments, places or torch. ``cuda-bindings`` is optional (the extra ``cuda``)
and imported with the first call, never by importing this; neither torch nor numpy comes in by anything here.

* ``driver``: one checked call, and errors in words; ``devices``: who is there; ``nvml``: who holds how much memory.
* ``physical``: memory that lives while a handle, a mapping or an exported descriptor of it does; ``mappings``:
  addresses for it. Neither needs a context, so the keeper may use them.
* ``context``: a device's primary context, streams, events and copies; ``staging``: host memory that copies may use
  while the program goes on; ``legacy``: memory that dies with its process, and the handles that share it. These need a
  context, so only workers, holders and engines use them.
"""
