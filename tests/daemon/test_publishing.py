"""Looking at the files of what is current, over many switches: what looked for an earlier one is not remembered."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

from tests.support.generations import generation, published
from weightcached.daemon.generations import Generations
from weightcached.daemon.publishing import Publishing
from weightcached.daemon.reproving import Reproving


def test_what_has_looked_at_files_is_forgotten_at_the_next_switch(tmp_path: Path) -> None:
    """There are no files: each would look again for as long as the weights are served."""
    held = Generations(keep=2, grace_s=0.0)
    made = [generation(id=f"{number:032x}") for number in range(2)]
    for one in made:
        held.add(published(one))
    options = SimpleNamespace(model=str(tmp_path / "none"), cache_dir=None, trusted_filesystems=())
    record = SimpleNamespace(generations=held, options=options)
    nothing = SimpleNamespace()
    publishing = Publishing(record, nothing, nothing, lambda event: None)  # type: ignore[arg-type]

    async def switch_often() -> list[Reproving]:
        looking: set[asyncio.Task[None]] = set()
        for number in range(10):
            one = made[number % 2]
            held.make_current(one.id)
            record.published = held.current
            publishing._look_at_files(one, "not looked at yet")
            running = {task for task in asyncio.all_tasks() if task.get_name() == "prove again"}
            [new] = running - looking
            if looking:
                await asyncio.wait(looking)
            looking = {new}
        remembered = list(publishing._reproving)
        await publishing.stop()
        assert new.done()
        return remembered

    assert len(asyncio.run(switch_often())) <= 2  # the one that looks, and the one before it, which is being ended
