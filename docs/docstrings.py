"""The package's docstrings are plain text with indented equations; this makes reStructuredText of them for autodoc.

    indented under a blank line     -> a literal block: equations, layouts
    name: what it is                -> an item of a definition list, with the lines indented below it; where its
                                       paragraph goes on without indentation it stays a paragraph
    - item                          -> a list item, with the lines indented below it
    Args:, Returns:, Raises:        -> a heading, and its lines one level out
    `name`                          -> a literal
    everything else                 -> paragraphs, with the markup characters escaped
"""

from __future__ import annotations

import re

SECTION = re.compile(r"^(Args|Returns|Raises):$")
ITEM = re.compile(r"^([a-zA-Z_][\w.*]*(?:, [a-zA-Z_.][\w.*]*)*): (\S.*)$")
LITERAL, MARKUP = re.compile(r"(?<!\w)`([^`\s](?:[^`]*[^`\s])?)`(?!\w)"), re.compile(r"[\\*`|]|_(?=\W|$)")
SENTENCE = re.compile(r"^(Source|Note)$")  # "Source: ..." is text, "TypeError: ..." an item


def escape(text: str) -> str:
    """Words between backticks as literals, elsewhere characters that reStructuredText would read as markup escaped."""
    parts = LITERAL.split(text)
    return "".join(f"``{x}``" if n % 2 else MARKUP.sub(lambda m: "\\" + m.group(), x) for n, x in enumerate(parts))


def goes_on(line: str) -> bool:
    """Whether a line goes on with the paragraph of the line before: then "name: ..." there was no item."""
    return bool(line.strip()) and not line.startswith((" ", "- ")) and not (ITEM.match(line) or SECTION.match(line))


def convert(lines: list[str]) -> None:
    """Changes the lines in place, as autodoc wants it."""
    made: list[str] = []
    kind = "text"  # of what the last line belongs to: text, item, bullet, literal
    inside = 0  # how far the lines of the current section are indented
    for raw, after in zip(lines, [*lines[1:], ""], strict=True):
        line = raw.rstrip()
        if not line:
            made.append("")
            continue
        blank = not made or not made[-1]
        indent = len(line) - len(line.lstrip())
        inside = min(inside, indent)
        text, depth = line.strip(), indent - inside
        if SECTION.match(line):
            made += ["", f"**{text[:-1]}**", ""]
            inside, kind = 4, "text"
        elif depth == 0:
            found = ITEM.match(text)
            was = kind
            if found and not SENTENCE.match(found.group(1)) and not goes_on(after[inside:]):
                kind, shown = "item", [escape(found.group(1)), "    " + escape(found.group(2))]
            elif text.startswith("- "):
                kind, shown = "bullet", ["- " + escape(text[2:])]
            else:
                kind, shown = "text", [escape(text)]
            if kind != was and not blank:
                made.append("")
            made += shown
        elif kind == "literal" or (blank and kind == "text"):
            if kind != "literal":
                made += ["::", ""]
            kind = "literal"
            made.append(" " * max(depth, 4) + text)
        else:
            made.append({"item": "    ", "bullet": "  "}.get(kind, "") + escape(text))
    lines[:] = made
