"""``python -m pipeline VERB …``, and the file that ``spark-submit`` starts."""

import sys

from pipeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
