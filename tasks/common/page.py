"""What the pages of reports/ share: one look, and nothing in them from elsewhere, no script, no font, no picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from markupsafe import Markup

_STYLE = Path(__file__).with_name("page.css")


def render_page(template: Path, **values: Any) -> str:
    """Fill a template, which sets `style` into its style element. Values are text, never markup, unless marked as such; the
    filter `code` sets what stands between backticks as code."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["code"] = _code
    style = Markup(_STYLE.read_text(encoding="utf-8").rstrip("\n"))
    return environment.from_string(template.read_text(encoding="utf-8")).render(style=style, **values)


def _code(text: str) -> "Markup":
    from markupsafe import Markup, escape

    parts = (
        escape(part) if n % 2 == 0 else Markup("<code>{}</code>").format(part) for n, part in enumerate(text.split("`"))
    )
    return Markup("").join(parts)
