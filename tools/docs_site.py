"""mkdocs hook: pages that live outside docs/ become pages of the site, and links between all of them hold.

README.md is the site's index. CONTRIBUTING.md, CHANGELOG.md, examples/*/README.md and the notebook follow. A link to a
page becomes a link within the site. A link to another file of the repository loses its target and keeps its text.
"""

from __future__ import annotations

import base64
import json
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = "examples/notebook/train.ipynb"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")


def pages() -> dict[str, str]:
    """Path in the repository -> path in the site, of every page outside docs/."""
    found = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
    for readme in sorted((ROOT / "examples").glob("*/README.md")):
        found[f"examples/{readme.parent.name}/README.md"] = f"examples/{readme.parent.name}.md"
    return found | {NOTEBOOK: "examples/notebook.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for source, target in pages().items():
        path = ROOT / source
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    origins = {target: source for source, target in pages().items()}
    target = page.file.src_uri
    source = origins.get(target, f"docs/{target}")

    def replaced(found: re.Match[str]) -> str:
        image, text, link, anchor = found.groups()
        named = os.path.normpath(os.path.join(os.path.dirname(source), link))
        goal = site_path(named)
        if goal is None and (ROOT / named).exists():
            return text  # a file of the repository that the site does not have
        link = os.path.relpath(goal, os.path.dirname(target) or ".") if goal else link  # mkdocs reports a dead link
        return f"{image}[{text}]({link}{anchor or ''})"

    return LINK.sub(replaced, markdown)


def site_path(named: str) -> str | None:
    """Where a path of the repository is in the site; None if it is not there."""
    if named.startswith("docs/") and (ROOT / named).is_file():
        return named.removeprefix("docs/")
    known = pages()
    return known.get(named) or known.get(f"{named}/README.md")


def notebook_page(path: Path) -> str:
    """A notebook with its stored outputs as markdown."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [shown for output in cell.get("outputs", []) if (shown := output_text(output))]
    return "\n\n".join(parts) + "\n"


def output_text(output: dict[str, Any]) -> str:
    """One output of a cell: text as a block, a picture in the page itself."""
    if "text" in output:
        return "```text\n" + "".join(output["text"]).rstrip() + "\n```"
    picture = output.get("data", {}).get("image/png")
    if picture is None:
        return ""
    base64.b64decode(picture, validate=True)  # a damaged picture ends the build
    return f'<img alt="output of the cell above" src="data:image/png;base64,{"".join(picture.split())}">'
