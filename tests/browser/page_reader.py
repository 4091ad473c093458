"""Reads a page: its text, its tags and the titles that show on hover."""

from __future__ import annotations

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Collects the text and the titles of a page; fails on a tag that is closed out of turn or never."""

    void = frozenset({"meta", "link", "wbr", "br", "hr", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.titles: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)
        assert self.open == []

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.texts.append(data)
