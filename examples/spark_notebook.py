"""Read, count, search and export a topic of an archive with Spark. Cells for Jupyter or VS Code.

    python examples/spark_notebook.py file:///tmp/archive t_one

`python examples/demo.py --keep` makes an archive. Requires `pip install '.[spark]'` and Java 17.
"""

# %% The archive and the topic
from __future__ import annotations

import sys
import tempfile

from pyspark.sql import functions

from rocketmq_tiered.spark import SourceOptions, export, read, session

URL, TOPIC = sys.argv[1:3]

# %% A local session; on a cluster, spark-submit chooses the master
spark = session("notebook", **{"spark.sql.shuffle.partitions": "4", "spark.ui.showConsoleProgress": "false"})

# %% The topic as a DataFrame. Only these columns are read: bodies stay in the archive
messages = read(spark, URL, topic=TOPIC, columns=["queueId", "queueOffset", "storeTimestamp", "storeSize"])
messages.printSchema()

# %% Messages by queue
(
    messages.groupBy("queueId")
    .agg(
        functions.count("*").alias("messages"),
        functions.sum("storeSize").alias("bytes"),
        functions.timestamp_millis(functions.max("storeTimestamp")).alias("newest"),
    )
    .orderBy("queueId")
    .show(truncate=False)
)

# %% Messages in the last tenth of its time range
first, last = messages.agg(functions.min("storeTimestamp"), functions.max("storeTimestamp")).first() or (0, 0)
recent = functions.col("storeTimestamp") >= last - (last - first) // 10
row = messages.agg(functions.count_if(recent).alias("recent"), functions.count("*").alias("all")).first()
print(f"{row['recent']} of {row['all']} messages" if row else "nothing")

# %% The same in SQL
messages.createOrReplaceTempView("messages")
spark.sql("SELECT count(*) AS messages, max(storeSize) AS largest FROM messages WHERE queueId = 0").show()

# %% Search in bodies
read(spark, URL, topic=TOPIC, columns=["queueOffset", "tags", "text"]).where("text RLIKE '[0-9]{3}'").limit(
    3
).show()

# %% Export as Parquet files by topic and day. A second export adds later messages, here none
source = SourceOptions(URL, topics=(TOPIC,))
with tempfile.TemporaryDirectory() as directory:
    for _ in range(2):
        print(f"exported {export(spark, source, f'file://{directory}').rows} rows")
    print(f"read back {spark.read.parquet(directory).count()} rows")
