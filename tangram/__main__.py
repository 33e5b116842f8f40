"""``python -m tangram`` is the command ``tangram``."""

from tangram.cli.main import main
from tangram.guard import leave

leave(main())
