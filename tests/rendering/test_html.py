from html.parser import HTMLParser

from tests.rendering import reports


class Page(HTMLParser):
    """The elements and the text of a page, and whether every element was closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.open, self.texts, self.attributes = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_names_are_text_whatever_they_hold() -> None:
    """Markup and template syntax in names, messages and reasons are shown, not obeyed."""
    page = Page(reports.hostile()._repr_html_())
    text = "".join(page.texts)
    assert page.tags.count("b") == 1  # the check's name; the layer is called "<b id=..."
    assert '<b id="x">&amp;{{ 7*7 }}' in text
    assert ("id", "x") not in page.attributes


def test_each_layer_has_a_row() -> None:
    """And one more for each violation, with its message and the likely cause."""
    page = Page(reports.dead()._repr_html_())
    assert page.tags.count("tr") == 1 + 5 + 1
    assert page.attributes.count(("class", "violated")) == 1
    assert page.attributes.count(("class", "unseen")) == 1
    assert ("title", "forward never called it") in page.attributes
    text = "".join(page.texts)
    assert "dead_units: 3 of 4 units are dead" in text
    assert "likely cause: the bias holds them on the flat side" in text
