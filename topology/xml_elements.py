"""XML text to and from plain elements that know their line: the grammar under `nccl_xml`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from pycomm.errors import ArgumentValueError

__all__ = ["Element", "parse", "render"]

# What NCCL's own reader has room for (MAX_ATTR_COUNT and MAX_STR_LEN in its src/graph/xml.h).
_MOST_ATTRIBUTES = 16
_LONGEST_TEXT = 255

_DEEPEST = 64


@dataclass(slots=True)
class Element:
    """An element: its attributes in their order, and the elements inside it."""

    tag: str
    attributes: dict[str, str]
    line: int = 0
    children: list["Element"] = field(default_factory=list)

    def all(self, *tags: str) -> Iterator["Element"]:
        """Yield the elements directly inside it that have one of these tags."""
        return (child for child in self.children if child.tag in tags)


def parse(text: str, source: str) -> Element:
    """Return the root element of a text.

    Raises
    ------
    ArgumentValueError
        It is cut off or otherwise no XML, declares a document type, or nests deeper than any
        machine does; the line is named.
    """
    parser = expat.ParserCreate()
    roots: list[Element] = []
    open_: list[Element] = []

    def refused(why: str) -> ArgumentValueError:
        return ArgumentValueError(f"{source}, line {parser.CurrentLineNumber}: {why}")

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (open_[-1].children if open_ else roots).append(element)
        open_.append(element)
        if len(open_) > _DEEPEST:
            raise refused(f"elements nest deeper than {_DEEPEST}")

    def end(_tag: str) -> None:
        open_.pop()

    def doctype(*_declared: Any) -> None:
        raise refused("a document type, which no topology file has")

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        why = expat.ErrorString(error.code) or "not XML"
        if open_:
            inside = open_[-1]
            why += f", inside <{inside.tag}> of line {inside.line}: cut off?"
        raise ArgumentValueError(f"{source}, line {error.lineno}: {why}") from None
    except UnicodeError:
        raise ArgumentValueError(f"{source}: not text") from None
    return roots[0]


def render(root: Element) -> str:
    """Return an element as text: an element a line, no declaration, which NCCL would not take."""
    return "\n".join(_lines(root, "")) + "\n"


def _lines(element: Element, indent: str) -> Iterable[str]:
    """Yield the lines of an element."""
    if len(element.attributes) > _MOST_ATTRIBUTES:
        raise ArgumentValueError(
            f"<{element.tag}> has {len(element.attributes)} attributes; NCCL reads "
            f"{_MOST_ATTRIBUTES}"
        )
    start = " ".join(
        [element.tag, *(f"{name}={_quoted(text)}" for name, text in element.attributes.items())]
    )
    if not element.children:
        yield f"{indent}<{start}/>"
        return
    yield f"{indent}<{start}>"
    for child in element.children:
        yield from _lines(child, indent + "  ")
    yield f"{indent}</{element.tag}>"


def _quoted(text: str) -> str:
    """Return an attribute's value in double quotes, the only ones NCCL knows."""
    if len(text.encode()) > _LONGEST_TEXT:
        raise ArgumentValueError(
            f"NCCL reads {_LONGEST_TEXT} bytes of an attribute: {text[:40]!r}…"
        )
    return '"' + quoteattr(text, {'"': "&quot;"})[1:-1] + '"'
