"""``python -m rocketmq_tiered.spark VERB …``, and the file that ``spark-submit`` starts."""

import sys

from rocketmq_tiered.spark.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
