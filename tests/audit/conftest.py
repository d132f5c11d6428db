"""Shapes in the audit's signatures are checked at run time, as in the other layers; `import markov` works."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if not os.environ.get("COMPPO_UNHOOKED"):
    from jaxtyping import install_import_hook

    install_import_hook(["comppo.audit"], "beartype.beartype")
