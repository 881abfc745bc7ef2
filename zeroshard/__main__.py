"""`python -m zeroshard`, which is also `zeroshard`."""

import sys

from zeroshard.cli.main import main

sys.exit(main())
