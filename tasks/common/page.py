"""What the pages of reports/ share: one look, and nothing in them from elsewhere, no script, no font, no picture."""

from pathlib import Path
from typing import Any

_STYLE = Path(__file__).with_name("page.css")


def render_page(template: Path, **values: Any) -> str:
    """Fill a template, which sets `style` into its style element. Values are text, never markup, unless marked as such."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    style = Markup(_STYLE.read_text(encoding="utf-8").rstrip("\n"))
    return environment.from_string(template.read_text(encoding="utf-8")).render(style=style, **values)
