"""Hook of mkdocs: adds a page of tables for each JSON file of docs/results, and points links to the JSON there."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PAGE = "---\ntitle: {title}\nsearch:\n  exclude: true\n---\n\n[JSON]({title}.json)\n\n{tables}"


def on_files(files: Any, *, config: Any) -> Any:
    """Add these pages to the files; they replace tables that a script left in the folder."""
    sys.path.insert(0, str(Path(config.docs_dir).parent))  # the command `mkdocs` has another module path
    from scripts.tables import rendered

    for json in sorted(Path(config.docs_dir, "results").glob("*.json")):
        place = f"results/{json.stem}.md"
        if there := files.get_file_from_path(place):
            files.remove(there)
        if tables := rendered(json):
            files.append(File.generated(config, place, content=PAGE.format(title=json.stem, tables=tables)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Point a page's links to JSON files to the pages of their tables."""
    folder = posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, f"{link[1]}.md"))
        return f"]({link[1]}.md)" if files.get_file_from_path(place) else link[0]

    return re.sub(r"\]\(([^):\s]*results/[^)\s]+)\.json\)", led, markdown)
