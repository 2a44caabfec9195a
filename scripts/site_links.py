"""Hook of mkdocs: turns links from docs/ to other files of the repository into links to the code's web page."""

import os
import posixpath
import re
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace such links in a page; a link to a missing file stays, so that the build reports it."""
    folder, root = posixpath.dirname(page.file.src_uri), Path(config.docs_dir).parent

    def whole(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(os.path.basename(config.docs_dir), folder, link[1]))
        if target.startswith("docs/") or not (root / target).exists():
            return link[0]
        return f"]({config.repo_url}/blob/main/{target}{link[2] or ''})"

    return re.sub(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)", whole, markdown)
