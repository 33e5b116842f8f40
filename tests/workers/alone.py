"""``tangram ...`` as from a shell, outside any launch."""

import os
import sys

from tangram.cli.main import main

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(name, None)
sys.exit(main(sys.argv[1:]))
