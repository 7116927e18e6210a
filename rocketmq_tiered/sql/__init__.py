"""Topics of an archive as Arrow tables, and SQL on them with DuckDB. docs/SQL.md is the guide.

Needs ``pip install 'rocketmq-tiered[sql]'``; nothing else imports DuckDB.
"""

from typing import TYPE_CHECKING

from tiered.lazy_names import lazy_names

if TYPE_CHECKING:
    from rocketmq_tiered.sql.session import SqlSession
    from rocketmq_tiered.sql.topic import Topic

__all__ = ["SqlSession", "Topic"]

_HOMES = {"rocketmq_tiered.sql.session": ("SqlSession",), "rocketmq_tiered.sql.topic": ("Topic",)}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
