"""The admin page of `tiered mount`: which node serves which retired broker since when, its consumers and their lag."""

from email.message import Message

from rocketmq_tiered.page.html import HTML_TYPE, SECURITY_HEADERS, STATIC_TYPES, render, static_file
from rocketmq_tiered.process.admin import PageAnswer
from rocketmq_tiered.process.mount_report import HEADER, MountAdminSource


class MountPages:
    """The pages of `tiered mount`: one table of brokers."""

    def __init__(self, source: MountAdminSource) -> None:
        self._source = source

    def answer(self, target: str, headers: Message, client: str) -> PageAnswer | None:
        """Return the page of brokers, or a file of the pages, for a request of the path ``target``; None if there is no
        such page. ``headers`` and ``client`` are those of the request, as all pages get them."""
        path = target.partition("?")[0]
        name = path.removeprefix("/page/")
        if name != path and name in STATIC_TYPES:
            return PageAnswer(200, STATIC_TYPES[name], static_file(name), SECURITY_HEADERS)
        if path != "/":
            return None
        rows = [row.cells() for row in self._source.rows()]
        content = render("mounts", header=HEADER, rows=rows, findings=self._source.findings())
        node = self._source.nodes[0]
        page = render(
            "base",
            title="Mounted brokers",
            process="tiered mount",
            archive=node.member.node,
            links=[("/", "Brokers")],
            here="/",
            content=content,
        )
        return PageAnswer(200, HTML_TYPE, page.encode(), SECURITY_HEADERS)

    def close(self) -> None:
        """Nothing to release."""
