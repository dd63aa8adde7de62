"""The package is named after what it works with, and gets in nobody's way."""

import subprocess
import sys


def test_importing_it_imports_neither_torch_nor_transformers_nor_hides_it() -> None:
    program = (
        "import sys, weightcached.client.transformers as ours\n"
        "assert sys.modules.keys().isdisjoint({'torch', 'transformers', 'numpy'}), 'imported'\n"
        "import transformers\n"
        "assert transformers.__version__ and transformers is not ours\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
