"""`python -m zengine`: see `zengine.cli`."""

from zengine.cli import main

raise SystemExit(main())
